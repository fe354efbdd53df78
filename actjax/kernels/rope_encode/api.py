"""Rotary position embedding that encodes its input for the backward pass while it reads it."""

from typing import Any

import jax

from actjax._shards import Dims
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.checks import check_shape
from actjax.kernels.dispatch import Compute, Implementation, Kernel
from actjax.kernels.quantize.api import KERNEL as QUANTIZE
from actjax.kernels.quantize.api import check_inputs, dims_of_inputs
from actjax.kernels.rope_encode import reference


def rope_encode(
    inputs: QuantizeInputs,
    cos: jax.Array,
    sin: jax.Array,
    *,
    format: Format,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, QuantizedCode]:
    """Returns `actjax.rope(x, cos, sin)` with merged heads, and the code of `x`: reads `x` once.

    Args:
      inputs: an activation [B, S, H * D], and arrays that its format needs.
      cos: cosines of the angles, [S, D / 2].
      sin: sines of the angles, [S, D / 2].
      format: how numbers of `x` are stored.
      implementation: what computes it; None for the best one that applies. Where no program does
        all of it, `quantize` encodes, and plain JAX rotates.

    Returns:
      The value, [B, S, H * D] in the dtype of `x`, rotated in float32; and the code, as
      `actjax.kernels.quantize.api.quantize` returns it.

    Raises:
      TypeError: an input that is not floating point.
      ValueError: tables that do not fit `x`; as for `quantize`; an implementation that cannot take
        the arguments.
    """
    check_inputs("rope_encode", inputs, format)
    check_tables("rope_encode", inputs.x.shape, cos, sin)
    return KERNEL(inputs, cos, sin, format=format, implementation=implementation)


def check_tables(kernel: str, shape: tuple[int, ...], cos: jax.Array, sin: jax.Array) -> None:
    """Raises unless an activation of this shape can be rotated by tables."""
    check_shape(kernel, "sin", sin, cos.shape)
    if len(shape) != 3 or cos.ndim != 2 or len(cos) != shape[1] or shape[2] % (2 * cos.shape[1]):
        raise ValueError(
            f"`x` of {kernel} must be [B, S, H * D], and `cos` [S, D / 2]: got {shape} and"
            f" {cos.shape}."
        )


def _dims(
    result: Any, inputs: QuantizeInputs, cos: jax.Array, sin: jax.Array, *, format: Format
) -> tuple[tuple, tuple] | None:
    del sin
    dims = dims_of_inputs(result[1], inputs, features_of(cos, format))
    if dims is None:
        return None
    tables = Dims((dims[0].x.names[1], None))
    return (dims[0], tables, tables), (dims[0].x, dims[1])


def features_of(cos: jax.Array, format: Format) -> str | None:
    """Returns the axis of features for `QuantizedCode.dims`: parts of it must have whole heads."""
    return None if format.group % (2 * cos.shape[-1]) else "features"


def _parts(
    compute: Compute,
    inputs: QuantizeInputs,
    cos: jax.Array,
    sin: jax.Array,
    *,
    format: Format,
    into: Any = None,
) -> tuple[jax.Array, QuantizedCode]:
    """Encodes by `quantize`."""
    _, place = (None, None) if into is None else into
    code = compute(QUANTIZE, inputs, into=place, format=format)
    return reference.value(inputs.x, cos, sin), code


KERNEL = Kernel(
    "rope_encode",
    reference.rope_encode,
    _dims,
    triton="actjax.kernels.rope_encode.triton",
    parts=_parts,
    writes_layers="results",
)
