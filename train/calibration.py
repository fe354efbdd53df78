"""Scales of channels, measured once and used for many steps (HyC-LoRA, 2025, section 4.1).

Of each site the largest magnitude and the norm of every channel are taken over a few batches; the
first give its scale, the second the channels that are stored whole. Both are data in the training
state: saved, restored, and measured again when asked for.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from models import Decoder, ModelConfig, Storage
from models.config import site_width

Calibration = dict[str, dict[str, Any]]
"""By site, `step` [L, n], and `channels` [L, m] if some are stored whole."""


def calibrated_sites(storage: Storage) -> dict[str, actjax.Quantized]:
    """Returns the codecs whose scales are to be measured, by site."""
    return {
        site: codec
        for site, codec in storage.codecs.items()
        if isinstance(codec, actjax.Quantized) and codec.scaling == "channel"
    }


def calibrated(storage: Storage, calibration: Calibration | None) -> Storage:
    """Returns a storage whose codecs by channel have measured scales.

    Args:
      storage: what each site stores.
      calibration: of all sites that need one; None to have each array measured as it comes.
    """
    if calibration is None:
        return storage
    sites = calibrated_sites(storage)
    given: dict[str, Any] = {
        site: actjax.Calibrated(sites[site], one["step"], one.get("channels"))
        for site, one in calibration.items()
    }
    return dataclasses.replace(storage, **given)


def calibration_zeros(config: ModelConfig, storage: Storage) -> Calibration | None:
    """Returns a calibration of the right shapes; None if nothing is to be calibrated."""
    sites = calibrated_sites(storage)
    if not sites:
        return None
    count = config.num_layers
    channels = {site: jnp.zeros((count, site_width(config, site))) for site in sites}
    return {site: _fit(sites[site], x, x) for site, x in channels.items()}


def calibrate(
    storage: Storage,
    model: Decoder,
    batches: Iterable[Mapping[str, jax.Array]],
    compute_dtype: str,
) -> Calibration:
    """Returns the scales and outlier channels of every site, over some batches.

    Args:
      storage: whose codecs by channel are calibrated.
      model: the decoder, with its adapters as they are now.
      batches: `inputs`, and `segments` if there are any.
      compute_dtype: dtype of activations.
    """
    run = jax.jit(
        functools.partial(_measure, compensate=storage.compensate, compute_dtype=compute_dtype)
    )
    largest, squares = None, None
    for batch in batches:
        seen = run(model, batch["inputs"], batch.get("segments"))
        tops = {site: one["largest"] for site, one in seen.items()}
        sums = {site: one["squares"] for site, one in seen.items()}
        largest = tops if largest is None else jax.tree.map(jnp.maximum, largest, tops)
        squares = sums if squares is None else jax.tree.map(jnp.add, squares, sums)
    if largest is None or squares is None:
        raise ValueError("`batches` to calibrate on are none: give at least one.")
    return {
        site: _fit(codec, largest[site], jnp.sqrt(squares[site]))
        for site, codec in calibrated_sites(storage).items()
    }


def _measure(
    model: Decoder,
    tokens: jax.Array,
    segments: jax.Array | None,
    *,
    compensate: bool,
    compute_dtype: str,
) -> dict[str, Any]:
    def statistic(x: jax.Array) -> dict[str, jax.Array]:
        wide, axes = x.astype(jnp.float32), tuple(range(x.ndim - 1))
        return {"largest": jnp.abs(wide).max(axes), "squares": jnp.square(wide).sum(axes)}

    return model.observe(
        tokens, statistic, compensate=compensate, segments=segments, compute_dtype=compute_dtype
    )


def _fit(codec: actjax.Quantized, largest: jax.Array, norms: jax.Array) -> dict[str, Any]:
    """Returns the calibration of a site from the largest magnitudes and norms of channels [L, n].

    One token whose channels have these magnitudes has their scales.
    """

    def one(layer: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        largest, norms = layer
        channels = codec.outlier_channels(norms[None])
        step = codec.fit_channels(largest[None], channels)
        return {"step": step} if channels is None else {"step": step, "channels": channels}

    return jax.lax.map(one, (largest, norms))
