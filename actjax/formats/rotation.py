"""Rotating features by Hadamard matrices, which spreads a large feature over its whole block.

As in QuaRot (Ashkboos et al., 2024), with random signs before the rotation. Without the signs, the
common part of neighboring features would all go into one coordinate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import accumulation_dtype, by_feature


def rotate(x: jax.Array) -> jax.Array:
    """Returns `x` [..., g] with its last axis rotated, in the accumulation dtype.

    A block has the largest power of two that divides g. The map is orthogonal, so it keeps lengths
    and inner products.
    """
    signs, matrix = signs_of(x.shape[-1]), hadamard(block_size(x.shape[-1]))
    return _by_blocks(x * by_feature(signs, x), matrix)


def rotate_back(y: jax.Array) -> jax.Array:
    """Returns the argument of `rotate`; its inverse."""
    signs, matrix = signs_of(y.shape[-1]), hadamard(block_size(y.shape[-1]))
    x = _by_blocks(y, matrix.T)
    return x * by_feature(signs, x)


def block_size(features: int) -> int:
    """Returns the largest power of two that divides `features`."""
    return features & -features


def _by_blocks(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    size = len(matrix)
    wide = accumulation_dtype(x.dtype)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    # The entries are plus and minus one, exact in any dtype; the scale follows after the sum.
    product = jnp.matmul(
        blocks, jnp.asarray(matrix, x.dtype), precision="highest", preferred_element_type=wide
    )
    return (product / np.sqrt(size)).astype(wide).reshape(x.shape)


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Returns Sylvester's matrix, [size, size], symmetric, of plus and minus one."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@functools.cache
def signs_of(features: int) -> np.ndarray:
    """Returns `features` fixed random signs, the same in every process."""
    return np.random.Generator(np.random.PCG64(features)).choice([-1.0, 1.0], features)
