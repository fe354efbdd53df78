"""Causal grouped-query attention whose memory is linear in the sequence length.

On a GPU this is cuDNN's flash attention. Elsewhere it is the same algorithm (Dao et al.,
"FlashAttention", 2022; backward pass as in Dao, "FlashAttention-2", 2023, Algorithm 2) in plain
JAX: blocks of queries against blocks of keys with a running maximum, blocks above the diagonal
skipped. Both hold q, k, v, the output and the log-sum-exp of the scores.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax.checkpointing import coded_call
from actjax.codecs import Codec, Exact
from actjax.ops.checks import all_exact, check_codecs, check_floating
from actjax.ops.rope import rope as rotate
from actjax.precision import accumulation_dtype
from actjax.tags import keep, keep_output

Implementation = Literal["blockwise", "cudnn", "dense"]

BLOCK = 256
"""Queries and keys per block of the plain JAX form: its score tile fits a CPU's cache."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    rope: tuple[jax.Array, jax.Array] | None = None,
    codec: Codec | Sequence[Codec] = Exact(),
    key: jax.Array | Sequence[jax.Array] | None = None,
    implementation: Implementation | None = None,
    recompute: bool = False,
    merge_heads: bool = False,
    name: str = "",
) -> jax.Array:
    """Returns `softmax(q kᵀ / sqrt(D)) v` for each head.

    The value is exact. With a lossy codec nothing but codes of q, k and v is held, as they are
    before `rope` and with heads merged; the backward pass runs the forward pass again on what they
    decode to, and its gradients are those at the decoded values: biased even where the codec is
    not, and their error reaches all that is upstream (Wei et al., 2026, Theorems 3.2 and 3.3).

    Args:
      q: queries, [B, S, H, D].
      k: keys, [B, S, G, D], with H a multiple of G; query head h reads key head `h // (H / G)`.
      v: values, [B, S, G, D].
      causal: whether position i sees positions up to i alone.
      rope: cosines and sines to rotate q and k by, as for `actjax.rope`; None for no rotation.
      codec: what is kept of q, k and v, or three of such.
      key: randomness of the encoding, or a tuple of a key for each; consumed. Needed if a codec
        draws.
      implementation: "cudnn" (NVIDIA GPU, 16-bit inputs), "blockwise" (any backend), "dense" (all
        scores at once, and derivatives of any order, for which autodiff keeps what it will), or
        None for cuDNN where the default backend is a GPU and the dtype allows it, else blockwise.
        A name that is asked for is used, or raises.
      recompute: whether to hold q, k and v alone and run the forward pass again in the backward
        pass. Worth its two products where nothing else keeps the output. Lossy codecs do so anyway.
      merge_heads: whether to return [B, S, H * D]. It is then the very array that attention
        keeps, so a `linear` that follows and keeps its input exactly costs no second copy.
      name: put before the names that `actjax.explain` gives what is kept.

    Returns:
      [B, S, H, D], or [B, S, H * D], in the dtype of `q`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, a missing key.
      TypeError: inputs that are not floating point, or `codec` is no codec.
    """
    check_attention(q, k, v)
    codecs = check_codecs(codec, ("q", "k", "v"), key)
    form = _form(implementation, q.dtype)
    if all_exact(codecs):
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        run = functools.partial(_recomputed, form) if recompute else form
        merged = run(causal, name, q, k, v)
    else:
        run = from_merged(q, k, causal=causal, implementation=implementation)
        names = [f"{name} {letter}".strip() for letter in "qkv"]
        merged_inputs = tuple(_merge(x) for x in (q, k, v))
        merged = coded_call(run, merged_inputs, rope, codecs, key, "attention", names)
    return merged if merge_heads else merged.reshape(q.shape)


def from_merged(
    q: jax.Array, k: jax.Array, *, causal: bool, implementation: Implementation | None
) -> Callable[[Any, Any], jax.Array]:
    """Returns exact attention as a function of (q, k, v) with merged heads and of RoPE tables.

    Args:
      q: queries, of which shape and dtype are read.
      k: keys, likewise.
      causal: as for `attention`.
      implementation: likewise.
    """
    form, shapes = _form(implementation, q.dtype), (q.shape, k.shape, k.shape)

    def run(merged: tuple[jax.Array, jax.Array, jax.Array], tables: Any) -> jax.Array:
        q, k, v = (x.reshape(shape) for x, shape in zip(merged, shapes, strict=True))
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        return form(causal, "", q, k, v)

    return run


def _form(implementation: Implementation | None, dtype: jnp.dtype) -> Any:
    """Returns the function of an implementation, by its name or the best for this device."""
    if implementation is None:
        gpu = jax.default_backend() == "gpu"
        implementation = "cudnn" if gpu and dtype.itemsize == 2 else "blockwise"
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be one of {get_args(Implementation)} or None,"
            f" got {implementation!r}."
        )
    return _FORMS[implementation]


