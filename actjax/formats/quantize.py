"""The definitions of `quantize` and `dequantize`: plain JAX, never tuned."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import accumulation_dtype, over
from actjax.formats import code as fmt
from actjax.formats import levels as normal
from actjax.formats import scales as group_scales
from actjax.formats.noise import uniform
from actjax.formats.packing import pack, unpack
from actjax.formats.rotation import rotate_back


def quantize(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    x, seed, channels = inputs.x, inputs.seed, inputs.channels
    values = group_scales.balanced(x, inputs.mean, inputs.spread, format)
    part = group_scales.prepare(group_scales.without(channels, values), format)
    offset, scale = group_scales.fit(part, format)
    shift = None if seed is None else draw(seed, part.shape)
    codes = fmt.joined(codes_of(part, offset, scale, shift, format))
    return fmt.QuantizedCode(
        planes=pack(codes, format.bits, format.group),
        scale=group_scales.stored(scale[..., 0], format.scale_dtype),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
        offset=None if offset is None else group_scales.stored(offset[..., 0], format.scale_dtype),
        outliers=group_scales.of_channels(channels, x),
        channels=channels,
        seed=seed if format.rounding == "dither" else None,
    )


def draw(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random shifts, float32 [..., groups, group].

    Args:
      seed: uint32 [2].
      shape: [..., groups, group].
    """
    *tokens, groups, size = shape
    return uniform(seed, math.prod(tokens), groups, size).reshape(shape)


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
        return normal.code_of(over(part, scale), format.bits)
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
    padded = fmt.group_count(code.features, format.group) * format.group
    codes = unpack(code.planes, format.bits, padded, format.group, fuse=fuse)
    codes = codes.reshape(*codes.shape[:-1], padded // format.group, format.group)
    scale = group_scales.of_groups(code.scale, format, wide)
    offset = None if code.offset is None else group_scales.of_groups(code.offset, format, wide)
    shift = None if code.seed is None else draw(code.seed, codes.shape)
    part = values_of(codes, offset, scale, shift, format)
    x = fmt.joined(rotate_back(part) if format.rotate else part, code.features)
    x = group_scales.unbalanced(x, code.mean, code.spread, format).astype(code.dtype)
    return group_scales.with_channels(code.channels, code.outliers, x)


def values_of(
    codes: jax.Array,
    offset: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array | None,
    format: fmt.Format,
) -> jax.Array:
    """Returns the values of codes, as `codes_of` has them."""
    if format.levels == "normal":
        return normal.value_of(codes, format.bits, scale.dtype) * scale
    position = codes.astype(scale.dtype)
    if shift is not None:
        position = position - shift.astype(position.dtype)
    if offset is None:
        return (position - (2**format.bits - 1) / 2) * scale
    return position * scale + offset
