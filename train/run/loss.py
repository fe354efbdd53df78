"""The batch of a step, and the loss of a batch as a pure function of arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models import Decoder, StorageChoice
from models.lora import LoRAConfig, attach
from train.run.calibration import calibrated
from train.settings.config import RunConfig
from train.settings.methods import method
from train.settings.resolve import ResolvedConfig

Batch = dict[str, jax.Array]
"""`inputs` and `targets` [B, S] int32, and `mask` [B, S] float32. With packed examples also
`segments` [B, S] int32: the example that each token belongs to."""


def batch_shapes(config: RunConfig, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one micro-batch.

    Args:
      config: the settings.
      packed: whether several examples share a sequence.
    """
    shape = (config.batch_size // config.accumulate, config.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(shape, "float32")}
    return {**batch, "segments": tokens} if packed else batch


def whole_batch_shapes(config: ResolvedConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batch of a step, over all micro-batches."""
    return batch_shapes(dataclasses.replace(config, accumulate=1), packed=config.packed)


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
    config: RunConfig,
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
        value = model.loss(
            inputs_of(batch, config.method),
            batch["targets"],
            mask=batch["mask"],
            segments=batch.get("segments"),
            storage=calibrated(storage, context.calibration),
            key=key,
            compute_dtype=config.compute_dtype,
            z_loss=config.z_loss,
        )
        return value if context.loss_scale is None else value * context.loss_scale

    return loss


_DROPOUT = 2**30
"""Folded into the key of a step for the adapters' dropout; above every site and layer number."""
