"""Implementations of exact attention: by cuDNN, in blocks, and with all scores at once.

cuDNN is fastest on a GPU. The blockwise implementation is the same algorithm in plain JAX (Dao et
al., "FlashAttention", 2022; backward pass as in Dao, "FlashAttention-2", 2023, Algorithm 2): it
visits blocks of queries and blocks of keys with a running maximum, and skips blocks that see
nothing. Both hold q, k, v, the output and the log-sum-exp of the scores. Packed rows go to cuDNN in
chunks (`actjax.ops.cudnn_packed`). `actjax.ops.splash` is for TPUs.

An implementation is a function of a `Mask`, a name, normalized and rotated q, k and v, and segments
or None. It returns the output with merged heads, [B, S, H * D].
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep, keep_output
from actjax._math.precision import accumulation_dtype
from actjax.codecs import Exact
from actjax.ops.cudnn_packed import cudnn_call, packed_backward, packed_forward
from actjax.ops.mask import Mask
from actjax.ops.splash import splash

BLOCK = 256
"""Queries and keys per block of "blockwise": a tile of scores fits the cache of a CPU."""


def keep_inputs(
    name: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns q, k and v for the forward pass, and q, k and v for the backward pass to hold."""
    pairs = [
        keep(array, Exact(), None, "attention", f"{name} {letter}".strip())
        for letter, array in (("q", q), ("k", k), ("v", v))
    ]
    forward, held = zip(*pairs, strict=True)
    return forward, held


def merge_heads(x: jax.Array) -> jax.Array:
    """[B, S, H, D] to [B, S, H * D]."""
    return x.reshape(*x.shape[:2], -1)


# ----- cuDNN


def _cudnn(mask: Mask, name: str, q, k, v, segments) -> jax.Array:
    if segments is None:
        return _cudnn_whole(mask, name, q, k, v)
    return _cudnn_packed(mask, name, q, k, v, segments)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _cudnn_whole(mask: Mask, name: str, q, k, v) -> jax.Array:
    del name
    return merge_heads(cudnn_call(mask, None, q, k, v))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CudnnResiduals:
    """The leaves of the pullback of cuDNN's attention.

    Attributes:
      leaves: arrays. The output has merged heads.
      treedef: the structure of the pullback. Static.
      outputs: positions of the output among the leaves. Static.
      shape: shape of the output, [B, S, H, D]. Static.
    """

    leaves: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    outputs: Any = dataclasses.field(metadata={"static": True})
    shape: Any = dataclasses.field(metadata={"static": True})


def _cudnn_fwd(mask, name, q, k, v):
    with jax.named_scope("actjax.attention"):
        inputs, _ = keep_inputs(name, q, k, v)
        # The backward pass of cuDNN reads the leaves of the pullback. The output is one
        # of them, recognized by identity; the merged array that is returned is held in its place.
        out, pullback = jax.vjp(functools.partial(cudnn_call, mask, None), *inputs)
        merged = keep_output(merge_heads(out), "attention", f"{name} output".strip())
        leaves, treedef = jax.tree.flatten(pullback)
        outputs = tuple(i for i, leaf in enumerate(leaves) if leaf is out)
        leaves = [merged if i in outputs else leaf for i, leaf in enumerate(leaves)]
    return merged, _CudnnResiduals(leaves, treedef, outputs, out.shape)


def _cudnn_bwd(mask, name, residuals, dout):
    del mask, name
    shape, leaves = residuals.shape, list(residuals.leaves)
    for i in residuals.outputs:
        leaves[i] = leaves[i].reshape(shape)
    with jax.named_scope("actjax.attention"):
        return jax.tree.unflatten(residuals.treedef, leaves)(dout.reshape(shape))


_cudnn_whole.defvjp(_cudnn_fwd, _cudnn_bwd)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _cudnn_packed(mask: Mask, name: str, q, k, v, segments) -> jax.Array:
    del name
    return merge_heads(packed_forward(mask, q, k, v, segments)[0])


def _cudnn_packed_fwd(mask, name, q, k, v, segments):
    with jax.named_scope("actjax.attention"):
        (q, k, v), held = keep_inputs(name, q, k, v)
        out, lse = packed_forward(mask, q, k, v, segments)
        merged = keep_output(merge_heads(out), "attention", f"{name} output".strip())
        lse = keep_output(lse, "attention", f"{name} log-sum-exp".strip())
    return merged, (held, segments, merged, lse)


