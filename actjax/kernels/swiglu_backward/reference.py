"""The definition of `swiglu_backward`: plain JAX, never tuned."""

import jax

from actjax._math.padding import zero_beyond
from actjax._math.precision import accumulation_dtype
from actjax.formats.code import QuantizedCode
from actjax.formats.quantize import dequantize


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.swiglu_backward.api.swiglu_backward`."""
    wide = accumulation_dtype(gate.dtype)
    decoded = dequantize(gate), dequantize(up)
    g, u = (zero_beyond(features, x.astype(wide)) for x in decoded)
    value, dgate, dup = (x.astype(gate.dtype) for x in value_and_grads(g, u, dy.astype(wide)))
    return value if with_value else None, dgate, dup


def value_and_grads(
    gate: jax.Array, up: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `silu(gate) * up` and the gradients of both, in their dtype."""
    sigmoid = jax.nn.sigmoid(gate)
    activated = gate * sigmoid
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return activated * up, dgate, dy * activated
