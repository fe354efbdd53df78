"""Comparison of operators' gradients on this device with those in float64 at the decoded inputs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import actjax
from actjax import kernels
from benchmarks.kernel_cases.case import normal
from benchmarks.kernel_check import relative_error

_HALF = 2.0**-7
"""Largest relative error of a gradient in bfloat16: a few successive roundings of 2^-9."""


class Case(NamedTuple):
    """An operator to check."""

    run: Callable[..., Any]
    """A function of arrays, with the keywords `codec` and `key`, each one or several."""
    codecs: tuple[actjax.Codec, ...]
    """Codecs of the first arrays; the gradient is compared at the decoded arrays."""
    shapes: tuple[tuple[int, ...], ...]


def _norm_linear(*arrays: Any, codec: Any, key: Any) -> jax.Array:
    # In a tuple: a single key would be folded first.
    return actjax.norm_linear(*arrays, codec=codec, key=(key,))  # type: ignore[arg-type]


def _cross_entropy(hidden: jax.Array, head: jax.Array, **_: Any) -> jax.Array:
    targets = jnp.arange(hidden.shape[0]) * 7 % head.shape[1]
    return actjax.cross_entropy(hidden, head, targets)


def _token_log_probs(hidden: jax.Array, head: jax.Array, codec: Any, key: Any) -> jax.Array:
    labels = jnp.arange(hidden.shape[0]) * 7 % head.shape[1]
    return actjax.token_log_probs(hidden, head, labels, codec=codec, key=key)


_X, _SCALE, _W, _GATE = (512, 256), (256,), (256, 192), (512, 341)
_QKV = ((2, 256, 4, 64),) * 3
_EXACT, _FOUR = actjax.Exact(), actjax.Quantized(4)
_DITHER = actjax.Quantized(2, rounding="dither")
_POINTS = actjax.PointApproximation(points=16)
CASES: dict[str, Case] = {
    "linear": Case(actjax.linear, (_EXACT,), (_X, _W)),
    "linear, points": Case(actjax.linear, (_POINTS,), (_X, _W)),
    "linear, 4 bits": Case(actjax.linear, (_FOUR,), (_X, _W)),
    "rms_norm": Case(actjax.rms_norm, (_EXACT,), (_X, _SCALE)),
    "rms_norm, 4 bits": Case(actjax.rms_norm, (_FOUR,), (_X, _SCALE)),
    "norm_linear, 4 bits": Case(_norm_linear, (_FOUR,), (_X, _SCALE, _W)),
    "norm_linear, 2 bits, dither": Case(_norm_linear, (_DITHER,), (_X, _SCALE, _W)),
    "swiglu": Case(actjax.swiglu, (_EXACT,) * 2, (_GATE, _GATE)),
    "swiglu, 4 and 2 bits": Case(actjax.swiglu, (_FOUR, _DITHER), (_GATE, _GATE)),
    "swiglu_linear, 4 bits": Case(actjax.swiglu_linear, (_FOUR,) * 2, (_GATE, _GATE, (341, 192))),
    "attention": Case(actjax.attention, (_EXACT,) * 3, _QKV),
    "attention, 4 bits": Case(actjax.attention, (_FOUR,) * 3, _QKV),
    "cross_entropy": Case(_cross_entropy, (), (_X, (256, 1000))),
    "token_log_probs": Case(_token_log_probs, (_EXACT,), (_X, (256, 1000))),
    "token_log_probs, 4 bits": Case(_token_log_probs, (_FOUR,), (_X, (256, 1000))),
}


def check(case: Case, seed: int) -> dict[str, Any]:
    """Computes gradients in bfloat16 on random inputs, and compares them with float64.

    Returns:
      `error`, the largest relative error of a gradient, and `ok`.
    """
    keys = jax.random.split(jax.random.key(seed), len(case.shapes) + 2)
    arrays = [normal(key, shape) for key, shape in zip(keys[2:], case.shapes, strict=True)]
    # One key for each codec, so that the operator decodes the same numbers.
    codec_keys = tuple(jax.random.split(keys[0], max(1, len(case.codecs))))

    def gradients(codecs: Any, *arrays: jax.Array) -> Any:
        several = len(codecs) > 1
        codec, key = (codecs, codec_keys) if several else ((*codecs, None)[0], codec_keys[0])
        run = functools.partial(case.run, codec=codec, key=key)
        value, pullback = jax.vjp(run, *arrays)
        return pullback(normal(keys[1], value.shape).astype(value.dtype))

    def decoded(codec: actjax.Codec, x: jax.Array, key: jax.Array) -> jax.Array:
        merged = x if x.ndim == 2 else x.reshape(*x.shape[:2], -1)
        return codec.decode(codec.encode(merged, key)).reshape(x.shape)

    results = jax.jit(functools.partial(gradients, case.codecs))(*arrays)
    for i, codec in enumerate(case.codecs):
        arrays[i] = jax.jit(functools.partial(decoded, codec))(arrays[i], codec_keys[i])
    with jax.enable_x64(True), kernels.use("reference"):
        wide = [x.astype(jnp.float64) for x in arrays]
        exact = jax.jit(functools.partial(gradients, (_EXACT,) * len(case.codecs)))(*wide)
        pairs = zip(results, exact, strict=True)
        error = max(relative_error(*(np.asarray(x, np.float64) for x in pair)) for pair in pairs)
    return {"error": error, "ok": error <= _HALF}
