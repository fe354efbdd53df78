"""Products that accumulate at least in float32, and quotients of scales of any size."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from actjax._shards import is_partitioned


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the accumulation dtype: float64 if one of `dtypes` is float64, else float32."""
    return common_dtype(*dtypes, jnp.float32)


def common_dtype(*operands: Any) -> jnp.dtype:
    """Returns the dtype that JAX promotes arrays, numbers or dtypes to, even where it may not.

    `jax.numpy_dtype_promotion` may forbid that an operation promotes its operands.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.result_type(*operands))


def promoted(*operands: jax.typing.ArrayLike) -> list[jax.Array]:
    """Returns arrays and numbers in their common dtype."""
    dtype = common_dtype(*operands)
    return [jnp.asarray(x, dtype) for x in operands]


def product_dtype(x: jax.Array, *dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype of products of `x` that are rounded next, in programs for this backend.

    Matrix units of GPUs and TPUs add up products of 16-bit operands in float32 and can round the
    sums before they write them, which halves what they write and saves a conversion. XLA for CPUs
    (JAX 0.10) computes such products several times slower: there it is the accumulation dtype. So
    it is on several devices, which exchange sums.

    Args:
      x: an operand.
      *dtypes: of other operands, and of the result.
    """
    narrow = common_dtype(x.dtype, *dtypes)
    rounds = narrow.itemsize == 2 and jax.default_backend() in ("gpu", "tpu")
    return narrow if rounds and not is_partitioned(x) else accumulation_dtype(narrow)


def matmul(
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns `a @ b`, accumulated in the accumulation dtype of both.

    Args:
      a: [..., m].
      b: [m, n], or a stack of them, [..., m, n].
      precision: as for `jax.numpy.matmul`; None lets a device round float32 operands.
      dtype: of the result, as `product_dtype` returns it; None for the accumulation dtype.
    """
    dtype = dtype or accumulation_dtype(a.dtype, b.dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)


def matmul_transposed(a: jax.Array, b: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Returns `a @ bᵀ`, accumulated in the accumulation dtype of both.

    One product that sums over the last axes: of an explicit transpose, XLA for CPUs (JAX 0.10)
    converts both bfloat16 operands to float32, which takes four times as long.

    Args:
      a: [..., n].
      b: [m, n].
      dtype: as for `matmul`.
    """
    axes = (((a.ndim - 1,), (1,)), ((), ()))
    dtype = dtype or accumulation_dtype(a.dtype, b.dtype)
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def contract_tokens(
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns `aᵀ b`, [m, n], summed over all leading axes in the accumulation dtype.

    Leading axes are not flattened first, so that a batch sharded over devices is reduced in place.

    Args:
      a: [..., m].
      b: [..., n].
      precision: as for `jax.numpy.matmul`; None lets a device round float32 operands.
      dtype: as for `matmul`.

    Raises:
      ValueError: the leading axes differ.
    """
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            "two arrays [..., m] and [..., n] that are summed over their tokens must agree in their"
            f" leading axes, got {a.shape} and {b.shape}."
        )
    if a.ndim == 2:
        # XLA for CPUs (JAX 0.10) converts bfloat16 operands to float32, which takes twice as long,
        # if it is the only axis of tokens that comes first in both.
        a, b = a[None], b[None]
    axes = tuple(range(a.ndim - 1))
    dtype = dtype or accumulation_dtype(a.dtype, b.dtype)
    sharding = _of_last_axes(a, b)
    if sharding is not None:
        numbers = ((axes, axes), ((), ()))
        return jax.lax.dot_general(a, b, numbers, precision, dtype, out_sharding=sharding)
    return jnp.tensordot(a, b, axes=(axes, axes), precision=precision, preferred_element_type=dtype)


def _of_last_axes(a: jax.Array, b: jax.Array) -> NamedSharding | None:
    """Returns the sharding of [m, n] for [..., m] and [..., n]; None without explicit mesh axes.

    JAX asks for it where the tokens that are summed are divided over devices: their sum is then
    exchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return None
    aval_a, aval_b = jax.typeof(a), jax.typeof(b)
    rows, columns = aval_a.sharding.spec[-1], aval_b.sharding.spec[-1]
    # One mesh axis cannot divide both.
    return NamedSharding(mesh, PartitionSpec(rows, None if columns == rows else columns))


def by_feature(numbers: jax.typing.ArrayLike, x: jax.Array) -> jax.Array:
    """Returns numbers of features, [d], in the dtype and with the rank of `x`, as [1, ..., 1, d].

    So an operation with `x` does not promote ranks, which `jax.numpy_rank_promotion` may forbid.
    """
    return jax.lax.broadcast_to_rank(jnp.asarray(numbers, x.dtype), x.ndim)


def row_major(x: jax.Array) -> jax.Array:
    """Returns `x` with a row-major layout in the compiled program.

    Otherwise XLA may choose the transposed layout for a factor of a product, and for the stack of
    layers that it is sliced from. It then copies the whole stack before and after the loop.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, and `x` where the scale is zero."""
    # Two factors: the inverse of the largest scales underflows, that of the smallest overflows.
    small = jnp.where(scale < 2.0**-64, 2.0**64, 1)
    factor = jnp.where(scale > 2.0**64, 2.0**-64, small).astype(scale.dtype)
    inverse = 1 / jnp.where(scale > 0, scale * factor, 1)
    return x * factor * inverse
