"""The backward pass of RMS normalization from its input or a code of it."""

import dataclasses
from typing import Any

import jax

from actjax._math.precision import accumulation_dtype
from actjax._shards import Dims
from actjax.formats.code import QuantizedCode, token_names
from actjax.kernels.checks import check_code, check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.rms_norm_backward import reference


def rms_norm_backward(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    with_value: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Returns `x / sqrt(mean(x²) + eps) * scale` and the gradients, at the decoded input.

    It reads `x` and `dy` once, and writes each result once. The gradient of `scale` is summed in a
    fixed order. A linear operator that follows needs the value for its weight gradient.

    Args:
      x: [..., d], or a code of it.
      scale: [d].
      dy: gradient of the value, [..., d].
      addend: what is added to the gradient of `x` after that was rounded to its dtype, such as the
        cotangent of a skip connection, in the shape and dtype of `x`; None for nothing.
      eps: added to the mean square.
      with_value: whether to return the value.
      implementation: what computes it; None for the best one that applies.

    Returns:
      The value (None without `with_value`) and the gradient of `x`, [..., d] in the dtype of `x`,
      and the gradient of `scale`, [d] in its dtype; computed in float32.

    Raises:
      TypeError: `dy` is not floating point.
      ValueError: shapes differ; an implementation that cannot take the arguments.
    """
    check_floating("rms_norm_backward", "dy", dy)
    if isinstance(x, QuantizedCode):
        check_code("rms_norm_backward", "x", x, dy.shape)
    else:
        check_shape("rms_norm_backward", "x", x, dy.shape)
    check_shape("rms_norm_backward", "scale", scale, dy.shape[-1:])
    # The gradient of `scale` is rounded once, after the sums of all devices are added up.
    wide = scale.astype(accumulation_dtype(dy.dtype))
    value, dx, dscale = KERNEL(
        x, wide, dy, addend, eps=eps, with_value=with_value, implementation=implementation
    )
    return value, dx, dscale.astype(scale.dtype)


def _dims(
    result: Any,
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    **options: Any,
) -> tuple[tuple, tuple] | None:
    del options
    if isinstance(x, QuantizedCode) and x.seed is not None:
        return None
    rows = Dims((*token_names(dy.ndim - 1), None))
    of_x = x.dims(features=None) if isinstance(x, QuantizedCode) else rows
    sums = dataclasses.replace(Dims.whole(scale), summed=True)
    of_addend = None if addend is None else rows
    inputs = of_x, Dims.whole(scale), rows, of_addend
    return inputs, (None if result[0] is None else rows, rows, sums)


KERNEL = Kernel(
    "rms_norm_backward",
    reference.rms_norm_backward,
    _dims,
    mosaic="actjax.kernels.rms_norm_backward.mosaic",
    triton="actjax.kernels.rms_norm_backward.triton",
    reads_layers=True,
    addend=(3, -2),
)
