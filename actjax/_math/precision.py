"""How products are accumulated: in float32 at least, whatever the operands are stored in."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype that sums over `dtypes` are taken in: float32, or float64 if one is."""
    return jnp.dtype(jnp.result_type(*dtypes, jnp.float32))


def matmul(a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """Returns `a @ b`, accumulated and returned in the accumulation dtype of both.

    Args:
      a: [..., m].
      b: [m, n], or a stack of them, [..., m, n].
      precision: as for `jax.numpy.matmul`; None lets a device round operands in float32.
    """
    dtype = accumulation_dtype(a.dtype, b.dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)


def contract_tokens(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """Returns `aᵀ b` over all leading axes, [..., m] and [..., n] to [m, n], accumulated likewise.

    Leading axes are contracted as they are, not flattened first, so that a batch that is
    sharded over devices is reduced in place.

    Args:
      a: [..., m].
      b: [..., n].
      precision: as for `jax.numpy.matmul`; None lets a device round operands in float32.
    """
    axes = tuple(range(a.ndim - 1))
    dtype = accumulation_dtype(a.dtype, b.dtype)
    return jnp.tensordot(a, b, axes=(axes, axes), precision=precision, preferred_element_type=dtype)


def row_major(x: jax.Array) -> jax.Array:
    """Returns `x`, whose last axis the compiled program has to lay out as the fastest.

    XLA may else choose the transposed layout for a factor of a product, and with it for the stack
    of layers that it is a slice of: which is then copied, whole, before the loop and after it.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
