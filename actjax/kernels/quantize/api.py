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
      x: [..., d], floating point. What is not finite makes its group meaningless.
      seed: of the random numbers, uint32 [2], if `format.rounding` draws.
      channels: those that are kept whole, int32 [m]; None for none.
      step: scales by channel [d], as they are stored, if `format.scaling` is "channel". Not in the
        result.
      format: how numbers are stored.
      implementation: what computes it; None for the best that applies.

    Raises:
      ValueError: a seed or scales where `format` has no use for them, or none where it has; an
        implementation that cannot.
    """
    for name, given, used in (
        ("seed", seed, format.rounding != "nearest"),
        ("step", step, format.scaling == "channel"),
    ):
        if (given is not None) != used:
            raise ValueError(
                f"`{name}` of quantize must {'' if used else 'not '}be given: {format}."
            )
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