def _cudnn_packed_bwd(mask, name, residuals, dout):
    del name
    (q, k, v), segments, out, lse = residuals
    out, dout = out.reshape(q.shape), dout.reshape(q.shape)
    with jax.named_scope("actjax.attention"):
        return *packed_backward(mask, q, k, v, segments, out, lse, dout), None


_cudnn_packed.defvjp(_cudnn_packed_fwd, _cudnn_packed_bwd)


# ----- plain JAX, in blocks


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _blockwise(mask: Mask, name: str, q, k, v, segments) -> jax.Array:
    del name
    return merge_heads(_blockwise_forward(mask, q, k, v, segments)[0])


def _blockwise_fwd(mask, name, q, k, v, segments):
    with jax.named_scope("actjax.attention"):
        (q, k, v), held = keep_inputs(name, q, k, v)
        out, lse = _blockwise_forward(mask, q, k, v, segments)
        merged = keep_output(merge_heads(out), "attention", f"{name} output".strip())
        lse = keep_output(lse, "attention", f"{name} log-sum-exp".strip())
    return merged, (held, segments, merged, lse)


def _blockwise_bwd(mask, name, residuals, dout):
    del name
    (q, k, v), segments, out, lse = residuals
    with jax.named_scope("actjax.attention"):
        wide = accumulation_dtype(q.dtype)
        shape = q.shape
        product = dout.reshape(shape).astype(wide) * out.reshape(shape).astype(wide)
        delta = _heads_first(product.sum(-1, keepdims=True))[..., 0]
        dout = dout.reshape(shape)
        return *_blockwise_backward(mask, q, k, v, segments, dout, lse, delta), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, S, H, D] to [B, H, S, D]."""
    return jnp.swapaxes(x, 1, 2)


def _blocks(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, S, H, D] to [blocks, B, kv_heads, H / kv_heads, block, D], padded with zeros."""
    batch, length, heads, size = x.shape
    block = min(BLOCK, length)
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, block, kv_heads, heads // kv_heads, size)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _unblocks(x: jax.Array, length: int) -> jax.Array:
    """Inverse of `_blocks`."""
    count, batch, kv_heads, shared, block, size = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, kv_heads * shared, size)
    return x[:, :length]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Computes the scores of a block of queries on a block of keys.

    Attributes:
      mask: the mask.
      length: S.
      segments: [blocks, B, block], or None.
    """

    mask: Mask
    length: int
    segments: jax.Array | None

    @classmethod
    def of(cls, mask: Mask, segments: jax.Array | None, length: int) -> "_Tile":
        if segments is not None:
            segments = _blocks(segments[..., None, None], 1)[:, :, 0, 0, :, 0]
        return cls(mask, length, segments)

    def scores(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns the scores of query block i on key block j, -inf where nothing is seen.

        Args:
          q: query block, [b, g, h, s, d].
          k: key block, [b, g, 1, t, d].
          i: number of the query block.
          j: number of the key block.

        Returns:
          [b, g, h, s, t] in the accumulation dtype.
        """
        wide = accumulation_dtype(q.dtype)
        scores = jnp.einsum("bghsd,bgtd->bghst", q, k[:, :, 0], preferred_element_type=wide)
        rows = i * q.shape[-2] + jnp.arange(q.shape[-2])[:, None]
        columns = j * k.shape[-2] + jnp.arange(k.shape[-2])[None]
        seen = self.mask.sees(rows, columns) & (columns < self.length)
        if self.segments is not None:
            same = self.segments[i][:, :, None] == self.segments[j][:, None, :]
            seen = jax.lax.broadcast_to_rank(seen, scores.ndim) & same[:, None, None]
        return jnp.where(seen, scores / math.sqrt(q.shape[-1]), -jnp.inf)


