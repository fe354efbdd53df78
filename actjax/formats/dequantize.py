"""The definition of `dequantize`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype
from actjax.formats import code as fmt
from actjax.formats.levels import level_values
from actjax.formats.packing import unpack
from actjax.formats.quantize import draw
from actjax.formats.rotation import rotate_back
from actjax.formats.scales import scale_of, unbalanced


def dequantize(code: fmt.QuantizedCode) -> jax.Array:
    """As `actjax.kernels.dequantize.api.dequantize`."""
    format, wide = code.format, accumulation_dtype(code.dtype)
    fuse = format.levels == "uniform" and not format.rotate
    codes = unpack(code.planes, format.bits, code.features, format.group, fuse=fuse)
    parts = []
    for segment in fmt.segments(code.features, format.group):
        scale = scale_of(segment, code.scale, format, wide)
        offset = None if code.offset is None else scale_of(segment, code.offset, format, wide)
        shift = None if code.seed is None else draw(code.seed, segment, codes.shape, format)
        part = values_of(segment.take(codes), offset, scale, shift, format)
        if format.rotate:
            part = rotate_back(part)
        parts.append(segment.flatten(part))
    x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    x = unbalanced(x, code.mean, code.spread, format).astype(code.dtype)
    return x if code.channels is None else x.at[..., code.channels].set(code.outliers)


def values_of(
    codes: jax.Array,
    offset: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array | None,
    format: fmt.Format,
) -> jax.Array:
    """Returns the values of codes, as `actjax.formats.quantize.codes_of` has them."""
    if format.levels == "normal":
        return level_values(codes, format.bits, scale.dtype) * scale
    position = codes.astype(scale.dtype)
    if shift is not None:
        position = position - shift.astype(position.dtype)
    if offset is None:
        return (position - (2**format.bits - 1) / 2) * scale
    return position * scale + offset
