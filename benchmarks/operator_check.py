"""Comparison of operators' gradients on this device with those in float64 at the decoded inputs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import actjax
from actjax import kernels

_HALF = 2.0**-7
"""Largest relative error of a gradient in bfloat16: a few successive roundings of 2^-9."""
_TOKENS, _WIDTH, _FFN, _HEAD = 512, 256, 341, 64


class Case(NamedTuple):
    """An operator to check.

    Attributes:
      run: a function from codecs, a key (or several), and arrays to the value.
      codecs: codecs of the first arrays; the gradient is compared at the decoded arrays.
      shapes: shapes of the arrays.
    """

    run: Callable[..., Any]
    codecs: tuple[actjax.Codec, ...]
    shapes: tuple[tuple[int, ...], ...]


_X, _SCALE, _W = (_TOKENS, _WIDTH), (_WIDTH,), (_WIDTH, 192)
_QKV = (2, 256, 4, _HEAD)
_FOUR = actjax.Quantized(4)
_DITHER = actjax.Quantized(2, rounding="dither")


def _attention(codec: Any, key: Any, *qkv: jax.Array) -> jax.Array:
    return actjax.attention(*qkv, codec=codec, key=key)


def _linear(codec: Any, key: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return actjax.linear(x, w, codec=codec[0], key=key)


def _norm(codec: Any, key: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    return actjax.rms_norm(x, scale, codec=codec[0], key=key)


def _norm_linear(codec: Any, key: Any, x: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
    # In a tuple: a single key would be folded first.
    return actjax.norm_linear(x, scale, w, codec=codec[0], key=(key,))  # type: ignore[arg-type]


def _swiglu(codec: Any, key: Any, gate: jax.Array, up: jax.Array) -> jax.Array:
    return actjax.swiglu(gate, up, codec=codec, key=key)


def _swiglu_linear(codec: Any, key: Any, gate: jax.Array, up: jax.Array, w: Any) -> jax.Array:
    return actjax.swiglu_linear(gate, up, w, codec=codec, key=key)


def _cross_entropy(codec: Any, key: Any, hidden: jax.Array, head: jax.Array) -> jax.Array:
    del codec, key
    targets = jnp.arange(hidden.shape[0]) * 7 % head.shape[1]
    return actjax.cross_entropy(hidden, head, targets)


_EXACT = actjax.Exact()
_GATES = ((_TOKENS, _FFN),) * 2
CASES: dict[str, Case] = {
    "linear": Case(_linear, (_EXACT,), (_X, _W)),
    "linear, points": Case(_linear, (actjax.PointApproximation(points=16),), (_X, _W)),
    "linear, 4 bits": Case(_linear, (_FOUR,), (_X, _W)),
    "rms_norm": Case(_norm, (_EXACT,), (_X, _SCALE)),
    "rms_norm, 4 bits": Case(_norm, (_FOUR,), (_X, _SCALE)),
    "norm_linear, 4 bits": Case(_norm_linear, (_FOUR,), (_X, _SCALE, _W)),
    "norm_linear, 2 bits, dither": Case(_norm_linear, (_DITHER,), (_X, _SCALE, _W)),
    "swiglu": Case(_swiglu, (_EXACT,) * 2, _GATES),
    "swiglu, 4 and 2 bits": Case(_swiglu, (_FOUR, _DITHER), _GATES),
    "swiglu_linear, 4 bits": Case(_swiglu_linear, (_FOUR,) * 2, (*_GATES, (_FFN, 192))),
    "attention": Case(_attention, (_EXACT,) * 3, (_QKV,) * 3),
    "attention, 4 bits": Case(_attention, (_FOUR,) * 3, (_QKV,) * 3),
    "cross_entropy": Case(_cross_entropy, (), (_X, (_WIDTH, 1000))),
}


def check(case: Case, seed: int, implementation: kernels.Implementation | None) -> dict[str, Any]:
    """Computes gradients in bfloat16 on random inputs, and compares them with float64.

    Args:
      case: what to check.
      seed: seed of the inputs.
      implementation: implementation of the kernels.

    Returns:
      `error`, the largest relative error of a gradient, and `ok`.
    """
    keys = jax.random.split(jax.random.key(seed), len(case.shapes) + 2)
    arrays = [
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys[2:], case.shapes, strict=True)
    ]
    # One key for each codec, so that the operator decodes the same numbers.
    several = tuple(jax.random.split(keys[0], max(1, len(case.codecs))))
    key = several if len(case.codecs) > 1 else several[0]

    def gradients(codecs: Any, *arrays: jax.Array) -> Any:
        value, pullback = jax.vjp(functools.partial(case.run, codecs, key), *arrays)
        cotangent = jax.random.normal(keys[1], value.shape, jnp.float32).astype(jnp.bfloat16)
        return pullback(cotangent.astype(value.dtype))

    with kernels.use(implementation):
        got = jax.jit(functools.partial(gradients, case.codecs))(*arrays)
        decoded = list(arrays)
        for i, (codec, one) in enumerate(zip(case.codecs, several, strict=False)):
            merged = (
                arrays[i].reshape(*arrays[i].shape[:2], -1) if arrays[i].ndim > 2 else arrays[i]
            )
            round_trip = jax.jit(lambda x, k, codec=codec: codec.decode(codec.encode(x, k)))
            decoded[i] = round_trip(merged, one).reshape(arrays[i].shape)
    with jax.enable_x64(True), kernels.use("reference"):
        wide = [x.astype(jnp.float64) for x in decoded]
        want = jax.jit(functools.partial(gradients, (_EXACT,) * len(case.codecs)))(*wide)
        errors = [_relative_error(g, w) for g, w in zip(got, want, strict=True)]
    return {"error": max(errors), "ok": max(errors) <= _HALF}


def _relative_error(got: jax.Array, want: jax.Array) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(a).all():
        return float("inf")
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