def check_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raises unless shapes and dtypes fit one another."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_floating(name, array)
    shapes = f"q{q.shape}, k{k.shape}, v{v.shape}"
    if 0 in q.shape:
        raise ValueError(f"`q` must not be empty, got {shapes}.")
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"`q` must be [B, S, H, D] and `k` and `v` both [B, S, G, D], got {shapes}."
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"`q` and `k` must agree in batch, length and head size, got {shapes}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of `q` must be a multiple of those of `k`, got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"`q`, `k` and `v` must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}."
        )


def _keep_inputs(
    name: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns q, k, v to compute with, and to hold."""
    pairs = [
        keep(array, Exact(), None, "attention", f"{name} {letter}".strip())
        for letter, array in (("q", q), ("k", k), ("v", v))
    ]
    forward, kept = zip(*pairs, strict=True)
    return forward, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recomputed(form, causal: bool, name: str, q: jax.Array, k: jax.Array, v: jax.Array):
    return form(causal, name, q, k, v)


def _recomputed_fwd(form, causal, name, q, k, v):
    with jax.named_scope("actjax.attention"):
        inputs, kept = _keep_inputs(name, q, k, v)
        return form(causal, name, *inputs), kept


def _recomputed_bwd(form, causal, name, kept, dout):
    # Without the barrier XLA could merge this forward pass with the first, and keep its output.
    (q, k, v), dout = jax.lax.optimization_barrier((kept, dout))
    with jax.named_scope("actjax.attention"):
        return jax.vjp(functools.partial(form, causal, name), q, k, v)[1](dout)


_recomputed.defvjp(_recomputed_fwd, _recomputed_bwd)


# ----- cuDNN


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cudnn(causal: bool, name: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    del name
    return _merge(_cudnn_call(causal, q, k, v))


def _cudnn_call(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CudnnResiduals:
    """The leaves of the pullback of cuDNN's attention, its output among them merged.

    Attributes:
      leaves: arrays.
      treedef: how they form the pullback again. Static.
      outputs: positions of the output among the leaves. Static.
      shape: shape of the output, [B, S, H, D]. Static.
    """

    leaves: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    outputs: Any = dataclasses.field(metadata={"static": True})
    shape: Any = dataclasses.field(metadata={"static": True})


def _cudnn_fwd(causal, name, q, k, v):
    with jax.named_scope("actjax.attention"):
        inputs, _ = _keep_inputs(name, q, k, v)
        # The leaves of the pullback are what cuDNN's own backward pass needs. The output is one
        # of them, known by identity; it is held as the merged array that is returned.
        out, pullback = jax.vjp(functools.partial(_cudnn_call, causal), *inputs)
        merged = keep_output(_merge(out), "attention", f"{name} output".strip())
        leaves, treedef = jax.tree.flatten(pullback)
        outputs = tuple(i for i, leaf in enumerate(leaves) if leaf is out)
        leaves = [merged if leaf is out else leaf for leaf in leaves]
    return merged, _CudnnResiduals(leaves, treedef, outputs, out.shape)


def _cudnn_bwd(causal, name, residuals, dout):
    del causal, name
    shape = residuals.shape
    leaves = list(residuals.leaves)
    for i in residuals.outputs:
        leaves[i] = leaves[i].reshape(shape)
    with jax.named_scope("actjax.attention"):
        return jax.tree.unflatten(residuals.treedef, leaves)(dout.reshape(shape))


_cudnn.defvjp(_cudnn_fwd, _cudnn_bwd)


# ----- plain JAX, in blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(causal: bool, name: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    del name
    return _merge(_blockwise_forward(causal, q, k, v)[0])


def _blockwise_fwd(causal, name, q, k, v):
    with jax.named_scope("actjax.attention"):
        inputs, kept = _keep_inputs(name, q, k, v)
        out, lse = _blockwise_forward(causal, *inputs)
        merged = keep_output(_merge(out), "attention", f"{name} output".strip())
        lse = keep_output(lse, "attention", f"{name} log-sum-exp".strip())
    return merged, (kept, merged, lse)


def _blockwise_bwd(causal, name, residuals, dout):
    del name
    (q, k, v), out, lse = residuals
    with jax.named_scope("actjax.attention"):
        wide = accumulation_dtype(q.dtype)
        shape = q.shape
        product = dout.reshape(shape).astype(wide) * out.reshape(shape).astype(wide)
        delta = _heads_first(product.sum(-1, keepdims=True))[..., 0]
        return _blockwise_backward(causal, q, k, v, dout.reshape(shape), lse, delta)


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _merge(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, S, H, D] to [B, H, S, D]."""
    return jnp.swapaxes(x, 1, 2)


def _blocks(x: jax.Array, groups: int) -> jax.Array:
    """[B, S, H, D] to [blocks, B, groups, H / groups, block, D], padded with zeros."""
    batch, length, heads, size = x.shape
    block = min(BLOCK, length)
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, block, groups, heads // groups, size)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _unblocks(x: jax.Array, length: int) -> jax.Array:
    """Inverse of `_blocks`."""
    count, batch, groups, shared, block, size = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, groups * shared, size)
    return x[:, :length]


