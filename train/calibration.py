"""Scales of channels, measured once and used for many steps (HyC-LoRA, 2025, section 4.1).

Over a few batches the range, mean and norm of every channel of each site are taken. The norms give
the channels that are stored whole, the means the middles of the levels, and the ranges how far
these reach at most. Then, on the same batches, each channel gets the reach of the least error
(`actjax.Calibrated.least_error`). All of it is data in the training state: saved, restored, and
measured again when asked for.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax import ChannelRange
from models import Decoder, ModelConfig, Storage, StorageChoice
from models.config import site_width

Calibration = dict[str, dict[str, Any]]
"""By site, `step` and `centre` [L, n], and `channels` [L, m] if some are stored whole."""


def calibrated_sites(storage: StorageChoice) -> dict[str, actjax.Quantized]:
    """Returns the codecs whose scales are to be measured, by site."""
    return {
        site: codec
        for site, codec in storage.codecs.items()
        if isinstance(codec, actjax.Quantized) and codec.scaling == "channel"
    }


def calibrated(storage: StorageChoice, calibration: Calibration | None) -> StorageChoice:
    """Returns a storage whose codecs by channel have measured scales.

    Args:
      storage: what each site stores.
      calibration: of all sites that need one; None to have each array measured as it comes.
    """
    if calibration is None:
        return storage
    sites = calibrated_sites(storage)
    given: dict[str, Any] = {
        site: actjax.Calibrated(sites[site], one["step"], one.get("channels"), one["centre"])
        for site, one in calibration.items()
    }
    return dataclasses.replace(storage, **given)


def calibration_zeros(config: ModelConfig, storage: StorageChoice) -> Calibration | None:
    """Returns a calibration of the right shapes; None if nothing is to be calibrated."""
    sites = calibrated_sites(storage)
    if not sites:
        return None

    def one(site: str) -> Any:
        channels = jnp.zeros((config.num_layers, 1, site_width(config, site)))
        return _over_range(sites[site], jax.vmap(ChannelRange.of)(channels))

    return _as_data({site: one(site) for site in sites})


def calibrate(
    storage: StorageChoice,
    model: Decoder,
    batches: Iterable[Mapping[str, jax.Array]],
    compute_dtype: str,
) -> Calibration:
    """Returns centres, scales and outlier channels of every site, over some batches.

    Args:
      storage: whose codecs by channel are calibrated.
      model: the decoder, with its adapters as they are now.
      batches: `inputs`, and `segments` if there are any. All are held, and run through twice.
      compute_dtype: dtype of activations.
    """
    batches, sites = list(batches), calibrated_sites(storage)
    if not batches:
        raise ValueError("`batches` to calibrate on are none: give at least one.")

    @functools.partial(jax.jit, static_argnums=0)
    def observe(statistic: Any, model: Decoder, batch: Any, known: Any) -> Any:
        return model.observe(
            batch["inputs"],
            statistic,
            known,
            split_adapters=isinstance(storage, Storage) and storage.split_adapters,
            segments=batch.get("segments"),
            compute_dtype=compute_dtype,
        )

    ranges = [observe(_range, model, batch, dict.fromkeys(sites)) for batch in batches]
    known = functools.reduce(_merged, ranges)
    codecs = {site: _over_range(sites[site], one) for site, one in known.items()}
    narrow = {site: codec for site, codec in codecs.items() if codec.narrows}
    if narrow:
        errors = [observe(_errors, model, batch, narrow) for batch in batches]
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), errors)
        codecs |= {site: _narrowed(narrow[site], total[site]) for site in narrow}
    return _as_data(codecs)


def _range(x: jax.Array, known: None) -> ChannelRange:
    del known
    return ChannelRange.of(x)


def _errors(x: jax.Array, codec: actjax.Calibrated) -> jax.Array:
    return codec.errors(x)


def _merged(a: Mapping[str, ChannelRange], b: Mapping[str, ChannelRange]) -> dict[str, Any]:
    return {site: jax.vmap(ChannelRange.merged)(a[site], b[site]) for site in a}


def _over_range(codec: actjax.Quantized, known: ChannelRange) -> actjax.Calibrated:
    """Returns `Calibrated.over_range` of each layer."""
    return jax.lax.map(functools.partial(actjax.Calibrated.over_range, codec), known)


_narrowed = jax.vmap(actjax.Calibrated.narrowed)


def _as_data(codecs: Mapping[str, actjax.Calibrated]) -> Calibration:
    def one(codec: actjax.Calibrated) -> dict[str, Any]:
        data = {"step": codec.scale, "centre": codec.centre, "channels": codec.channels}
        return {name: array for name, array in data.items() if array is not None}

    return {site: one(codec) for site, codec in codecs.items()}
