"""Rows of a table that integers select, such as embeddings of tokens.

The backward pass keeps the integers. The gradient is a segment sum: row i is the sum of the
cotangents of all tokens with id i.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from actjax._core.checks import check_floating
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep
from actjax._math.precision import accumulation_dtype
from actjax.codecs import Exact


def embedding(
    table: jax.Array,
    ids: jax.Array,
    *,
    fill_value: float = math.nan,
    name: str = "token ids",
) -> jax.Array:
    """Returns the rows `table[ids]`.

    Value and gradient are exact. The backward pass holds only `ids`: a row of the gradient is the
    sum of the cotangents of its tokens, added up in float32 and rounded once. The sum takes a
    float32 array of the shape of `table`.

    An id outside `[0, vocab)`, such as a negative id, selects no row: each number of its output is
    `fill_value`, and its cotangent reaches no row. The default, NaN, makes a loss that reads it NaN
    (the mode "fill" of `jnp.take`, which however counts negative ids from the end); 0 is for
    padding such as -1.

    Source: the matrix `LT_W` of Collobert et al., arXiv:1103.0398, equation 1.

    Args:
      table: [vocab, d].
      ids: [...] integers of any integer dtype.
      fill_value: number in the output of an id outside the table.
      name: the name of the kept ids in `actjax.explain`.

    Returns:
      [..., d] in the dtype of `table`.

    Raises:
      ValueError: `table` is not a matrix with rows.
      TypeError: `table` is not floating point, or `ids` are not integers.
    """
    check_floating("table", table)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"`table` must be [vocab, d] with vocab > 0, got {table.shape}.")
    dtype: Any = getattr(ids, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`ids` must be an array of integers, got {dtype or type(ids).__name__}:"
            " cast it with `jnp.asarray(ids, jnp.int32)`."
        )
    return _embedding(_Table(table.shape[0], table.dtype, fill_value, name), table, ids)


@dataclasses.dataclass(frozen=True)
class _Table:
    """The static properties of a table.

    Attributes:
      vocab: number of rows.
      dtype: dtype of the table.
      fill_value: as for `embedding`.
      name: as for `embedding`.
    """

    vocab: int
    dtype: Any
    fill_value: float
    name: str


@functools.partial(ReverseMode, nondiff_argnums=(0,))
def _embedding(static: _Table, table: jax.Array, ids: jax.Array) -> jax.Array:
    rows = table.at[_indices(ids, static.vocab)]
    return rows.get(mode="fill", fill_value=static.fill_value, out_sharding=_of_tokens(ids, table))


def _of_tokens(ids: jax.Array, table: jax.Array) -> NamedSharding | None:
    """Returns the sharding of the embeddings of ids; None without explicit mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return None
    tokens, features = jax.typeof(ids).sharding.spec, jax.typeof(table).sharding.spec[-1]
    return NamedSharding(mesh, PartitionSpec(*tokens, None if features in tokens else features))


def _indices(ids: jax.Array, vocab: int) -> jax.Array:
    """Returns ids with `vocab` in place of those outside the table."""
    ids = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)
    # JAX (0.10) scatters to the row of the lowest 32 bits of an id in uint64.
    return jnp.where((ids >= 0) & (ids < vocab), ids, vocab)


def _embedding_fwd(static, table, ids):
    with jax.named_scope("actjax.embedding"):
        ids, held = keep(ids, Exact(), None, "embedding", static.name)
        return _embedding(static, table, ids), held


def _embedding_bwd(static, ids, dy):
    with jax.named_scope("actjax.embedding"):
        wide = accumulation_dtype(dy.dtype)

        def summed(ids: jax.Array, dy: jax.Array) -> jax.Array:
            rows = jnp.zeros((static.vocab, dy.shape[-1]), wide).at[_indices(ids, static.vocab)]
            return rows.add(dy.astype(wide), mode="drop")

        mesh, run = jax.sharding.get_abstract_mesh(), summed
        if AxisType.Explicit in mesh.axis_types:
            # A scatter does not say itself how tokens that are divided over devices are summed.
            spec = PartitionSpec(None, jax.typeof(dy).sharding.spec[-1])
            auto: Any = jax.sharding.auto_axes
            run = auto(summed, out_sharding=NamedSharding(mesh, spec))
        dtable = run(ids, dy)
    return dtable.astype(static.dtype), None


_embedding.defvjp(_embedding_fwd, _embedding_bwd)
