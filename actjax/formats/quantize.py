"""The definitions of `quantize` and `dequantize`: plain JAX, never tuned."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import accumulation_dtype, over
from actjax.formats import code as fmt
from actjax.formats import scales as group_scales
from actjax.formats.levels import nearest_code, value_of
from actjax.formats.noise import uniform
from actjax.formats.packing import pack, unpack
from actjax.formats.rotation import rotate_back


def quantize(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    x, seed, channels = inputs.x, inputs.seed, inputs.channels
    values = group_scales.balanced(x, inputs.mean, inputs.spread, format)
    values = group_scales.without(channels, values)
    codes, offsets, scales = [], [], []
    for segment in fmt.segments(x.shape[-1], format.group):
        part = group_scales.prepare(segment.take(values), format)
        offset, scale = group_scales.fit(part, format)
        scales.append(scale)
        if offset is not None:
            offsets.append(offset)
        shift = None if seed is None else draw(seed, segment, x.shape, format)
        codes.append(segment.flatten(codes_of(part, offset, scale, shift, format)))
    return fmt.QuantizedCode(
        planes=pack(jnp.concatenate(codes, axis=-1), format.bits, format.group),
        scale=group_scales.stored_scales(scales, format),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
        offset=group_scales.stored_scales(offsets, format) if offsets else None,
        outliers=None if channels is None else x[..., channels],
        channels=channels,
        seed=seed if format.rounding == "dither" else None,
    )


def draw(
    seed: jax.Array, segment: fmt.Segment, shape: tuple[int, ...], format: fmt.Format
) -> jax.Array:
    """Returns the random shifts of a segment of `x`, [..., groups, size], float32.

    Args:
      seed: uint32 [2].
      segment: which groups.
      shape: shape of `x`, [..., d].
      format: format of the code.
    """
    shift = uniform(
        seed,
        math.prod(shape[:-1]),
        segment.groups,
        segment.size,
        segment.first * -(-format.group // 2),
        fmt.noise_words(shape[-1], format.group),
    )
    return shift.reshape(*shape[:-1], segment.groups, segment.size)


def codes_of(
    part: jax.Array,
    offset: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array | None,
    format: fmt.Format,
) -> jax.Array:
    """Returns the codes of numbers, uint8.

    Args:
      part: numbers, [..., groups, size].
      offset: value of the code 0; None for levels about zero.
      scale: distance between two levels, or the unit of "normal" ones.
      shift: random numbers in (-1/2, 1/2) levels, which are added; None for none.
      format: format of the code.
    """
    if format.levels == "normal":
        return nearest_code(over(part, scale), format.bits).astype(jnp.uint8)
    top = 2**format.bits - 1
    position = over(part, scale) + top / 2 if offset is None else over(part - offset, scale)
    if shift is not None:
        position = position + shift.astype(position.dtype)
    rounded = jax.lax.round(position, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    low, high = (np.asarray(bound, rounded.dtype) for bound in (0, top))
    return jax.lax.clamp(low, rounded, high).astype(jnp.uint8)


def dequantize(code: fmt.QuantizedCode) -> jax.Array:
    """As `actjax.kernels.dequantize.api.dequantize`."""
    format, wide = code.format, accumulation_dtype(code.dtype)
    fuse = format.levels == "uniform" and not format.rotate
    codes = unpack(code.planes, format.bits, code.features, format.group, fuse=fuse)
    parts = []
    for segment in fmt.segments(code.features, format.group):
        scale = group_scales.scale_of(segment, code.scale, format, wide)
        offset = (
            None
            if code.offset is None
            else group_scales.scale_of(segment, code.offset, format, wide)
        )
        shift = None if code.seed is None else draw(code.seed, segment, codes.shape, format)
        part = values_of(segment.take(codes), offset, scale, shift, format)
        if format.rotate:
            part = rotate_back(part)
        parts.append(segment.flatten(part))
    x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    x = group_scales.unbalanced(x, code.mean, code.spread, format).astype(code.dtype)
    return x if code.channels is None else x.at[..., code.channels].set(code.outliers)


def values_of(
    codes: jax.Array,
    offset: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array | None,
    format: fmt.Format,
) -> jax.Array:
    """Returns the values of codes, as `codes_of` has them."""
    if format.levels == "normal":
        return value_of(codes, format.bits, scale.dtype) * scale
    position = codes.astype(scale.dtype)
    if shift is not None:
        position = position - shift.astype(position.dtype)
    if offset is None:
        return (position - (2**format.bits - 1) / 2) * scale
    return position * scale + offset
