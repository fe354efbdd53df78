"""The definition of `swiglu_encode`: plain JAX, never tuned."""

import jax

from actjax._math.padding import zero_beyond
from actjax._math.precision import accumulation_dtype
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.formats.quantize import quantize


def swiglu_encode(
    gate: QuantizeInputs,
    up: QuantizeInputs,
    *,
    formats: tuple[Format, Format],
    features: int | None,
) -> tuple[jax.Array, QuantizedCode, QuantizedCode]:
    """As `actjax.kernels.swiglu_encode.api.swiglu_encode`."""
    codes = quantize(gate, format=formats[0]), quantize(up, format=formats[1])
    return value(gate.x, up.x, features), *codes


def value(gate: jax.Array, up: jax.Array, features: int | None) -> jax.Array:
    """Returns `silu(gate) * up`, zero beyond `features`, in the dtype of `gate`."""
    wide = accumulation_dtype(gate.dtype)
    product = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
    return zero_beyond(features, product).astype(gate.dtype)
