"""Bases for a subspace of the gradient: random, or the leading singular vectors of gradients.

For factored gradients these come from QR of their thin factor and the eigenvectors of a small
matrix, and for dense gradients from a randomized range finder (Halko et al., 2011). No dense matrix
is decomposed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.orthogonal import for_each_matrix, householder_basis
from actjax._math.precision import accumulation_dtype, matmul
from actjax.factored.low_rank import is_low_rank

OVERSAMPLING = 8
"""Extra columns of the range finder (Halko et al., section 4.2, recommend 5 to 10)."""
POWER_ITERATIONS = 2
"""Enough for gradients, whose singular values decay slowly (Halko et al., section 4.5)."""


def random_basis(key: jax.Array, shape: tuple[int, ...], orthonormal: bool = False) -> jax.Array:
    """Returns `N(0, 1/k)`, [..., d, k], as in CompAct, or an orthonormal basis of its range.

    Args:
      key: a PRNG key.
      shape: (..., d, k).
      orthonormal: whether the columns are orthonormal.
    """
    normal = jax.random.normal(key, shape, jnp.float32)
    return householder_basis(normal) if orthonormal else normal / shape[-1] ** 0.5


def leading_basis(gradients: list[Any], rank: int, key: jax.Array, name: str) -> jax.Array:
    """Returns the leading left singular vectors, [..., d, rank], of gradients side by side.

    The result is orthonormal even if the gradients have a lower rank or are zero. The entry of
    largest magnitude of each vector is positive.

    Args:
      gradients: dense, [..., d, n], or `LowRank`; gradients of one input share their left factor.
      rank: k.
      key: key of the sketch of dense gradients.
      name: name of the basis, for messages.

    Raises:
      ValueError: factored gradients of a rank below `rank`.
    """
    lefts = list({id(g.left): g.left for g in gradients if is_low_rank(g)}.values())
    if all(map(is_low_rank, gradients)):
        thin = jnp.concatenate(lefts, axis=-1)
        if thin.shape[-1] < rank:
            raise ValueError(
                f"a basis of rank {rank} for `{name}` cannot be taken from gradients of rank"
                f" {thin.shape[-1]}: use a codec of rank {rank} or more in a refresh step."
            )
    else:
        gradients = [g.dense() if is_low_rank(g) else g for g in gradients]
        thin = _sketch(gradients, rank, key)
    wide = accumulation_dtype(thin.dtype)
    q = householder_basis(thin.astype(wide))
    core = _unit(jnp.concatenate([_in_columns(q, g) for g in gradients], axis=-1))
    vectors = for_each_matrix(_eigenvectors, matmul(core, core.mT))
    # `eigh` returns eigenvalues in ascending order.
    return _with_signs(matmul(q, vectors[..., ::-1][..., :rank]))


def _with_signs(vectors: jax.Array) -> jax.Array:
    """Returns the columns of [..., d, k], each with a positive entry of largest magnitude.

    The sign of an eigenvector depends on rounding, and so on the number of devices. Moments that
    are kept across a refresh would change sign with it.
    """
    largest = jnp.argmax(jnp.abs(vectors), axis=-2, keepdims=True)
    return vectors * jnp.where(jnp.take_along_axis(vectors, largest, axis=-2) < 0, -1, 1)


def _eigenvectors(gram: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(gram)[1]


def _unit(matrix: jax.Array) -> jax.Array:
    """Returns a matrix divided by its largest magnitude, so that squares are finite."""
    return _units([matrix])[0]


def _units(matrices: list[jax.Array]) -> list[jax.Array]:
    """Returns matrices [..., d, n] divided by the largest magnitude of all of them."""
    sizes = [jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True) for x in matrices]
    largest = functools.reduce(jnp.maximum, sizes)
    return [x / jnp.where(largest > 0, largest, 1) for x in matrices]


def _in_columns(q: jax.Array, g: Any) -> jax.Array:
    """Returns `qᵀ g`, [..., k, n]."""
    if is_low_rank(g):
        return matmul(matmul(q.mT, g.left), g.right)
    return _times(g.mT, q).mT


def _sketch(gradients: list[jax.Array], rank: int, key: jax.Array) -> jax.Array:
    """Returns columns, [..., d, rank + oversampling], that span most of the range of gradients.

    The gradients are neither joined nor converted to a wider dtype: in a step of a large model,
    copies of those of one layer would decide the peak of memory.
    """
    d = gradients[0].shape[-2]
    width = min(rank + OVERSAMPLING, d)
    ends = np.cumsum([g.shape[-1] for g in gradients])
    normal = jax.random.normal(key, (int(ends[-1]), width), accumulation_dtype(gradients[0].dtype))
    y = _sum_of_products(gradients, jnp.split(normal, ends[:-1]))
    for _ in range(POWER_ITERATIONS):
        q = householder_basis(_unit(y))
        y = _sum_of_products(gradients, _units([_times(g.mT, q) for g in gradients]))
    return _unit(y)


def _sum_of_products(gradients: list[jax.Array], parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, map(_times, gradients, parts))


def _times(g: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `g x`, accumulated at least in float32, with `x` in the dtype of `g`."""
    return matmul(g, x.astype(g.dtype))
