"""Padding of packed batches."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from train.settings.methods import method


def inputs_of(batch: Mapping[str, jax.Array], method_name: str) -> jax.Array:
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
