"""Logits of a chunk of tokens at a time, for functions of all logits of a batch.

The logits of a batch, [T, V], are often the largest array of a training step. `cross_entropy` and
`token_log_probs` share these functions, so that the logits exist for a chunk of tokens at a time in
both passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.checks import check_floating
from actjax._math.precision import (
    accumulation_dtype,
    contract_tokens,
    matmul,
    matmul_transposed,
    product_dtype,
)
from actjax._shards import Dims, InPieces, Sum, on_shards
from actjax.weights.lora import LoRA

_MIN_CHUNK = 256
"""Least number of tokens of a chunk by default. Each chunk reads and writes the gradient of the
head once, which costs less than the products of the chunk from about `d / 8` tokens on."""


def chunk_of(hidden: Any, head: Any, labels: Any, mask: Any, chunk: int | None) -> int:
    """Returns the tokens of a chunk, at most all of them, or raises if the arguments do not fit.

    Args:
      hidden: as for `cross_entropy`; likewise the other arguments.
      head: output projection.
      labels: of the tokens.
      mask: weights of the tokens, or None.
      chunk: tokens per chunk, or None.

    Raises:
      ValueError: as for `cross_entropy`.
      TypeError: as for `cross_entropy`.
    """
    if isinstance(head, LoRA):
        raise TypeError(
            "`head` is a LoRA, which only linear operators accept: pass `head.merged()`."
        )
    _check(hidden, head, labels, mask, chunk)
    if chunk is None:
        chunk = max(_MIN_CHUNK, head.shape[0] // 4)
    return min(chunk, labels.size)


def indices(labels: jax.Array) -> jax.Array:
    """Returns labels as integers of at least 32 bits: in 8 bits, V = 256 would be 0."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def weights_of(labels: jax.Array, mask: jax.Array | None, vocabulary: int, dtype: Any) -> jax.Array:
    """Returns the weights of the tokens, NaN for a label outside the vocabulary.

    Args:
      labels: integers of at least 32 bits, [...].
      mask: weights, [...], where 0 a label may have any value; None for weights of 1.
      vocabulary: number of tokens of the vocabulary.
      dtype: of the weights.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if mask is None else mask
    weights = weights.astype(dtype)
    outside = (labels < 0) | (labels >= vocabulary)
    return jnp.where(outside & (weights != 0), jnp.nan, weights)


def on_tokens(
    function: Callable[..., Any],
    hidden: jax.Array,
    head: jax.Array,
    others: Sequence[jax.Array],
    outputs: Callable[[Dims], Any],
) -> Any:
    """Returns `function(hidden, head, *others)`, each device taking its own tokens.

    XLA would cut the loop over chunks so that each chunk is gathered from all devices. Here the
    head is gathered once, and the gradient of the head added up once, after the loop.

    Args:
      function: from these arrays to results.
      hidden: [..., d].
      head: [d, V].
      others: arrays with an entry for each token, [...], or scalars.
      outputs: from the `Dims` of `hidden` to the `Dims` of the results.
    """
    tokens = tuple(f"tokens{i}" for i in range(hidden.ndim - 1))
    of_hidden = Dims((*tokens, None))
    of_others = (Dims(tokens[: x.ndim]) for x in others)
    inputs = (of_hidden, Dims.whole(head), *of_others)
    return on_shards(function, (hidden, head, *others), inputs, outputs(of_hidden))


def over_chunks(
    body: Callable[..., Any], carry: Any, chunk: int, hidden: jax.Array, *by_token: jax.Array
) -> tuple[Any, Any]:
    """Scans `body` over chunks of tokens, and calls it once more for a shorter last chunk.

    Padding the last chunk instead would copy `hidden`.

    Args:
      body: from the carry and a chunk of each array to the carry, and arrays [c, ...] or None,
        which are concatenated to [T, ...].
      carry: its first value.
      chunk: tokens of a chunk.
      hidden: [..., d].
      *by_token: arrays with an entry for each token, [...].
    """
    features = hidden.shape[-1]
    arrays = (hidden.reshape(-1, features), *(x.reshape(-1) for x in by_token))
    tokens = arrays[0].shape[0]
    chunk = min(chunk, tokens)
    in_full_chunks = tokens - tokens % chunk
    stacked = [x[:in_full_chunks].reshape(-1, chunk, *x.shape[1:]) for x in arrays]
    carry, ys = jax.lax.scan(body, carry, tuple(stacked))
    ys = jax.tree.map(lambda y: y.reshape(in_full_chunks, *y.shape[2:]), ys)
    if in_full_chunks < tokens:
        carry, y = body(carry, tuple(x[in_full_chunks:] for x in arrays))
        ys = jax.tree.map(lambda *parts: jnp.concatenate(parts), ys, y)
    return carry, ys


def chunk_logits(h: jax.Array, head: jax.Array) -> jax.Array:
    """Returns the logits of a chunk, [c, V], in the accumulation dtype."""
    return matmul(h, head.astype(h.dtype))


def picked(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Returns the logit of each label, [c]."""
    # Labels of masked tokens may be outside the vocabulary.
    label = jnp.clip(label, 0, logits.shape[-1] - 1)
    return jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]