def _blockwise_forward(
    mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, S, H, D] and the log-sum-exp of the scores [B, H, S]."""
    length, kv_heads, wide = q.shape[1], k.shape[2], accumulation_dtype(q.dtype)
    qs, ks, vs = (_blocks(x, kv_heads) for x in (q, k, v))
    tile = _Tile.of(mask, segments, length)

    def attend_query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add_key_block(j, carry):
            largest, total, out = carry
            scores = tile.scores(qs[i], ks[j], i, j)
            new_largest = jnp.maximum(largest, scores.max(-1))
            weights = jnp.exp(scores - new_largest[..., None])
            shrink = jnp.exp(largest - new_largest)
            product = jnp.einsum(
                "bghst,bgtd->bghsd", weights.astype(v.dtype), vs[j][:, :, 0],
                preferred_element_type=wide,
            )  # fmt: skip
            return (
                new_largest,
                total * shrink + weights.sum(-1),
                out * shrink[..., None] + product,
            )

        # Like arrays that exist, so that they are divided over devices as these are.
        zeros = jnp.zeros_like(qs[i], wide)
        # The start is finite: where a query sees no key of a block, -inf - -inf would be NaN.
        start = jnp.full_like(zeros[..., 0], jnp.finfo(wide).min)
        carry = (start, jnp.zeros_like(start), zeros)
        first = mask.first_key_block(i, zeros.shape[-2])
        stop = i + 1 if mask.causal else len(ks)
        largest, total, out = jax.lax.fori_loop(first, stop, add_key_block, carry)
        # Every query sees itself, but the padding of a block may see nothing.
        total = jnp.where(total == 0, 1, total)
        return (out / total[..., None]).astype(q.dtype), largest + jnp.log(total)

    out, lse = jax.lax.map(attend_query_block, jnp.arange(len(qs)))
    lse = _heads_first(_unblocks(lse[..., None], length))[..., 0]
    return _unblocks(out, length), lse


def _blockwise_backward(
    mask: Mask,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk, dv. `lse` and `delta = Σ out dout` [B, H, S] are in the wide dtype."""
    length, kv_heads, wide = q.shape[1], k.shape[2], accumulation_dtype(q.dtype)
    scale = 1 / math.sqrt(q.shape[-1])
    qs, ks, vs, douts = (_blocks(x, kv_heads) for x in (q, k, v, dout))
    lses, deltas = (_blocks(_heads_first(x[..., None]), kv_heads) for x in (lse, delta))
    tile = _Tile.of(mask, segments, length)

    def add_key_block(dqs: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple]:
        k_j, v_j = ks[j][:, :, 0], vs[j][:, :, 0]

        def add_query_block(i, carry):
            dqs, dk, dv = carry
            weights = jnp.exp(tile.scores(qs[i], ks[j], i, j) - lses[i])
            dv += jnp.einsum(
                "bghst,bghsd->bgtd", weights.astype(q.dtype), douts[i], preferred_element_type=wide
            )
            dweights = jnp.einsum("bghsd,bgtd->bghst", douts[i], v_j, preferred_element_type=wide)
            dscores = (weights * (dweights - deltas[i]) * scale).astype(q.dtype)
            dk += jnp.einsum("bghst,bghsd->bgtd", dscores, qs[i], preferred_element_type=wide)
            dq = jnp.einsum("bghst,bgtd->bghsd", dscores, k_j, preferred_element_type=wide)
            return dqs.at[i].add(dq), dk, dv

        zeros = jnp.zeros_like(k_j, wide)
        start, stop = mask.query_blocks(j, qs.shape[-2], len(qs))
        dqs, dk, dv = jax.lax.fori_loop(start, stop, add_query_block, (dqs, zeros, zeros))
        return dqs, (dk[:, :, None].astype(k.dtype), dv[:, :, None].astype(v.dtype))

    dqs, (dks, dvs) = jax.lax.scan(add_key_block, jnp.zeros_like(qs, wide), jnp.arange(len(ks)))
    return _unblocks(dqs, length).astype(q.dtype), _unblocks(dks, length), _unblocks(dvs, length)


# ----- plain JAX, all scores


def _dense(mask: Mask, name: str, q, k, v, segments) -> jax.Array:
    del name
    wide, kv_heads = accumulation_dtype(q.dtype), k.shape[2]
    queries = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("bsghd,btgd->bghst", queries, k, preferred_element_type=wide)
    scores /= math.sqrt(q.shape[-1])
    positions = jnp.arange(q.shape[1])
    seen = mask.sees(positions[:, None], positions[None])
    if segments is not None:
        same = segments[:, :, None] == segments[:, None, :]
        seen = jax.lax.broadcast_to_rank(seen, scores.ndim) & same[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bghst,btgd->bsghd", weights, v, preferred_element_type=wide)
    return out.astype(q.dtype).reshape(*q.shape[:2], -1)


IMPLEMENTATIONS = {"blockwise": _blockwise, "cudnn": _cudnn, "dense": _dense, "splash": splash}
