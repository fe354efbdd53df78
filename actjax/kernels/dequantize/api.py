"""Few bits to numbers, in one pass."""

import jax

from actjax.kernels import coded
from actjax.kernels.dequantize import pallas, reference
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.format import QuantizedCode


def dequantize(code: QuantizedCode, *, implementation: Implementation | None = None) -> jax.Array:
    """Returns what a code of `quantize` stands for, [..., d], in the dtype of what was encoded.

    Args:
      code: with `scale`, also by channel.
      implementation: what computes it; None for the best that applies.

    Raises:
      ValueError: an implementation that cannot.
    """
    return KERNEL(code, implementation=implementation)


def _refuses(code: QuantizedCode) -> str | None:
    shape = (*code.planes[0].shape[:-1], code.features)
    return coded.refuses(code.format, code.dtype, shape)


KERNEL = Kernel("dequantize", reference.dequantize, pallas.dequantize, _refuses)
