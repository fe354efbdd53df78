"""Codes with a scale for each channel, as in HyC-LoRA (2025), in plain JAX.

All tokens of a channel share a scale, and the levels are symmetric about zero or about a centre. A
group divides the channels: it is what is rotated together, or all of them.
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
      format: meaning of the bits. Static.
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
    part = group_scales.prepare(group_scales.without(channels, x), format)
    tokens = tuple(range(part.ndim - 2))
    if format.levels == "normal":
        scale = group_scales.root_mean_square(part, tokens)
    else:
        largest = jnp.max(jnp.abs(part), tokens, keepdims=True, initial=0)
        largest = group_scales.nan_where_any(part, tokens, largest)
        unit = largest * (2 / (2**format.bits - 1))
        scale = group_scales.rounded_scale(unit, format.scale_dtype, towards=1)
    return group_scales.stored(scale.reshape(-1), format.scale_dtype)


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
    part = group_scales.prepare(group_scales.without(channels, x), format)
    if centre is not None:
        part = part - _numbers(centre, part.dtype, part.ndim, format)
    unit = _numbers(scale, part.dtype, part.ndim, format)
    shift = None if seed is None else draw(seed, part.shape)
    codes = fmt.joined(codes_of(part, None, unit, shift, format))
    return ChannelCode(
        planes=pack(codes, format.bits, format.group),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
        outliers=group_scales.of_channels(channels, x),
        channels=channels,
        seed=seed if format.rounding == "dither" else None,
    )


@functools.partial(jax.jit, inline=True)
def decode(code: ChannelCode) -> jax.Array:
    """Returns the numbers of a code that has its scales and centres, [..., d]."""
    format, wide = code.format, accumulation_dtype(code.dtype)
    fuse = format.levels == "uniform" and not format.rotate
    codes = unpack(code.planes, format.bits, code.features, format.group, fuse=fuse)
    groups = code.features // format.group
    codes = codes.reshape(*codes.shape[:-1], groups, format.group)
    shift = None if code.seed is None else draw(code.seed, codes.shape)
    unit = _numbers(code.scale, wide, codes.ndim, format)
    part = values_of(codes, None, unit, shift, format)
    if code.centre is not None:
        part = part + _numbers(code.centre, wide, codes.ndim, format)
    x = fmt.joined(rotate_back(part) if format.rotate else part, code.features).astype(code.dtype)
    return group_scales.with_channels(code.channels, code.outliers, x)


def _numbers(stored: jax.Array, dtype: Any, rank: int, format: fmt.Format) -> jax.Array:
    """Returns stored scales or centres of all channels of groups, [1, ..., 1, groups, group]."""
    numbers = stored.view(format.scale_dtype).astype(dtype)
    grouped = numbers.reshape(len(numbers) // format.group, format.group)
    return jax.lax.broadcast_to_rank(grouped, rank)
