"""RMS normalization that encodes its input for the backward pass while it reads it."""

from typing import Any

import jax

from actjax._shards import Dims
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.checks import check_shape
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.quantize.api import check_inputs, dims_of_inputs
from actjax.kernels.rms_norm_encode import reference


def rms_norm_encode(
    inputs: QuantizeInputs,
    scale: jax.Array,
    *,
    format: Format,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, QuantizedCode]:
    """Returns `x / sqrt(mean(x²) + eps) * scale`, and the code of `x`, which memory sends once.

    Args:
      inputs: an activation [..., d], and arrays that its format needs.
      scale: [d].
      format: how numbers of `x` are stored.
      eps: added to the mean square.
      implementation: what computes it; None for the best one that applies. Where no program does
        all of it, `quantize` encodes, and plain JAX computes the value.

    Returns:
      The value, [..., d] in the dtype of `x`, computed in float32; and the code, as
      `actjax.kernels.quantize.api.quantize` returns it.

    Raises:
      TypeError: an input that is not floating point.
      ValueError: a wrong shape of `scale`; as for `quantize`; an implementation that cannot take
        the arguments.
    """
    check_inputs("rms_norm_encode", inputs, format)
    check_shape("rms_norm_encode", "scale", scale, inputs.x.shape[-1:])
    return KERNEL(inputs, scale, format=format, eps=eps, implementation=implementation)


def _dims(
    result: Any, inputs: QuantizeInputs, scale: jax.Array, *, format: Format, eps: float
) -> tuple[tuple, tuple] | None:
    del format, eps
    # A mean needs all features.
    dims = dims_of_inputs(result[1], inputs, features=None)
    return None if dims is None else ((dims[0], Dims.whole(scale)), (dims[0].x, dims[1]))


KERNEL = Kernel(
    "rms_norm_encode",
    reference.rms_norm_encode,
    _dims,
    mosaic="actjax.kernels.rms_norm_encode.mosaic",
    triton="actjax.kernels.rms_norm_encode.triton",
    writes_layers="results",
)
