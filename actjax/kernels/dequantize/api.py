"""Dequantization in one pass."""

import jax

from actjax._shards import Dims
from actjax.kernels import coded
from actjax.kernels.dequantize import mosaic, pallas, reference
from actjax.kernels.dispatch import Implementation, Kernel, Mosaic
from actjax.kernels.format import QuantizedCode


def dequantize(code: QuantizedCode, *, implementation: Implementation | None = None) -> jax.Array:
    """Returns the decoded numbers of a code, [..., d], in the dtype of the encoded array.

    Args:
      code: result of `quantize`, completed with `scale` (and `centre`) if it scales by channel.
      implementation: what computes it; None for the best one that applies.

    Raises:
      ValueError: an implementation that cannot take the code.
    """
    return KERNEL(code, implementation=implementation)


def _refuses(code: QuantizedCode) -> str | None:
    shape = (*code.planes[0].shape[:-1], code.features)
    return coded.refuses([code.format], code.dtype, shape)


def _dims(x: jax.Array, code: QuantizedCode) -> tuple[tuple, Dims] | None:
    del x
    dims = code.dims()
    return None if code.seed is not None else ((dims,), dims.planes[0])


KERNEL = Kernel(
    "dequantize", reference.dequantize, pallas.dequantize, _refuses, _dims,
    Mosaic(mosaic.dequantize, mosaic.refuses),
)  # fmt: skip
