"""Dequantization in one pass."""

import jax

from actjax._shards import Dims
from actjax.formats import quantize as reference
from actjax.formats.code import QuantizedCode
from actjax.kernels.dispatch import Implementation, Kernel


def dequantize(code: QuantizedCode, *, implementation: Implementation | None = None) -> jax.Array:
    """Returns the decoded numbers of a code, [..., d], in the dtype of the encoded array.

    Args:
      code: result of `quantize`, completed with `mean` and `spread` if it was balanced.
      implementation: what computes it; None for the best one that applies.

    Raises:
      ValueError: an implementation that cannot take the code.
    """
    return KERNEL(code, implementation=implementation)


def _dims(x: jax.Array, code: QuantizedCode) -> tuple[tuple, Dims] | None:
    del x
    dims = code.dims()
    return None if code.seed is not None else ((dims,), dims.planes[0])


KERNEL = Kernel(
    "dequantize",
    reference.dequantize,
    _dims,
    mosaic="actjax.kernels.dequantize.mosaic",
    triton="actjax.kernels.dequantize.triton",
    reads_layers=True,
)
