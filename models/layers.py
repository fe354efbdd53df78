"""The function of one layer, for each choice of storage."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

import actjax
from models.block import Block, Keys, Positions
from models.config import ModelConfig
from models.storage import (
    BLOCK_INPUT,
    REBUILT,
    SITES,
    CompressedResiduals,
    Remat,
    Storage,
    StorageChoice,
)

LayerFunction = Callable[[Block, jax.Array, Positions, Keys], jax.Array]
"""From a layer's weights, the residual stream, positions and a key to the residual stream."""


def layer_function(config: ModelConfig, storage: StorageChoice) -> LayerFunction:
    """Returns the function of one layer.

    Args:
      config: dimensions.
      storage: what a layer stores, with the arrays of one layer.
    """
    match storage:
        case Storage():
            return _plain(config, storage)
        case Remat():
            return _rematerialized(config, storage)
        case CompressedResiduals():
            return _compressed_residuals(config, storage)


def _plain(config: ModelConfig, storage: Storage, *, chunked: bool = False) -> LayerFunction:
    def run(block, x, positions, key):
        return block(x, positions, config, storage, key, chunked=chunked)

    return run


def _rematerialized(config: ModelConfig, storage: Remat) -> LayerFunction:
    """Returns the function of one layer that runs again in the backward pass."""
    is_full = storage.policy == "full"
    run = _plain(config, REBUILT if is_full else Storage(), chunked=is_full)
    if isinstance(storage.codec, actjax.Exact):
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = dots if storage.policy == "dots" else None
        # Nothing can be hoisted out of a scan, so the barrier against common subexpressions is
        # not needed.
        return jax.checkpoint(run, prevent_cse=False, policy=policy)

    def checkpointed(block, x, positions, key):
        named = isinstance(key, Mapping)
        block_key = key[BLOCK_INPUT] if named else jax.random.fold_in(key, len(SITES))
        recomputed = actjax.checkpoint(
            run, storage.codec, activations=1, key=block_key, name="block input"
        )
        return recomputed(block, x, positions, key)

    return checkpointed


def _compressed_residuals(config: ModelConfig, storage: CompressedResiduals) -> LayerFunction:
    """Returns the function of one layer of exact operators, whose residuals are compressed."""
    codecs = storage.codecs

    def name_site(site: str, x: jax.Array) -> jax.Array:
        return checkpoint_name(x, site) if site in codecs else x

    def run(block, x, positions):
        unused = jax.random.key(0)  # No operator draws from it.
        # A stored log-sum-exp belongs to exact scores. Scores of decoded q and k need another, or
        # the largest attention weights of a trained model come out as exp(50).
        return block(
            x, positions, config, Storage(), unused, visit=name_site, recompute_attention=True
        )

    def compressed(block, x, positions, key):
        return actjax.compress_residuals(
            run, lambda candidate: codecs.get(candidate.name), activations=1, key=key
        )(block, x, positions)

    return compressed


def layer_keys(config: ModelConfig, key: Keys | None) -> Any:
    """Returns keys with a leading axis of layers. None gives keys that no codec may draw from."""
    key = jax.random.key(0) if key is None else key
    return jax.tree.map(lambda k: jax.random.split(k, config.num_layers), key)


def check_key(storage: StorageChoice, key: Keys | None) -> None:
    """Raises a ValueError if a codec draws random numbers and there is no key."""
    for site, codec in storage.codecs.items():
        if key is None and codec.needs_key:
            raise ValueError(
                f"`{type(storage).__name__}.{site}` is {codec}, which draws random numbers, but got"
                " key=None: pass `key`."
            )
