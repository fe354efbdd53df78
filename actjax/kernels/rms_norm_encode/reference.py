"""The definition of `rms_norm_encode`: plain JAX, never tuned."""

import jax

from actjax._math.precision import accumulation_dtype, by_feature
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.formats.quantize import quantize
from actjax.kernels.rms_norm_backward.reference import normalize


def rms_norm_encode(
    inputs: QuantizeInputs, scale: jax.Array, *, format: Format, eps: float
) -> tuple[jax.Array, QuantizedCode]:
    """As `actjax.kernels.rms_norm_encode.api.rms_norm_encode`."""
    return value(inputs.x, scale, eps), quantize(inputs, format=format)


def value(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns `x / sqrt(mean(x²) + eps) * scale`, in the dtype of `x`."""
    unit, _ = normalize(x.astype(accumulation_dtype(x.dtype)), eps)
    return (unit * by_feature(scale, unit)).astype(x.dtype)
