"""Helpers of the tests of `compress_residuals`.

Tests of values run in float64: a tolerance of 1e-12 of the largest entry is a few hundred roundings
of sums of some tens of terms. It allows another order of summation and no other formula.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse
from jax import lax
from jax.extend import core

import actjax
from actjax import Candidate, Exact, Quantized, compress_residuals, explain

KEY = jax.random.key(5)
CODE = Coarse()
"""A codec of few operations. Tests of bits and levels have their own."""
RANDOM = Quantized(2, group=8, rounding="stochastic")
ALIVE = "alive without the backward pass"


def normal(seed: int, *shape: int, dtype: Any = None) -> np.ndarray:
    """Returns numbers of size 1 in the precision of the test, without compiling a program."""
    dtype = dtype or jax.dtypes.canonicalize_dtype(float)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def leave(_: Candidate) -> None:
    """A rule that encodes nothing."""


RULES = Exact(), leave
ONE = normal(0, 6, 8), normal(1, 8, 8)
LAYERS = normal(0, 6, 8), normal(1, 3, 8, 8) / 3


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def total(*trees: Any) -> jax.Array:
    """Returns a scalar whose cotangents are not constant."""
    floats = [y for y in jax.tree.leaves(trees) if is_float(y)]
    return sum((jnp.sum(jnp.sin(1.3 * y + 0.2)) for y in floats), jnp.zeros(()))


def loss_of(fun):
    return lambda *args: total(fun(*args))


def output_and_gradient(fun, args) -> tuple[Any, Any]:
    """Returns `fun(*args)` and the gradient of its total in all floating point arrays."""
    leaves, treedef = jax.tree.flatten(args)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    positions = [i for i in positions if is_float(leaves[i])]

    def loss(floats: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(positions, floats, strict=True):
            merged[i] = x
        output = fun(*jax.tree.unflatten(treedef, merged))
        return total(output), output

    (_, output), gradient = jax.value_and_grad(loss, has_aux=True)([leaves[i] for i in positions])
    return output, gradient


def assert_close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Compares two trees, each array up to `tolerance` times its largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (np.asarray(x, np.float64 if is_float(x) else None) for x in (a, b))
        size = np.max(np.abs(b), initial=0) if is_float(b) else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


def relative_error(got: Any, want: Any) -> float:
    """Returns the norm of the difference of two trees, relative to the norm of the second."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    difference = sum(np.sum((np.float64(a) - np.float64(b)) ** 2) for a, b in pairs)
    return math.sqrt(difference / sum(np.sum(np.float64(b) ** 2) for _, b in pairs))


def held_bytes(fun, *args) -> int:
    """Returns the bytes that `fun` holds for its backward pass, without its arguments."""
    pullback = lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1])  # noqa: E731
    jaxpr = jax.make_jaxpr(pullback)(*args).jaxpr
    held = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)}
    held -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(x.aval.size * x.aval.dtype.itemsize for x in held)


def asked(fun, *args, **options) -> list[Candidate]:
    """Returns the arrays that the rule is asked about, without repetitions."""
    candidates: dict[Candidate, None] = {}
    wrapped = compress_residuals(fun, lambda c: candidates.setdefault(c), **options)
    jax.eval_shape(lambda *args: jax.vjp(wrapped, *args)[1], *args)
    return list(candidates)


def rows_kept(fun, *args) -> list[actjax.Residual]:
    return [r for r in explain(fun, *args).residuals if r.reason != ALIVE]


def lossy(codec, x):
    return codec.decode(codec.encode(x))


def mlp(x, w, v):
    return jnp.tanh(x @ w) @ v


def layer_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + shift


def scanned(layer, **options):
    return lambda x, ws: lax.scan(lambda c, w: (layer(c, w), None), x, ws, **options)[0]


def tanh_layer(x, w):
    return jnp.tanh(x @ w)


def two_products(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)
