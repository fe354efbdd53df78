"""Statistics of channels, measured once, used for many steps (HyC-LoRA, 2025, section 4.1).

A first pass over a few batches takes the range, means and norm of every channel of each site. The
norms give the outlier channels, which are stored exactly; the means give the centres of the
channels. A second pass over the same batches measures their spreads, or, for codes by channel,
which part of the range has levels of the least error (`actjax.Calibrated.least_error`). The result
is data in the training state: it is saved and restored, and measured again every
`recalibrate_every` steps.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax import ChannelRange
from models import Decoder, ModelConfig, Remat, Storage, StorageChoice
from models.config import site_width

Calibration = dict[str, dict[str, Any]]
"""By site: `step` (distance between levels, or spread) and `centre` [L, n], and `channels` [L, m]
if there are outlier channels."""


_BLOCK_INPUT = "attention_norm"
"""Site of the code of a `Remat`: the input of a block is that of its first norm."""


def calibrated_sites(storage: StorageChoice) -> dict[str, actjax.Quantized]:
    """Returns the codecs that can be calibrated, by site, without `Offloaded`."""
    sites = {}
    for field, codec in storage.codecs.items():
        inner = codec.codec if isinstance(codec, actjax.Offloaded) else codec
        if isinstance(inner, actjax.Quantized) and (inner.balance or inner.scaling == "channel"):
            sites[_BLOCK_INPUT if isinstance(storage, Remat) else field] = inner
    return sites


def calibrated(storage: StorageChoice, calibration: Calibration | None) -> StorageChoice:
    """Returns a storage whose codecs have measured statistics of channels.

    Args:
      storage: what each site stores.
      calibration: of all calibrated sites; None measures each array when it is encoded.
    """
    if calibration is None:
        return storage
    sites, codecs = calibrated_sites(storage), {}
    for site, data in calibration.items():
        field = "codec" if isinstance(storage, Remat) else site
        statistics = data["step"], data.get("channels"), data["centre"]
        code: Any = actjax.Calibrated(sites[site], *statistics)
        is_away = isinstance(storage.codecs[field], actjax.Offloaded)
        codecs[field] = actjax.Offloaded(code) if is_away else code
    return dataclasses.replace(storage, **codecs)


def calibration_zeros(config: ModelConfig, storage: StorageChoice) -> Calibration:
    """Returns a calibration of zeros with the right shapes."""
    codecs = {}
    for site, codec in calibrated_sites(storage).items():
        channels = jnp.zeros((config.num_layers, 1, site_width(config, site)))
        codecs[site] = _over_range(codec, jax.vmap(ChannelRange.of)(channels))
    return _as_data(codecs)


def calibrate(
    storage: StorageChoice,
    model: Decoder,
    batches: Iterable[Mapping[str, jax.Array]],
    compute_dtype: str,
) -> Calibration:
    """Returns centres, scales or spreads, and outlier channels of every site, over some batches.

    Args:
      storage: its codecs by channel, and those with `balance`, are calibrated.
      model: the decoder with its current adapters.
      batches: `inputs`, and `segments` if examples are packed. All are kept and used twice.
      compute_dtype: dtype of activations.
    """
    batches, sites = list(batches), calibrated_sites(storage)
    if not batches:
        raise ValueError("`batches` is empty: give at least one batch to calibrate on.")

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

    range_of, second = (lambda x, _: ChannelRange.of(x)), (lambda x, codec: codec.observe(x))
    ranges = [observe(range_of, model, batch, dict.fromkeys(sites)) for batch in batches]
    merged, refined = jax.vmap(ChannelRange.merged), jax.vmap(actjax.Calibrated.refined)

    # Compiled: eagerly these are a hundred programs.
    @jax.jit
    def over_ranges(ranges: list[Any]) -> dict[str, actjax.Calibrated]:
        known = {site: functools.reduce(merged, (r[site] for r in ranges)) for site in sites}
        return {site: _over_range(sites[site], channels) for site, channels in known.items()}

    @jax.jit
    def refine(codecs: dict[str, actjax.Calibrated], observed: list[Any]) -> Any:
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), observed)
        return {site: refined(codec, total[site]) for site, codec in codecs.items()}

    codecs = over_ranges(ranges)
    narrow = {site: codec for site, codec in codecs.items() if codec.narrows}
    if narrow:
        codecs |= refine(narrow, [observe(second, model, batch, narrow) for batch in batches])
    return _as_data(codecs)


def _over_range(codec: actjax.Quantized, known: ChannelRange) -> actjax.Calibrated:
    """Returns `Calibrated.over_range` of each layer."""
    return jax.lax.map(functools.partial(actjax.Calibrated.over_range, codec), known)


def _as_data(codecs: Mapping[str, actjax.Calibrated]) -> Calibration:
    calibration = {}
    for site, codec in codecs.items():
        data = {"step": codec.scale, "centre": codec.centre, "channels": codec.channels}
        calibration[site] = {name: array for name, array in data.items() if array is not None}
    return calibration
