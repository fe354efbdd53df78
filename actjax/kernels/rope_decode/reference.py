"""The definition of `rope_decode`: plain JAX, never tuned."""

import jax

from actjax.formats.code import QuantizedCode
from actjax.formats.quantize import dequantize
from actjax.kernels.rope_encode.reference import value


def rope_decode(code: QuantizedCode, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `actjax.kernels.rope_decode.api.rope_decode`."""
    return value(dequantize(code), cos, sin)
