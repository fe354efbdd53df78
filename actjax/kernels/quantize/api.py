"""Numbers to few bits: scales fitted, rounded and packed, in one pass."""

import jax

from actjax.kernels import tiles
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.format import Format, QuantizedCode
from actjax.kernels.quantize import pallas, reference


def quantize(
    x: jax.Array,
    seed: jax.Array | None = None,
    channels: jax.Array | None = None,
    step: jax.Array | None = None,
    *,
    format: Format,
    implementation: Implementation | None = None,
) -> QuantizedCode:
    """Returns `x` in few bits: reads it once, and writes its bytes and scales once.

    Args:
      x: [..., d], floating point.
      seed: of the random numbers, uint32 [2], if `format.rounding` draws.
      channels: those that are kept whole, int32 [m]; None for none.
      step: scales by channel [d], as they are stored, if `format.scaling` is "channel". Not in the
        result.
      format: how numbers are stored.
      implementation: what computes it; None for the best that applies.

    Raises:
      ValueError: an implementation that cannot.
    """
    return KERNEL(x, seed, channels, step, format=format, implementation=implementation)


def _refuses(
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    step: jax.Array | None,
    *,
    format: Format,
) -> str | None:
    del seed, channels, step
    return tiles.refuses(format, x.dtype, x.shape)


KERNEL = Kernel("quantize", reference.quantize, pallas.quantize, _refuses)
