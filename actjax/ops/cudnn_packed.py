"""cuDNN's attention of packed rows: documents that share a row and see only themselves.

A bias of the scores hides the other documents. For a whole row its bytes would grow with the square
of the length. Here a call of cuDNN takes a chunk of the queries, and a range of the keys that holds
all that the chunk sees, so memory is linear in the length, and time follows the lengths of the
documents. The bias carries the whole mask, and is exact for any numbers in any order; the ranges
only decide which scores are computed.

cuDNN's packed layout, which takes offsets of documents, needs contiguous documents, a fixed number
of them, and a GPU like the H100 or later; it holds a log-sum-exp of a whole row for each document.
JAX 0.10 also gives it wrong offsets for keys with fewer heads than queries.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype
from actjax.ops.mask import Mask

CHUNK = 1024
"""Queries of a call, at most: enough blocks for all multiprocessors of a GPU."""

ONE_CALL = 4096
"""Length of the rows that take one call: the bias takes fewer bytes than the chunks would."""


def cudnn_call(mask: Mask, bias: jax.Array | None, q, k, v) -> jax.Array:
    """Returns the output of cuDNN's attention, [B, S, H, D].

    Args:
      mask: the mask.
      bias: added to the scaled scores, [B, 1, S, T]; None for no bias.
      q: queries, [B, S, H, D].
      k: keys, [B, T, G, D].
      v: values, [B, T, G, D].
    """
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def packed_forward(
    mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, S, H, D] and the log-sum-exp of the scores, float32 [B, H, S + P].

    P positions of padding fill the last chunk.
    """
    rows = _Rows.of(mask, segments)
    length = q.shape[1]
    q, k, v = (rows.padded(x) for x in (q, k, v))

    def add_chunk(i: jax.Array, width: int, results: tuple) -> tuple:
        out, lse = results
        inputs = rows.queries(i, q), *rows.keys(i, width, k, v)
        out_i, pullback = jax.vjp(rows.call(i, width), *inputs)
        (lse_i,) = filter(_is_log_sum_exp, jax.tree.leaves(pullback))
        return rows.with_queries(i, out, out_i), rows.with_queries(i, lse, lse_i, axis=2)

    # Like arrays that exist, so that they are divided over devices as these are.
    lse = jnp.zeros_like(jnp.swapaxes(q[..., 0], 1, 2), jnp.float32)
    out, lse = rows.each_chunk(add_chunk, (jnp.zeros_like(q), lse))
    return out[:, :length], lse


