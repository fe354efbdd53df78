"""Numbers to few bits: scales fitted, rounded and packed, in one pass."""

import jax
import jax.numpy as jnp

from actjax.kernels import coded
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.format import Format, QuantizedCode
from actjax.kernels.quantize import pallas, reference


def quantize(
    x: jax.Array,
    seed: jax.Array | None = None,
    channels: jax.Array | None = None,
    scale: jax.Array | None = None,
    centre: jax.Array | None = None,
    *,
    format: Format,
    implementation: Implementation | None = None,
) -> QuantizedCode:
    """Returns `x` in few bits: reads it once, and writes its bytes and scales once.

    Args:
      x: [..., d], floating point. What is not finite makes its group meaningless.
      seed: of the random numbers, uint32 [2], if `format.rounding` draws.
      channels: those that are kept whole, int32 [m], distinct, of [0, d); None for none.
      scale: scales by channel [d], as they are stored, if `format.scaling` is "channel". Not in the
        result.
      centre: middles of the levels by channel [d], as they are stored; None where they are zero. Of
        what `format.rotate` makes of a group. Not in the result either.
      format: how numbers are stored.
      implementation: what computes it; None for the best that applies.

    Raises:
      TypeError: `x` is not floating point, or `scale` or `centre` not as it is stored.
      ValueError: wrong shapes; a seed or scales where `format` has no use for them, or none where
        it has; an implementation that cannot.
    """
    check_floating("quantize", "x", x)
    if x.ndim < 1:
        raise ValueError(f"`x` of quantize must have features, [..., d], got shape {x.shape}.")
    for name, given, used in (
        ("seed", seed, format.rounding != "nearest"),
        ("scale", scale, format.scaling == "channel"),
    ):
        if (given is not None) != used:
            raise ValueError(
                f"`{name}` of quantize must {'' if used else 'not '}be given: {format}."
            )
    if seed is not None:
        check_shape("quantize", "seed", seed, (2,))
    if centre is not None and format.scaling != "channel":
        raise ValueError(f"`centre` of quantize must not be given: {format}.")
    stored = jnp.dtype(jnp.float32 if format.scale_dtype == "float32" else jnp.uint16)
    for name, given in (("scale", scale), ("centre", centre)):
        if given is None:
            continue
        check_shape("quantize", name, given, x.shape[-1:])
        if given.dtype != stored:
            raise TypeError(f"`{name}` of quantize must be {stored}, as stored, got {given.dtype}.")
    return KERNEL(x, seed, channels, scale, centre, format=format, implementation=implementation)


def _refuses(
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    scale: jax.Array | None,
    centre: jax.Array | None,
    *,
    format: Format,
) -> str | None:
    del seed, channels, scale, centre
    return coded.refuses(format, x.dtype, x.shape)


KERNEL = Kernel("quantize", reference.quantize, pallas.quantize, _refuses)
