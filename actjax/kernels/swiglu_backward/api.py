"""The backward pass of SwiGLU from codes of its inputs, which no float of is ever in memory."""

import jax

from actjax.kernels import coded
from actjax.kernels.checks import check_code, check_floating
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.format import QuantizedCode
from actjax.kernels.swiglu_backward import pallas, reference


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Returns `silu(gate) * up` and the gradients of `gate` and `up`, at what the codes stand for.

    Reads each code and `dy` once, and writes each result once. The value is what a linear operator
    after it takes for its own gradient.

    Args:
      gate: code of [..., f].
      up: code of the same shape and dtype, of as large groups.
      dy: gradient of the value, [..., f].
      with_value: whether the value is wanted.
      implementation: what computes it; None for the best that applies.

    Returns:
      Three of [..., f], in the dtype of `gate`, computed in float32; the first None if not wanted.

    Raises:
      TypeError: what is no code, or not floating point.
      ValueError: shapes that differ; an implementation that cannot.
    """
    check_floating("swiglu_backward", "dy", dy)
    check_code("swiglu_backward", "gate", gate, dy.shape)
    check_code("swiglu_backward", "up", up, dy.shape)
    return KERNEL(gate, up, dy, with_value=with_value, implementation=implementation)


def _refuses(
    gate: QuantizedCode, up: QuantizedCode, dy: jax.Array, *, with_value: bool
) -> str | None:
    del with_value
    if gate.format.group != up.format.group:
        groups = f"{gate.format.group} and {up.format.group}"
        return f"takes groups of one size for `gate` and `up`, got {groups}"
    reasons = (coded.refuses(code.format, code.dtype, dy.shape) for code in (gate, up))
    return next((reason for reason in reasons if reason is not None), None)


KERNEL = Kernel("swiglu_backward", reference.swiglu_backward, pallas.swiglu_backward, _refuses)
