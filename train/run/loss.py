"""The batch of a step, and the loss of a batch as a pure function of arrays.

The loss is the cross-entropy of tokens, or that of preference pairs, whose batches alternate rows
of chosen and of rejected responses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models import Decoder, Storage, StorageChoice
from models.lora import LoRAConfig, attach
from train.run.calibration import calibrated
from train.run.preference import dpo_loss, segment_sums
from train.settings.config import RunConfig
from train.settings.data import MOST_PAIRS
from train.settings.methods import method
from train.settings.resolve import ResolvedConfig

Batch = dict[str, jax.Array]
"""`inputs` and `targets` [B, S] int32, and `mask` [B, S] float32. With packed examples also
`segments` [B, S] int32: the example that each token belongs to. With pairs also `reference` [B, S]
float32: the log-probability of each response before training, at its first place."""


def batch_shapes(
    config: RunConfig, *, packed: bool = False, pairs: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one micro-batch.

    Args:
      config: the settings.
      packed: whether several examples share a sequence.
      pairs: whether they are pairs of preference.
    """
    shape = (config.batch_size // config.accumulate, config.seq_len)
    tokens, numbers = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("int32", "float32"))
    batch = {"inputs": tokens, "targets": tokens, "mask": numbers}
    batch |= {"segments": tokens} if packed else {}
    return batch | ({"reference": numbers} if pairs else {})


def micro_batch_shapes(config: ResolvedConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one micro-batch of a run."""
    return batch_shapes(config, packed=config.packed, pairs=config.preference is not None)


def whole_batch_shapes(config: ResolvedConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batch of a step, over all micro-batches."""
    return micro_batch_shapes(dataclasses.replace(config, accumulate=1))


def inputs_of(batch: Batch, method_name: str) -> jax.Array:
    """Returns the input tokens of a batch, [B, S], as a method embeds them.

    A method with `zero_padding` gets -1 for padding, which `Decoder.embed` makes zero. No token
    attends to padding, so the loss is the same.

    Args:
      batch: `inputs`, and `segments` if examples are packed; padding has segment 0.
      method_name: the method.
    """
    if "segments" not in batch or not method(method_name).zero_padding:
        return batch["inputs"]
    return jnp.where(batch["segments"] > 0, batch["inputs"], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The arrays that a loss reads beside the trained ones; as in `TrainState`.

    Attributes:
      frozen: the decoder that the adapters belong to, or None.
      calibration: statistics of channels, or None.
      loss_scale: factor of the loss, a float32 scalar; None for 1.
    """

    frozen: Any = None
    calibration: Any = None
    loss_scale: Any = None


BatchLoss = Callable[..., jax.Array]
"""From what is trained, a batch, a key and a `Context` (optional if empty) to a float32 scalar."""


def loss_function(
    config: ResolvedConfig,
    storage: StorageChoice,
    lora: LoRAConfig | None = None,
    *,
    dropout: bool = True,
) -> BatchLoss:
    """Returns the loss of a batch.

    Args:
      config: the settings.
      storage: what each site stores.
      lora: the adapters; None if all weights are trained.
      dropout: whether the adapters' dropout is applied.
    """

    def loss(trained: Any, batch: Batch, key: jax.Array, context: Context = Context()) -> jax.Array:
        model: Decoder = trained
        if lora is not None:
            dropout_key = jax.random.fold_in(key, _DROPOUT) if dropout else None
            model = attach(context.frozen, trained, lora, dropout_key)
        stored = calibrated(storage, context.calibration)
        x = run_layers(config, model, batch, stored, key)
        reference = None
        if config.preference is not None and lora is not None:
            reference = response_log_probs(config, context.frozen, batch)
        value = loss_after(config, model, x, batch, reference)
        return value if context.loss_scale is None else value * context.loss_scale

    return loss


def run_layers(
    config: ResolvedConfig,
    model: Decoder,
    batch: Batch,
    storage: StorageChoice = Storage(),
    key: jax.Array | None = None,
) -> jax.Array:
    """Returns the residual stream after the last layer, [B, S, d]."""
    x = model.embed(inputs_of(batch, config.method), config.compute_dtype)
    return model.run_layers(x, storage, key, segments=batch.get("segments"))


def loss_after(
    config: ResolvedConfig,
    model: Decoder,
    x: jax.Array,
    batch: Batch,
    reference: jax.Array | None = None,
) -> jax.Array:
    """Returns the loss from the residual stream after the last layer.

    Args:
      config: the settings.
      model: the weights.
      x: residual stream, [B, S, d].
      batch: the batch.
      reference: of pairs: as for `preferences`.
    """
    if config.preference is None:
        return model.loss_after(x, batch["targets"], mask=batch["mask"], z_loss=config.z_loss)
    sums = preferences(config, model, x, batch, reference)
    return sums["loss"] / jnp.maximum(weight_of(batch), 1)


def preferences(
    config: ResolvedConfig,
    model: Decoder,
    x: jax.Array,
    batch: Batch,
    reference: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns sums over the pairs of a batch: of the loss, of correct ones, of reward margins.

    Args:
      config: the settings.
      model: the weights.
      x: residual stream after the last layer, [B, S, d].
      batch: the batch.
      reference: log-probabilities of the responses before training, [B, pairs]; None for those in
        the batch.
    """
    assert config.preference is not None
    settings, segments = config.preference, batch["segments"]
    policy = segment_sums(
        model.log_probs_after(x, batch["targets"], mask=batch["mask"]), segments, MOST_PAIRS
    )
    if reference is None:
        reference = segment_sums(batch["reference"], segments, MOST_PAIRS)
    if settings.length_normalization:
        lengths = jnp.maximum(segment_sums(batch["mask"], segments, MOST_PAIRS), 1)
        policy, reference = policy / lengths, reference / lengths
    responses = (x[i::2].reshape(-1) for x in (policy, reference) for i in (0, 1))
    pairs = dpo_loss(*responses, beta=settings.beta, label_smoothing=settings.label_smoothing)
    counts = segments[::2].max(axis=1, keepdims=True)
    is_pair = (jnp.arange(1, MOST_PAIRS + 1) <= counts).reshape(-1)
    margins = pairs.chosen_reward - pairs.rejected_reward
    values = {"loss": pairs.loss, "correct": pairs.is_correct, "margin": margins}
    return {name: jnp.where(is_pair, value, 0).sum() for name, value in values.items()}


def response_log_probs(config: ResolvedConfig, model: Decoder, batch: Batch) -> jax.Array:
    """Returns the log-probability of each response under a frozen model, [B, pairs]."""
    x = run_layers(config, model, batch)
    log_probs = model.log_probs_after(x, batch["targets"], mask=batch["mask"])
    return jax.lax.stop_gradient(segment_sums(log_probs, batch["segments"], MOST_PAIRS))


def weight_of(batch: Batch) -> jax.Array:
    """Returns the number of tokens that count in a batch, or of its pairs; float32.

    The batch may have leading axes before its rows.
    """
    if "reference" not in batch:
        return batch["mask"].astype(jnp.float32).sum((-1, -2))
    return batch["segments"][..., ::2, :].max(axis=-1).sum(axis=-1).astype(jnp.float32)


_DROPOUT = 2**30
"""Folded into the key of a step for the adapters' dropout; above every site and layer number."""
