"""The definition of `quantize`: plain JAX, never tuned."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.division import over
from actjax._math.precision import accumulation_dtype
from actjax.kernels import format as fmt
from actjax.kernels import group_scales
from actjax.kernels.levels import nearest_level
from actjax.kernels.noise import uniform
from actjax.kernels.packing import pack


def quantize(
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    scale: jax.Array | None,
    centre: jax.Array | None,
    mean: jax.Array | None,
    spread: jax.Array | None,
    *,
    format: fmt.Format,
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    wide = accumulation_dtype(x.dtype)
    values = group_scales.balanced(x, mean, spread, format)
    values = group_scales.without(channels, values)
    outliers = None if channels is None else x[..., channels]
    codes, offsets, scales = [], [], []
    for segment in fmt.segments(x.shape[-1], format.group):
        part = group_scales.prepare(segment.take(values), format)
        if scale is None:
            offset, group_scale = group_scales.fit(part, format)
            offsets.append(offset)
            scales.append(group_scale)
        else:
            offset, group_scale = None, group_scales.scale_of(segment, scale, format, wide)
        if centre is not None:
            part = part - group_scales.scale_of(segment, centre, format, wide)
        shift = None if seed is None else draw(seed, segment, x.shape, format, wide)
        codes.append(segment.flatten(_round(part, offset, group_scale, shift, format)))
    return fmt.QuantizedCode(
        planes=pack(jnp.concatenate(codes, axis=-1), format.bits, format.group),
        offset=group_scales.stored_scales(offsets, format) if format.affine else None,
        scale=group_scales.stored_scales(scales, format) if scale is None else None,
        centre=None,
        mean=None,
        spread=None,
        outliers=outliers,
        channels=channels,
        seed=seed if format.rounding == "dither" else None,
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
    )


def draw(
    seed: jax.Array, segment: fmt.Segment, shape: tuple[int, ...], format: fmt.Format, dtype: Any
) -> jax.Array:
    """Returns the random shifts of a segment of `x`, [..., groups, size].

    Args:
      seed: uint32 [2].
      segment: which groups.
      shape: shape of `x`, [..., d].
      format: format of the code.
      dtype: dtype of the result.
    """
    shift = uniform(
        seed,
        math.prod(shape[:-1]),
        segment.groups,
        segment.size,
        segment.first * -(-format.group // 2),
        fmt.noise_words(shape[-1], format.group),
    )
    return shift.reshape(*shape[:-1], segment.groups, segment.size).astype(dtype)


def _round(
    part: jax.Array,
    offset: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array | None,
    format: fmt.Format,
) -> jax.Array:
    """Returns the codes of `part`, uint8; `shift` is uniform in (-1/2, 1/2) levels."""
    if format.levels == "normal":
        return nearest_level(part, scale, format.bits)
    top = 2**format.bits - 1
    position = over(part, scale) + top / 2 if offset is None else over(part - offset, scale)
    if shift is not None:
        position = position + shift
    rounded = jax.lax.round(position, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    low, high = (np.asarray(bound, rounded.dtype) for bound in (0, top))
    return jax.lax.clamp(low, rounded, high).astype(jnp.uint8)
