"""Low-rank matrices for tests, their dense forms, and bounds of their rounding errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.factored import low_rank
from actjax.factored.low_rank import LowRank

LEADS = [(), (3,), (2, 2)]
DTYPES = ("bfloat16", "float32", "float64")
SHAPES = [(6, 3, 5), (1, 1, 1), (4, 1, 7), (3, 5, 4)]
"""d, k, n; in the last shape the rank is above both dimensions."""

SCALES = {
    "ones": (1, 1),
    "left huge": (1e20, 1e-20),
    "right huge": (1e-20, 1e20),
    "both huge": (1e20, 1e17),
    "both tiny": (1e-20, 1e-12),
}
"""Sizes of the factors: some squares overflow float32, the product does not."""

global_norm = jax.jit(low_rank.global_norm)
clip_by_global_norm = jax.jit(low_rank.clip_by_global_norm)

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def factored(seed=0, shape=(6, 3, 5), lead=(), dtype="float32", scale=(1, 1), basis_name=None):
    (d, k, n), rng = shape, np.random.default_rng(seed)
    left, right = rng.normal(size=(*lead, d, k)), rng.normal(size=(*lead, k, n))
    dtype = jnp.dtype(dtype)
    return LowRank((scale[0] * left).astype(dtype), (scale[1] * right).astype(dtype), basis_name)


def of_all_scales(shape, dtype, count=4):
    """Returns a stack with `count` matrices of each of `SCALES`."""
    scaled = [factored(i, shape, (), dtype, s) for s in SCALES.values() for i in range(count)]
    return jax.tree.map(lambda *x: np.stack(x), *scaled)


def f64(x):
    return np.asarray(x, np.float64)


def dense(a):
    return f64(a.left) @ f64(a.right)


def norms(matrices):
    return np.sqrt(np.sum(f64(matrices) ** 2, axis=(-2, -1)))


def size(a):
    """Returns the product of the norms of the factors, to which rounding errors are relative."""
    return norms(a.left) * norms(a.right)


def epsilon(dtype):
    """Returns the epsilon of sums over values of a dtype, at least in float32."""
    return float(jnp.finfo(jnp.promote_types(dtype, "float32")).eps)


def gram_rounding(a):
    """Returns the error of `Σ (leftᵀ left) ∘ (right rightᵀ)`, relative to the squared `size`.

    Sums of d, n and k² terms err by half an eps per term; the other half is for scaling.
    """
    d, n = a.shape[-2:]
    return (d + n + a.rank**2) * epsilon(a.dtype)


def norm_rounding(a):
    """Returns the relative error of the norm: half of that of its square."""
    return gram_rounding(a) / 2 * (size(a) / norms(dense(a))) ** 2


def decomposition_rounding(a):
    """Returns the error of singular values by Weyl's bound, for two QR and one SVD."""
    return (sum(a.shape[-2:]) + a.rank) * epsilon(a.dtype) * size(a)
