"""Cross-entropy from hidden states, a chunk of tokens at a time.

The logits of a batch, [T, V], are often the largest array of a training step. The forward pass
computes the gradients of a chunk while its logits exist, as in Liger Kernel (Hsu et al., 2024): no
product is computed twice, and no logits are kept.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.checks import check_floating
from actjax._core.tags import keep_output
from actjax._math.precision import (
    accumulation_dtype,
    contract_tokens,
    matmul,
    matmul_transposed,
)
from actjax._shards import Dims, InPieces, Sum, on_shards
from actjax.weights.frozen import FrozenWeight
from actjax.weights.lora import LoRA

_MIN_CHUNK = 256
"""Least number of tokens of a chunk by default. Each chunk reads and writes the gradient of the
head once, which costs less than the products of the chunk from about `d / 8` tokens on."""


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array | FrozenWeight,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    name: str = "",
) -> jax.Array:
    """Returns the mean over tokens of `lse − logit[label] + z_loss lse²`.

    `lse` is the log-sum-exp of the logits. The logits, `hidden @ head`, exist for `chunk` tokens at
    a time, in float32. Value and gradients are exact. The backward pass holds `dhidden` and
    `dhead`, each as large as its primal, and one number. Without differentiation nothing is held.

    Args:
      hidden: [..., d].
      head: output projection, [d, V]. For an `actjax.FrozenWeight` no gradient is computed.
      labels: integers in [0, V), [...]. Where `mask` is 0 they may have any value; elsewhere loss
        and gradients are NaN for a label outside, such as the -100 of other libraries.
      mask: weights of the tokens, [...], 0 for padding; the mean divides by their sum. None for
        weights of 1. Has no gradient.
      z_loss: weight of the squared log-sum-exp (PaLM, Chowdhery et al., 2022, section 5), which
        keeps logits from drifting.
      chunk: tokens per chunk. None for d / 4, at least 256: the logits of a chunk are then a
        fraction of the gradient of the head.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      A scalar in float32 (float64 if `hidden` is); 0 if every token is masked.

    Raises:
      ValueError: shapes that do not fit, or a chunk below one.
      TypeError: `hidden` or `head` is not floating point, `labels` are not integers, or `head` is a
        LoRA.
    """
    if isinstance(head, LoRA):
        raise TypeError(
            "`head` is a LoRA, which only linear operators accept: pass `head.merged()`."
        )
    _check(hidden, head, labels, mask, chunk)
    tokens = labels.size
    if chunk is None:
        chunk = max(_MIN_CHUNK, head.shape[0] // 4)
    weights = jnp.ones(labels.shape, jnp.float32) if mask is None else mask
    weights = weights.astype(accumulation_dtype(hidden.dtype))
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)  # In 8 bits, V = 256 would be 0.
    # Their sum, and with it loss and gradients, is then NaN.
    outside = (labels < 0) | (labels >= head.shape[1])
    weights = jnp.where(outside & (weights != 0), jnp.nan, weights)
    frozen = isinstance(head, FrozenWeight)
    numbers = head.astype(hidden.dtype) if frozen else head
    static = _Static(z_loss, min(chunk, tokens), name, not frozen)
    return _cross_entropy(static, hidden, numbers, labels, weights)


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static arguments of a call.

    Attributes:
      z_loss: as for `cross_entropy`.
      chunk: tokens per chunk, at most all of them.
      name: as for `cross_entropy`.
      with_head: whether the head has a gradient.
    """

    z_loss: float
    chunk: int
    name: str
    with_head: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    static: _Static,
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    def add_up(hidden, head, labels, weights, _):
        def add_chunk(total, slices):
            h, label, weight = slices
            loss, _, _ = _chunk_loss(static.z_loss, h, head, label, weight)
            return total + loss, None

        zero = jnp.zeros((), weights.dtype)
        return _over_chunks(add_chunk, zero, static.chunk, hidden, labels, weights)[0]

    inverse = _inverse_sum(weights)
    return inverse * _on_tokens(add_up, hidden, head, labels, weights, inverse, lambda _: _SUM)


_SUM = Dims((), summed=True)


def _on_tokens(function, hidden, head, labels, weights, inverse, outputs) -> Any:
    """Returns a function of tokens and the head, each device taking its own tokens.

    XLA would cut the loop over chunks so that each chunk is gathered from all devices. Here the
    head is gathered once, and the gradient of the head added up once, after the loop.

    Args:
      function: from hidden states, head, labels, weights and `inverse` to results.
      hidden: as for `cross_entropy`.
      head: as for `cross_entropy`.
      labels: as for `cross_entropy`.
      weights: of the tokens.
      inverse: 1 over the sum of the weights.
      outputs: from the `Dims` of `hidden` to the `Dims` of the results.
    """
    args = (hidden, head, labels, weights, inverse)
    tokens = Dims(tuple(f"tokens{i}" for i in range(labels.ndim)))
    of_hidden = Dims((*tokens.names, None))
    inputs = (of_hidden, Dims.whole(head), tokens, tokens, Dims(()))
    return on_shards(function, args, inputs, outputs(of_hidden))


def _inverse_sum(weights: jax.Array) -> jax.Array:
    """Returns 1 over the sum of the weights, finite if the sum (and with it the loss) is zero."""
    return 1 / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)