def _scores(
    causal: bool, length: int, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Scores of query block i [b, g, h, s, d] on key block j [b, g, 1, t, d]: [b, g, h, s, t]."""
    wide = accumulation_dtype(q.dtype)
    scores = jnp.einsum("bghsd,bgtd->bghst", q, k[:, :, 0], preferred_element_type=wide)
    rows = i * q.shape[-2] + jnp.arange(q.shape[-2])[:, None]
    columns = j * k.shape[-2] + jnp.arange(k.shape[-2])
    seen = (columns <= rows) & (columns < length) if causal else columns < length
    return jnp.where(seen, scores / math.sqrt(q.shape[-1]), -jnp.inf)


def _blockwise_forward(
    causal: bool, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, S, H, D] and the log-sum-exp of the scores [B, H, S]."""
    length, groups, wide = q.shape[1], k.shape[2], accumulation_dtype(q.dtype)
    qs, ks, vs = (_blocks(x, groups) for x in (q, k, v))

    def one_query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add_key_block(j, carry):
            largest, total, out = carry
            scores = _scores(causal, length, qs[i], ks[j], i, j)
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

        shape = qs.shape[1:]
        # A finite start: every query sees a key of its first block, and -inf - -inf is NaN.
        start = jnp.full(shape[:-1], jnp.finfo(wide).min)
        carry = (start, jnp.zeros(shape[:-1], wide), jnp.zeros(shape, wide))
        stop = i + 1 if causal else len(ks)
        largest, total, out = jax.lax.fori_loop(0, stop, add_key_block, carry)
        return (out / total[..., None]).astype(q.dtype), largest + jnp.log(total)

    out, lse = jax.lax.map(one_query_block, jnp.arange(len(qs)))
    lse = _heads_first(_unblocks(lse[..., None], length))[..., 0]
    return _unblocks(out, length), lse


def _blockwise_backward(
    causal: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk, dv; `lse` and `delta = Σ out dout` are [B, H, S] in the wide dtype."""
    length, groups, wide = q.shape[1], k.shape[2], accumulation_dtype(q.dtype)
    scale = 1 / math.sqrt(q.shape[-1])
    qs, ks, vs, douts = (_blocks(x, groups) for x in (q, k, v, dout))
    lses, deltas = (_blocks(_heads_first(x[..., None]), groups) for x in (lse, delta))

    def one_key_block(dqs: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple]:
        k_j, v_j = ks[j][:, :, 0], vs[j][:, :, 0]

        def add_query_block(i, carry):
            dqs, dk, dv = carry
            weights = jnp.exp(_scores(causal, length, qs[i], ks[j], i, j) - lses[i])
            dv += jnp.einsum(
                "bghst,bghsd->bgtd", weights.astype(q.dtype), douts[i], preferred_element_type=wide
            )
            dweights = jnp.einsum("bghsd,bgtd->bghst", douts[i], v_j, preferred_element_type=wide)
            dscores = (weights * (dweights - deltas[i]) * scale).astype(q.dtype)
            dk += jnp.einsum("bghst,bghsd->bgtd", dscores, qs[i], preferred_element_type=wide)
            dq = jnp.einsum("bghst,bgtd->bghsd", dscores, k_j, preferred_element_type=wide)
            return dqs.at[i].add(dq), dk, dv

        zeros = jnp.zeros(k_j.shape, wide)
        start = j if causal else 0
        dqs, dk, dv = jax.lax.fori_loop(start, len(qs), add_query_block, (dqs, zeros, zeros))
        return dqs, (dk[:, :, None].astype(k.dtype), dv[:, :, None].astype(v.dtype))

    dqs, (dks, dvs) = jax.lax.scan(one_key_block, jnp.zeros(qs.shape, wide), jnp.arange(len(ks)))
    return _unblocks(dqs, length).astype(q.dtype), _unblocks(dks, length), _unblocks(dvs, length)


# ----- plain JAX, all scores


def _dense(causal: bool, name: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    del name
    wide, groups = accumulation_dtype(q.dtype), k.shape[2]
    queries = q.reshape(*q.shape[:2], groups, -1, q.shape[-1])
    scores = jnp.einsum("bsghd,btgd->bghst", queries, k, preferred_element_type=wide)
    scores /= math.sqrt(q.shape[-1])
    if causal:
        seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bghst,btgd->bsghd", weights, v, preferred_element_type=wide)
    return out.astype(q.dtype).reshape(*q.shape[:2], -1)


_FORMS = {"blockwise": _blockwise, "cudnn": _cudnn, "dense": _dense}