def packed_backward(
    mask: Mask,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk, dv. `out` and `lse` are results of `packed_forward`."""
    rows = _Rows.of(mask, segments)
    length, wide = q.shape[1], accumulation_dtype(q.dtype)
    q, k, v, out, dout = (rows.padded(x) for x in (q, k, v, out, dout))

    def add_chunk(i: jax.Array, width: int, gradients: tuple) -> tuple:
        inputs = rows.queries(i, q), *rows.keys(i, width, k, v)
        recomputed, pullback = jax.vjp(rows.call(i, width), *inputs)
        # The pullback holds the results of the forward pass, which becomes dead code here.
        leaves, treedef = jax.tree.flatten(pullback)
        out_i, lse_i = rows.queries(i, out), rows.queries(i, lse, axis=2)
        leaves = [
            out_i if leaf is recomputed else lse_i if _is_log_sum_exp(leaf) else leaf
            for leaf in leaves
        ]
        dq_i, *terms = jax.tree.unflatten(treedef, leaves)(rows.queries(i, dout))
        dq, *sums = gradients
        return rows.with_queries(i, dq, dq_i), *rows.add_to_keys(i, width, sums, terms)

    # Like arrays that exist, so that they are divided over devices as these are.
    zeros = jnp.zeros_like(q), jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)
    dq, dk, dv = (x[:, :length] for x in rows.each_chunk(add_chunk, zeros))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _is_log_sum_exp(leaf: jax.Array) -> bool:
    """Returns whether a leaf of cuDNN's pullback is the log-sum-exp: the others have 16 bits."""
    return leaf.dtype == jnp.float32


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of S tokens, divided into chunks, and the ranges of keys that the chunks see.

    Attributes:
      mask: the mask.
      length: S.
      count: number of chunks of a row.
      chunk: tokens of a chunk. Rows are padded to `count * chunk` tokens.
      segments: [B, count * chunk].
      widths: numbers of chunks of a range of keys, in ascending order.
      first: for each chunk of queries, the first chunk of keys that a row sees, [count].
      order: the chunks of queries, in ascending order of the widths of their ranges, [count].
      bounds: the chunks `order[bounds[i]:bounds[i + 1]]` have ranges of `widths[i]`.
    """

    mask: Mask
    length: int
    count: int
    chunk: int
    segments: jax.Array
    widths: tuple[int, ...]
    first: jax.Array
    order: jax.Array
    bounds: jax.Array

    @classmethod
    def of(cls, mask: Mask, segments: jax.Array) -> "_Rows":
        batch, length = segments.shape
        count = 1 if length <= ONE_CALL else -(-length // CHUNK)
        # cuDNN takes a bias of even lengths.
        chunk = -(-length // (2 * count)) * 2
        segments = jnp.pad(segments, ((0, 0), (0, count * chunk - length)), mode="edge")
        first, last = (
            x.reshape(batch, count, chunk) // chunk for x in jax.vmap(_extents)(segments)
        )
        chunks = jnp.arange(count)
        first = jnp.maximum(first.min((0, 2)), mask.first_key_block(chunks, chunk))
        last = chunks if mask.causal else last.max((0, 2))
        widths = tuple(sorted({min(2**power, count) for power in range(count.bit_length() + 1)}))
        choice = jnp.searchsorted(jnp.asarray(widths), last - first + 1)
        order = jnp.argsort(choice)
        bounds = jnp.searchsorted(choice[order], jnp.arange(len(widths) + 1))
        return cls(mask, length, count, chunk, segments, widths, first, order, bounds)

    def each_chunk(self, body: Callable[[Any, int, tuple], tuple], carry: tuple) -> tuple:
        """Returns `carry = body(i, width, carry)` after all chunks i of queries, in some order."""
        if self.count == 1:
            return body(0, 1, carry)
        for number, width in enumerate(self.widths):
            carry = jax.lax.fori_loop(
                self.bounds[number],
                self.bounds[number + 1],
                lambda place, carry, width=width: body(self.order[place], width, carry),
                carry,
            )
        return carry

    def padded(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] to [B, count * chunk, ...]."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, self.count * self.chunk - self.length)
        return jnp.pad(x, padding)

    def queries(self, i: Any, x: jax.Array, axis: int = 1) -> jax.Array:
        """Returns the part of chunk i of queries of an array of all chunks."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.chunk, self.chunk, axis)

    def with_queries(self, i: Any, x: jax.Array, part: jax.Array, axis: int = 1) -> jax.Array:
        """Returns `x` with another part of chunk i of queries."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, i * self.chunk, axis)

    def keys(self, i: Any, width: int, *arrays: jax.Array) -> list[jax.Array]:
        """Returns the parts of chunk i's range of keys, [B, width * chunk, ...]."""
        start, size = self._start(i, width), width * self.chunk
        return [jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in arrays]

    def add_to_keys(
        self, i: Any, width: int, sums: Sequence[jax.Array], terms: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns `sums` with `terms` added to the parts of chunk i's range of keys."""
        start = self._start(i, width)
        return [
            jax.lax.dynamic_update_slice_in_dim(x, part + term.astype(x.dtype), start, axis=1)
            for x, part, term in zip(sums, self.keys(i, width, *sums), terms, strict=True)
        ]

    def call(self, i: Any, width: int) -> Callable[..., jax.Array]:
        """Returns attention of chunk i of queries, as a function of these, keys and values."""
        # A range of a single chunk is the chunk of the queries, and cuDNN can skip what follows.
        mask = self.mask if width == 1 else Mask(causal=False, window=None)
        return lambda q, k, v: cudnn_call(mask, self._bias(i, width, q.dtype), q, k, v)

    def _start(self, i: Any, width: int) -> jax.Array | int:
        """Returns the first position of chunk i's range of keys."""
        if width == self.count:
            return 0
        return jnp.minimum(self.first[i], self.count - width) * self.chunk

    def _bias(self, i: Any, width: int, dtype: jnp.dtype) -> jax.Array:
        """Returns the bias [B, 1, chunk, width * chunk] that hides what chunk i does not see."""
        positions = i * self.chunk + jnp.arange(self.chunk)[None, :, None]
        columns = self._start(i, width) + jnp.arange(width * self.chunk)[None, None]
        (key_segments,) = self.keys(i, width, self.segments)
        same = self.queries(i, self.segments)[:, :, None] == key_segments[:, None, :]
        seen = same & self.mask.sees(positions, columns) & (columns < self.length)
        # Padding sees everything: weights of a position that sees nothing might not be finite.
        seen = seen | (positions >= self.length)
        return jnp.where(seen, 0, jnp.finfo(dtype).min / 2).astype(dtype)[:, None]


def _extents(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns, for each of S positions, the first and the last position with its number."""
    size = len(segments)
    _, numbers = jnp.unique(segments, return_inverse=True, size=size)
    positions = jnp.arange(size)
    first = jax.ops.segment_min(positions, numbers, size)
    last = jax.ops.segment_max(positions, numbers, size)
    return first[numbers], last[numbers]
