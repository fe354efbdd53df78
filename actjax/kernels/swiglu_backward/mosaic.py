"""`swiglu_backward` for TPUs: codes are decoded by Mosaic, and XLA fuses what follows."""

import jax

from actjax._math.precision import accumulation_dtype
from actjax.formats.code import QuantizedCode
from actjax.kernels.dequantize import mosaic
from actjax.kernels.swiglu_backward.reference import value_and_grads


def refuses(
    gate: QuantizedCode, up: QuantizedCode, dy: jax.Array, *, with_value: bool
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del dy, with_value
    return mosaic.refuses(gate) or mosaic.refuses(up)


def swiglu_backward(
    gate: QuantizedCode, up: QuantizedCode, dy: jax.Array, *, with_value: bool, interpret: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.swiglu_backward.api.swiglu_backward`."""
    wide = accumulation_dtype(gate.dtype)
    g, u = (mosaic.dequantize(code, interpret=interpret).astype(wide) for code in (gate, up))
    value, dgate, dup = (x.astype(gate.dtype) for x in value_and_grads(g, u, dy.astype(wide)))
    return value if with_value else None, dgate, dup
