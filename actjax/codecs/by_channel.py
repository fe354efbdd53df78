"""Codes with a scale for each channel, as in HyC-LoRA (2025), in plain JAX.

All tokens of a channel share a scale, and the levels are symmetric about zero or about a centre.
There is no kernel: fine-tuned as HyC-LoRA does it, balanced groups lose a seventh of what these
codes lose (docs/papers/hyc-lora.md).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype
from actjax.formats import code as fmt
from actjax.formats import scales as group_scales
from actjax.formats.packing import pack, unpack
from actjax.formats.quantize import codes_of, draw, values_of
from actjax.formats.rotation import rotate_back


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelCode:
    """Numbers in a few bits each, with a scale for each channel.

    Scales and centres of 16 bits are held as the bits of their dtype, in uint16.

    Attributes:
      planes: packed bytes of each group, as returned by `actjax.formats.packing.pack`.
      features: d. Static.
      dtype: dtype of the activation. Static.
      format: meaning of the bits; a group is what is rotated together. Static.
      scale: distance between two levels, or the unit of "normal" levels, [d]; None if a codec has
        it.
      centre: middle of the levels, [d]; None for zero, or if a codec has it.
      outliers: channels that are stored whole, [..., m]; None if there are none.
      channels: indices of these channels, int32 [m].
      seed: seed of the dither, uint32 [2]; None without dither.
    """

    planes: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: fmt.Format = dataclasses.field(metadata={"static": True})
    scale: Any = None
    centre: Any = None
    outliers: Any = None
    channels: Any = None
    seed: Any = None


def fit_scales(x: jax.Array, channels: jax.Array | None, format: fmt.Format) -> jax.Array:
    """Returns the stored scales [d] of the channels of `x` [..., d], without outlier channels."""
    values, scales = group_scales.without(channels, x), []
    for segment in fmt.segments(x.shape[-1], format.group):
        part = group_scales.prepare(segment.take(values), format)
        tokens = tuple(range(part.ndim - 2))
        if format.levels == "normal":
            scale = group_scales.fit_normal(part, tokens, format)
        else:
            largest = jnp.max(jnp.abs(part), tokens, keepdims=True, initial=0)
            largest = group_scales.nan_where_any(part, tokens, largest)
            unit = largest * (2 / (2**format.bits - 1))
            scale = group_scales.rounded_scale(unit, format.scale_dtype, towards=1)
        scales.append(scale.reshape(-1))
    return group_scales.stored(jnp.concatenate(scales), format.scale_dtype)


@functools.partial(jax.jit, static_argnames="format", inline=True)
def encode(
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    scale: jax.Array,
    centre: jax.Array | None,
    *,
    format: fmt.Format,
) -> ChannelCode:
    """Returns the code of an activation, without its scales and centres.

    Numbers outside the levels saturate.

    Args:
      x: [..., d].
      seed: uint32 [2], if `format.rounding` draws random numbers.
      channels: channels to store whole, int32 [m]; None for none.
      scale: stored scales, [d].
      centre: stored middles of the levels, [d], of the rotated group if `format.rotate`; None for
        zero.
      format: how numbers are stored.
    """
    values, codes = group_scales.without(channels, x), []
    for segment in fmt.segments(x.shape[-1], format.group):
        part = group_scales.prepare(segment.take(values), format)
        if centre is not None:
            part = part - _numbers(segment, centre, part.dtype, format)
        unit = _numbers(segment, scale, part.dtype, format)
        shift = None if seed is None else draw(seed, segment, x.shape, format)
        codes.append(segment.flatten(codes_of(part, None, unit, shift, format)))
    return ChannelCode(
        planes=pack(jnp.concatenate(codes, axis=-1), format.bits, format.group),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
        outliers=None if channels is None else x[..., channels],
        channels=channels,
        seed=seed if format.rounding == "dither" else None,
    )


@functools.partial(jax.jit, inline=True)
def decode(code: ChannelCode) -> jax.Array:
    """Returns the numbers of a code that has its scales and centres, [..., d]."""
    format, wide = code.format, accumulation_dtype(code.dtype)
    fuse = format.levels == "uniform" and not format.rotate
    codes = unpack(code.planes, format.bits, code.features, format.group, fuse=fuse)
    parts = []
    for segment in fmt.segments(code.features, format.group):
        unit = _numbers(segment, code.scale, wide, format)
        shift = None if code.seed is None else draw(code.seed, segment, codes.shape, format)
        part = values_of(segment.take(codes), None, unit, shift, format)
        if code.centre is not None:
            part = part + _numbers(segment, code.centre, wide, format)
        parts.append(segment.flatten(rotate_back(part) if format.rotate else part))
    x = jnp.concatenate(parts, axis=-1).astype(code.dtype)
    return x if code.channels is None else x.at[..., code.channels].set(code.outliers)


def _numbers(segment: fmt.Segment, stored: jax.Array, dtype: Any, format: fmt.Format) -> jax.Array:
    """Returns stored scales or centres of a segment, [groups, size]."""
    return segment.take(stored.view(format.scale_dtype).astype(dtype))