def _over_chunks(body, carry, chunk, hidden, labels, weights) -> tuple[Any, Any]:
    """Scans `body` over chunks of tokens, and calls it once more for a shorter last chunk.

    Padding the last chunk instead would copy `hidden`. `body` returns the carry, and arrays
    [c, ...] or None, which are concatenated to [T, ...].
    """
    features = hidden.shape[-1]
    arrays = (hidden.reshape(-1, features), labels.reshape(-1), weights.reshape(-1))
    tokens = labels.size
    chunk = min(chunk, tokens)
    in_full_chunks = tokens - tokens % chunk
    stacked = [x[:in_full_chunks].reshape(-1, chunk, *x.shape[1:]) for x in arrays]
    carry, ys = jax.lax.scan(body, carry, tuple(stacked))
    ys = jax.tree.map(lambda y: y.reshape(in_full_chunks, *y.shape[2:]), ys)
    if in_full_chunks < tokens:
        carry, y = body(carry, tuple(x[in_full_chunks:] for x in arrays))
        ys = jax.tree.map(lambda *parts: jnp.concatenate(parts), ys, y)
    return carry, ys


def _chunk_loss(z_loss, h, head, label, weight):
    """Returns the weighted loss of a chunk, its logits [c, V] and their log-sum-exp [c]."""
    logits = matmul(h, head.astype(h.dtype))
    lse = jax.nn.logsumexp(logits, axis=-1)
    # Labels of masked tokens may be outside the vocabulary.
    label = jnp.clip(label, 0, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
    per_token = lse - picked + z_loss * lse**2
    return jnp.sum(jnp.where(weight > 0, weight * per_token, 0)), logits, lse


def _cross_entropy_fwd(static, hidden, head, labels, weights):
    name = static.name

    def outputs(of_hidden: Dims) -> tuple:
        of_head = Dims((None, None), summed=True) if static.with_head else None
        return _SUM, of_head, of_hidden

    with jax.named_scope("actjax.cross_entropy"):
        inverse = _inverse_sum(weights)
        sums = functools.partial(_sums_and_gradients, static, labels.size)
        total, dhead, dhidden = _on_tokens(sums, hidden, head, labels, weights, inverse, outputs)
        inverse = keep_output(inverse, "cross_entropy", f"{name} inverse sum of mask".strip())
        dhidden = keep_output(dhidden, "cross_entropy", f"{name} gradient of hidden".strip())
        if dhead is not None:
            dhead = keep_output(dhead, "cross_entropy", f"{name} gradient of head".strip())
    # `dhidden` is the gradient of the sum over tokens, whose entries are not small. The gradient of
    # the mean would underflow in float16, and no scaling of the loss could restore it.
    return total * inverse, (dhidden, dhead, inverse)


def _sums_and_gradients(static, all_tokens, hidden, head, labels, weights, inverse) -> Any:
    """Returns the weighted sum of the losses, and its gradients of the head and of `hidden`.

    The gradient of the head is the gradient of the mean, in the dtype of the head.

    Args:
      static: as for `_cross_entropy`.
      all_tokens: tokens of all devices.
      hidden: hidden states of this device; likewise the other arguments.
      head: as for `cross_entropy`.
      labels: as for `cross_entropy`.
      weights: of the tokens.
      inverse: 1 over the sum of the weights of all devices.
    """
    z_loss, dtype = static.z_loss, hidden.dtype
    wide = accumulation_dtype(dtype)
    in_pieces = _is_smaller_in_pieces(head, dtype, labels.size, all_tokens // labels.size)

    def add_chunk(carry, slices):
        total, dhead = carry
        h, label, weight = slices
        loss, logits, lse = _chunk_loss(z_loss, h, head, label, weight)
        softmax = jnp.exp(logits - lse[:, None])
        is_label = jnp.arange(logits.shape[-1]) == label[:, None]
        dlogits = (1 + 2 * z_loss * lse[:, None]) * softmax - is_label
        dlogits = (weight[:, None] * dlogits).astype(dtype)
        dh = matmul_transposed(dlogits, head.astype(dtype)).astype(dtype)
        if dhead is not None:
            dhead += contract_tokens(h, dlogits)
        kept_dlogits = dlogits if static.with_head and in_pieces else None
        return (total + loss, dhead), (dh, kept_dlogits)

    def finish(dhead: jax.Array) -> jax.Array:
        return (dhead * inverse).astype(head.dtype)

    dhead = jnp.zeros(head.shape, wide) if static.with_head and not in_pieces else None
    carry = (jnp.zeros((), weights.dtype), dhead)
    # Chunks may be small where they do not read and write the gradient of the head.
    chunk = min(static.chunk, _PIECES_CHUNK) if in_pieces else static.chunk
    (total, dhead), (dhidden, dlogits) = _over_chunks(
        add_chunk, carry, chunk, hidden, labels, weights
    )
    tokens = hidden.reshape(-1, hidden.shape[-1])
    if static.with_head:
        # One row at a time would be as exact: rows do not depend on each other.
        rows, of = len(head), lambda rows: contract_tokens(jnp.take(tokens, rows, axis=1), dlogits)
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


def _cross_entropy_bwd(static, residuals, dloss):
    del static
    dhidden, dhead, inverse = residuals
    scales = (dloss * inverse, dloss)
    scaled = tuple(
        None if x is None else (scale * x.astype(dloss.dtype)).astype(x.dtype)
        for scale, x in zip(scales, (dhidden, dhead), strict=True)
    )
    return *scaled, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


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