def is_label(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Returns 1 for the logit of each label and 0 for all others, [c, V]."""
    is_same = jnp.arange(logits.shape[-1])[None] == label[:, None]
    return is_same.astype(logits.dtype)


def gradients(
    add_chunk: Callable[..., tuple[Any, jax.Array]],
    total: Any,
    finish: Callable[[jax.Array], jax.Array] | None,
    chunk: int,
    all_tokens: int,
    hidden: jax.Array,
    head: jax.Array,
    *by_token: jax.Array,
) -> tuple[Any, Sum | InPieces | None, jax.Array]:
    """Returns the last `total`, and the gradients of the head and of `hidden`.

    For `on_tokens`: the arrays are those of this device.

    Args:
      add_chunk: from `total` and a chunk of `hidden` and of each array by token to `total` and the
        gradient of the logits of the chunk, [c, V].
      total: a carry.
      finish: from the sum over all tokens to the gradient of the head; None for no such gradient.
      chunk: tokens of a chunk.
      all_tokens: tokens of all devices.
      hidden: [..., d].
      head: [d, V].
      *by_token: arrays with an entry for each token, [...].
    """
    dtype, features = hidden.dtype, hidden.shape[-1]
    tokens = hidden.size // features
    wide = accumulation_dtype(dtype)
    in_pieces = _is_smaller_in_pieces(head, dtype, tokens, all_tokens // tokens)

    def body(carry: Any, slices: Any) -> Any:
        total, dhead = carry
        h, *_ = slices
        total, dlogits = add_chunk(total, *slices)
        dlogits = dlogits.astype(dtype)
        dh = matmul_transposed(dlogits, head.astype(dtype), product_dtype(dlogits)).astype(dtype)
        if dhead is not None:
            dhead += contract_tokens(h, dlogits)
        kept_dlogits = dlogits if finish is not None and in_pieces else None
        return (total, dhead), (dh, kept_dlogits)

    dhead = jnp.zeros(head.shape, wide) if finish is not None and not in_pieces else None
    # Chunks may be small where they do not read and write the gradient of the head.
    chunk = min(chunk, _PIECES_CHUNK) if in_pieces else chunk
    (total, dhead), (dhidden, dlogits) = over_chunks(body, (total, dhead), chunk, hidden, *by_token)
    flat = hidden.reshape(-1, features)
    if finish is not None:
        # One row at a time would be as exact: rows do not depend on each other.
        rows, of = len(head), lambda rows: contract_tokens(jnp.take(flat, rows, axis=1), dlogits)
        dhead = InPieces(of, rows, finish, _PIECES) if in_pieces else Sum(dhead, finish)
    return total, dhead, dhidden.reshape(hidden.shape)


_PIECES = 8
"""Pieces in which the gradient of the head is computed where that takes less memory."""
_PIECES_CHUNK = 512
"""Largest number of tokens of a chunk there."""


def _is_smaller_in_pieces(head: jax.Array, dtype: Any, tokens: int, devices: int) -> bool:
    """Returns whether gradients of all logits take less memory than a sum of the head's gradient.

    With gradients of all logits in `dtype`, [T, V], the gradient of the head is computed in pieces.
    Otherwise a sum in the accumulation dtype, [d, V], is carried from chunk to chunk.
    """
    d, wide = head.shape[0], accumulation_dtype(dtype)
    result = d / devices * head.dtype.itemsize
    carried = d * wide.itemsize + (0 if devices == 1 and wide == head.dtype else result)
    stored = tokens * jnp.dtype(dtype).itemsize + result + d / _PIECES * wide.itemsize
    return stored < carried


def _check(hidden, head, labels, mask, chunk) -> None:
    check_floating("hidden", hidden)
    check_floating("head", head)
    if head.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != head.shape[0]:
        raise ValueError(
            f"`head` must be [d, V] with d = {hidden.shape[-1:]} features of `hidden`,"
            f" got hidden{hidden.shape} @ head{head.shape}."
        )
    dtype = getattr(labels, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`labels` must be an array of integers, got {dtype or type(labels).__name__}."
        )
    if labels.size == 0:
        raise ValueError(f"`hidden` must hold at least one token, got hidden{hidden.shape}.")
    for name, array in (("labels", labels), ("mask", mask)):
        if array is not None and array.shape != hidden.shape[:-1]:
            raise ValueError(
                f"`{name}` must be {hidden.shape[:-1]} for hidden{hidden.shape}, got {array.shape}."
            )
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be at least 1 token, got {chunk}.")
