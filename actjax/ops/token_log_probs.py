"""Log-probabilities of tokens from hidden states, a chunk of tokens at a time.

Losses of preferences and policies know the weights of tokens after the forward pass only. The
backward pass therefore computes the logits of a chunk again. The backward pass of `cross_entropy`
only scales gradients that its forward pass computed.
"""

import functools

import jax
import jax.numpy as jnp

from actjax._core.checks import check_codec
from actjax._core.coded_call import decode_late
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep, keep_output
from actjax._math.precision import accumulation_dtype
from actjax._shards import Dims
from actjax.codecs import Codec, Exact
from actjax.ops.chunked_logits import (
    chunk_logits,
    chunk_of,
    gradients,
    indices,
    is_label,
    on_tokens,
    over_chunks,
    picked,
    weights_of,
)
from actjax.weights.frozen import FrozenWeight


def token_log_probs(
    hidden: jax.Array,
    head: jax.Array | FrozenWeight,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    chunk: int | None = None,
    name: str = "",
) -> jax.Array:
    """Returns the log-probability of each label, `logit[label] − lse`, in nats.

    `lse` is the log-sum-exp of the logits. The logits, `hidden @ head`, exist for `chunk` tokens at
    a time in both passes, in float32. The value is exact. The gradients are those at the decoded
    `hidden`: exact by default. With a lossy codec they are biased even if the codec is not, and the
    error of `dhidden` propagates upstream (Wei et al., 2026, Theorems 3.2 and 3.3).

    The backward pass holds `hidden`, in its dtype or as `codec` stores it, and the other arguments.
    It holds `lse` if `hidden` is held exactly; a decoded `hidden` has another one. It computes the
    logits again: with both gradients the two passes take four products of `2 T d V` operations, two
    for logits and two for gradients, where `cross_entropy` takes three. If the loss is a fixed
    weighted sum of log-probabilities, use `cross_entropy` with the weights as its mask.

    Args:
      hidden: [..., d].
      head: output projection, [d, V]. For an `actjax.FrozenWeight` no gradient is computed; one in
        4 bits is decoded in both passes.
      labels: integers in [0, V), [...]. Where `mask` is 0 they may have any value; elsewhere the
        result of a label outside is NaN, and so is the gradient of the head.
      mask: weights of the tokens, [...], that the log-probabilities are multiplied by. Where it is
        0, as for padding, the result is 0. None for weights of 1. Has no gradient.
      codec: stores `hidden`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      chunk: tokens per chunk. None for d / 4, at least 256, as for `cross_entropy`.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      [...] in float32 (float64 if `hidden` is).

    Raises:
      ValueError: shapes that do not fit, a chunk below one, a missing key, or a codec that does not
        fit `hidden`.
      TypeError: `hidden` or `head` is not floating point, `labels` are not integers, `head` is a
        LoRA, or `codec` is not a codec.
    """
    chunk = chunk_of(hidden, head, labels, mask, chunk)
    check_codec(codec)
    if codec.needs_key:
        codec.required_key(key)
    return _token_log_probs(chunk, name, hidden, head, indices(labels), mask, codec, key)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _token_log_probs(
    chunk: int,
    name: str,
    hidden: jax.Array,
    head: jax.Array | FrozenWeight,
    labels: jax.Array,
    mask: jax.Array | None,
    codec: Codec,
    key: jax.Array | None,
) -> jax.Array:
    del name, codec, key
    return _values(chunk, hidden, head, labels, mask)[0]


def _values(chunk, hidden, head, labels, mask) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted log-probabilities and the log-sum-exp of the logits, [...] each."""

    def of_device(hidden, head, labels, weights):
        def add_chunk(_, slices):
            h, label, weight = slices
            logits = chunk_logits(h, head)
            lse = jax.nn.logsumexp(logits, axis=-1)
            log_prob = picked(logits, label) - lse
            return None, (jnp.where(weight != 0, weight * log_prob, 0), lse)

        ys = over_chunks(add_chunk, None, chunk, hidden, labels, weights)[1]
        return tuple(y.reshape(labels.shape) for y in ys)

    def outputs(of_hidden: Dims) -> tuple[Dims, Dims]:
        of_tokens = Dims(of_hidden.names[:-1])
        return of_tokens, of_tokens

    weights = weights_of(labels, mask, head.shape[1], accumulation_dtype(hidden.dtype))
    return on_tokens(of_device, hidden, _numbers(head, hidden), (labels, weights), outputs)


def _numbers(head: jax.Array | FrozenWeight, hidden: jax.Array) -> jax.Array:
    """Returns the head as an array; a frozen one in the dtype of `hidden`."""
    return head.astype(hidden.dtype) if isinstance(head, FrozenWeight) else head


def _token_log_probs_fwd(chunk, name, hidden, head, labels, mask, codec, key):
    operator = "token_log_probs"
    with jax.named_scope(f"actjax.{operator}"):
        hidden, code = keep(hidden, codec, key, operator, f"{name} hidden".strip())
        log_probs, lse = _values(chunk, hidden, head, labels, mask)
        lse = keep_output(lse, operator, f"{name} log-sum-exp".strip())
    return log_probs, (code, lse if isinstance(codec, Exact) else None, head, labels, mask, codec)


def _token_log_probs_bwd(chunk, name, residuals, cotangent):
    del name
    code, lse, head, labels, mask, codec = residuals
    with jax.named_scope("actjax.token_log_probs"):
        # No cast or decoded copy of the head is kept from the forward pass either.
        (hidden,), (cotangent, head) = decode_late((code,), (codec,), (cotangent, head))
        weights = weights_of(labels, mask, head.shape[1], cotangent.dtype)
        scales = jnp.where(weights != 0, weights * cotangent, 0)
        dhead, dhidden = _gradients(chunk, hidden, head, labels, scales, lse)
    return dhidden, dhead, None, None, None, None


def _gradients(chunk, hidden, head, labels, scales, lse) -> tuple[jax.Array | None, jax.Array]:
    """Returns the gradients of the head and of `hidden`.

    Args:
      chunk: tokens of a chunk.
      hidden: decoded hidden states.
      head: as for `token_log_probs`.
      labels: as for `token_log_probs`.
      scales: gradients of the log-probabilities, [...].
      lse: log-sum-exp of the logits, [...]; None to compute it again.
    """
    with_head, all_tokens = not isinstance(head, FrozenWeight), labels.size

    def of_device(hidden, numbers, *by_token):
        def add_chunk(total, h, label, scale, *lse_of_chunk):
            logits = chunk_logits(h, numbers)
            lse = lse_of_chunk[0] if lse_of_chunk else jax.nn.logsumexp(logits, axis=-1)
            softmax = jnp.exp(logits - lse[:, None])
            return total, scale[:, None] * (is_label(logits, label) - softmax)

        def finish(dhead: jax.Array) -> jax.Array:
            return dhead.astype(numbers.dtype)

        finish_head = finish if with_head else None
        _, dhead, dhidden = gradients(
            add_chunk, None, finish_head, chunk, all_tokens, hidden, numbers, *by_token
        )
        return dhead, dhidden

    def outputs(of_hidden: Dims) -> tuple[Dims | None, Dims]:
        return Dims((None, None), summed=True) if with_head else None, of_hidden

    by_token = (labels, scales) if lse is None else (labels, scales, lse)
    return on_tokens(of_device, hidden, _numbers(head, hidden), by_token, outputs)


_token_log_probs.defvjp(_token_log_probs_fwd, _token_log_probs_bwd)
