"""`swiglu_backward` for TPUs: codes are decoded by Mosaic, and XLA fuses what follows."""

import jax

from actjax._math.padding import zero_beyond
from actjax._math.precision import accumulation_dtype
from actjax.formats.code import QuantizedCode
from actjax.kernels.dequantize import mosaic
from actjax.kernels.swiglu_backward.reference import value_and_grads


def refuses(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del dy, with_value, features
    return mosaic.refuses(gate) or mosaic.refuses(up)


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
    interpret: bool,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.swiglu_backward.api.swiglu_backward`."""
    wide = accumulation_dtype(gate.dtype)
    decoded = (mosaic.dequantize(code, interpret=interpret) for code in (gate, up))
    g, u = (zero_beyond(features, x.astype(wide)) for x in decoded)
    value, dgate, dup = (x.astype(gate.dtype) for x in value_and_grads(g, u, dy.astype(wide)))
    return value if with_value else None, dgate, dup
