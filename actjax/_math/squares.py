"""Sums of squares of many arrays."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import accumulation_dtype
from actjax._shards import is_partitioned

PARTS = 4096
"""Length of the arrays that sums are added up in."""
_MOST_PIECES = 16
"""Most arrays of this length that are added up within the kernel of other sums."""


def sum_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of squares of all arrays, at least in float32.

    XLA for GPUs sums a matrix in two kernels: its rows, and then all of them. Here the rows of all
    arrays are added up together. Devices that share arrays exchange a scalar of each, and no rows.

    Args:
      arrays: real or complex, of any shapes.
    """
    squares = [_squares(x) for x in arrays]
    # Not by promotion, which `jax_numpy_dtype_promotion="strict"` forbids.
    dtypes = (x.dtype for x in squares)
    dtype = max(dtypes, key=lambda x: x.itemsize, default=jnp.dtype(jnp.float32))
    squares = [x.astype(dtype) for x in squares]
    if is_partitioned(arrays):
        return sum(map(jnp.sum, squares), jnp.zeros((), dtype))
    rows = (jnp.sum(x, axis=-1).reshape(-1) if x.ndim else x[None] for x in squares)
    return jnp.sum(sum(map(in_parts, rows), jnp.zeros(PARTS, dtype)))


def in_parts(sums: jax.Array) -> jax.Array:
    """Returns numbers whose sum is that of `sums`, [PARTS].

    XLA for GPUs adds up many such arrays in one kernel, where each sum to a scalar is a kernel of
    its own.

    Args:
      sums: [n].
    """
    count = max(1, -(-sums.size // PARTS))
    zero = np.zeros((), sums.dtype)
    pieces = jax.lax.pad(sums, zero, [(0, count * PARTS - sums.size, 0)]).reshape(count, PARTS)
    if count > _MOST_PIECES:
        return jnp.sum(pieces, 0)
    return functools.reduce(jnp.add, pieces)


def _squares(x: jax.Array) -> jax.Array:
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    return jnp.square(x.astype(accumulation_dtype(x.dtype)))
