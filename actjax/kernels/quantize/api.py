"""Quantization in one pass: scales are fitted, numbers are rounded and packed."""

import jax.numpy as jnp

from actjax._shards import Dims
from actjax.formats import quantize as reference
from actjax.formats.balance import statistics_shape
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel


def quantize(
    inputs: QuantizeInputs, *, format: Format, implementation: Implementation | None = None
) -> QuantizedCode:
    """Returns an activation in few bits: reads it once, and writes its bytes and scales once.

    Args:
      inputs: the activation, and arrays that `format` needs.
      format: how numbers are stored.
      implementation: what computes it; None for the best one that applies.

    Raises:
      TypeError: `x` is not floating point, or a mean or spread does not have the stored dtype.
      ValueError: wrong shapes; a seed that `format` does not use, or a missing one; an
        implementation that cannot take the arguments.
    """
    check_inputs("quantize", inputs, format)
    return KERNEL(inputs, format=format, implementation=implementation)


def check_inputs(kernel: str, inputs: QuantizeInputs, format: Format) -> None:
    """Raises unless a kernel can encode these arrays in a format."""
    x, seed = inputs.x, inputs.seed
    check_floating(kernel, "x", x)
    if x.ndim < 1:
        raise ValueError(f"`x` of {kernel} must have features, [..., d], got shape {x.shape}.")
    draws = format.rounding != "nearest"
    if (seed is not None) != draws:
        raise ValueError(f"`seed` of {kernel} must {'' if draws else 'not '}be given: {format}.")
    if seed is not None:
        check_shape(kernel, "seed", seed, (2,))
    if (inputs.mean is None) != (inputs.spread is None):
        raise ValueError(f"`mean` and `spread` of {kernel} must be given together.")
    stored = jnp.dtype(jnp.float32 if format.scale_dtype == "float32" else jnp.uint16)
    for name in ("mean", "spread"):
        statistics = getattr(inputs, name)
        if statistics is None:
            continue
        check_shape(kernel, name, statistics, statistics_shape(x.shape))
        if statistics.dtype != stored:
            raise TypeError(
                f"`{name}` of {kernel} must be {stored}, as stored, got {statistics.dtype}."
            )


def _dims(
    code: QuantizedCode, inputs: QuantizeInputs, *, format: Format
) -> tuple[tuple[QuantizeInputs], QuantizedCode] | None:
    del format
    dims = dims_of_inputs(code, inputs)
    return None if dims is None else ((dims[0],), dims[1])


def dims_of_inputs(
    code: QuantizedCode, inputs: QuantizeInputs, features: str | None = "features"
) -> tuple[QuantizeInputs, QuantizedCode] | None:
    """Returns the `Dims` of what is encoded and of its code; None if parts draw other numbers.

    Args:
      code: the code.
      inputs: what is encoded.
      features: name of the axis of features; None if it cannot be split.
    """
    if inputs.seed is not None:
        return None
    result = code.dims(features)
    tokens_and_features = result.planes[0]
    *tokens, last = tokens_and_features.names
    by_sequence = None if inputs.mean is None else Dims((*tokens[:-1], last))
    channels = None if inputs.channels is None else Dims((None,))
    return QuantizeInputs(tokens_and_features, None, channels, by_sequence, by_sequence), result


KERNEL = Kernel(
    "quantize",
    reference.quantize,
    _dims,
    mosaic="actjax.kernels.quantize.mosaic",
    triton="actjax.kernels.quantize.triton",
    writes_layers="results",
)
