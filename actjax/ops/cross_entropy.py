"""Cross-entropy from hidden states, a chunk of tokens at a time.

The forward pass computes the gradients of a chunk while its logits exist, as in Liger Kernel (Hsu
et al., 2024): no product is computed twice, and no logits are kept.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep_output
from actjax._math.precision import accumulation_dtype
from actjax._shards import Dims
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
    chunk = chunk_of(hidden, head, labels, mask, chunk)
    labels = indices(labels)
    # The sum of weights, and with it loss and gradients, is NaN if a label is outside.
    weights = weights_of(labels, mask, head.shape[1], accumulation_dtype(hidden.dtype))
    frozen = isinstance(head, FrozenWeight)
    numbers = head.astype(hidden.dtype) if frozen else head
    static = _Static(z_loss, chunk, name, not frozen)
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


@functools.partial(ReverseMode, nondiff_argnums=(0,))
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
        return over_chunks(add_chunk, zero, static.chunk, hidden, labels, weights)[0]

    inverse = _inverse_sum(weights)
    return inverse * on_tokens(add_up, hidden, head, (labels, weights, inverse), lambda _: _SUM)


_SUM = Dims((), summed=True)


def _inverse_sum(weights: jax.Array) -> jax.Array:
    """Returns 1 over the sum of the weights, finite if the sum (and with it the loss) is zero."""
    return 1 / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)


def _chunk_loss(z_loss, h, head, label, weight):
    """Returns the weighted loss of a chunk, its logits [c, V] and their log-sum-exp [c]."""
    logits = chunk_logits(h, head)
    lse = jax.nn.logsumexp(logits, axis=-1)
    per_token = lse - picked(logits, label) + z_loss * lse**2
    return jnp.sum(jnp.where(weight > 0, weight * per_token, 0)), logits, lse


def _cross_entropy_fwd(static, hidden, head, labels, weights):
    name = static.name

    def outputs(of_hidden: Dims) -> tuple:
        of_head = Dims((None, None), summed=True) if static.with_head else None
        return _SUM, of_head, of_hidden

    with jax.named_scope("actjax.cross_entropy"):
        inverse = _inverse_sum(weights)
        sums = functools.partial(_sums_and_gradients, static, labels.size)
        others = (labels, weights, inverse)
        total, dhead, dhidden = on_tokens(sums, hidden, head, others, outputs)
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
    z_loss = static.z_loss

    def add_chunk(total, h, label, weight):
        loss, logits, lse = _chunk_loss(z_loss, h, head, label, weight)
        softmax = jnp.exp(logits - lse[:, None])
        dlogits = (1 + 2 * z_loss * lse[:, None]) * softmax - is_label(logits, label)
        return total + loss, weight[:, None] * dlogits

    def finish(dhead: jax.Array) -> jax.Array:
        return (dhead * inverse).astype(head.dtype)

    zero = jnp.zeros((), weights.dtype)
    finish_head = finish if static.with_head else None
    return gradients(
        add_chunk, zero, finish_head, static.chunk, all_tokens, hidden, head, labels, weights
    )


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
