"""Quantization in one pass: scales are fitted, numbers are rounded and packed."""

from typing import Any

import jax
import jax.numpy as jnp

from actjax._shards import Dims
from actjax.kernels import coded
from actjax.kernels.balance import statistics_shape
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel, Mosaic, Triton
from actjax.kernels.format import Format, QuantizedCode
from actjax.kernels.quantize import mosaic, pallas, reference


def quantize(
    x: jax.Array,
    seed: jax.Array | None = None,
    channels: jax.Array | None = None,
    scale: jax.Array | None = None,
    centre: jax.Array | None = None,
    mean: jax.Array | None = None,
    spread: jax.Array | None = None,
    *,
    format: Format,
    implementation: Implementation | None = None,
) -> QuantizedCode:
    """Returns `x` in few bits: reads it once, and writes its bytes and scales once.

    Args:
      x: [..., d], floating point. A number that is not finite spoils its group.
      seed: seed of the random numbers, uint32 [2], if `format.rounding` needs them.
      channels: channels to store whole, int32 [m], distinct, in [0, d); None for none.
      scale: stored scales by channel [d], if `format.scaling` is "channel". Not in the result.
      centre: stored middles of the levels by channel [d], of the rotated group if `format.rotate`;
        None where they are zero. Not in the result.
      mean: stored means of the channels of each sequence, [..., d] for x [..., S, d], which are
        subtracted first, if `format.scaling` is "group"; None for nothing. Not in the result.
      spread: stored positive numbers that the channels are then divided by, as `mean`; with it.
      format: how numbers are stored.
      implementation: what computes it; None for the best one that applies.

    Raises:
      TypeError: `x` is not floating point, or an array by channel does not have the stored dtype.
      ValueError: wrong shapes; a seed or scales that `format` does not use, or missing ones; an
        implementation that cannot take the arguments.
    """
    _check(x, seed, scale, centre, mean, spread, format)
    arrays = (x, seed, channels, scale, centre, mean, spread)
    return KERNEL(*arrays, format=format, implementation=implementation)


def _check(
    x: jax.Array,
    seed: jax.Array | None,
    scale: jax.Array | None,
    centre: jax.Array | None,
    mean: jax.Array | None,
    spread: jax.Array | None,
    format: Format,
) -> None:
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
    if (mean is None) != (spread is None):
        raise ValueError("`mean` and `spread` of quantize must be given together.")
    if mean is not None and format.scaling != "group":
        raise ValueError(f"`mean` of quantize must not be given: {format}.")
    stored = jnp.dtype(jnp.float32 if format.scale_dtype == "float32" else jnp.uint16)
    by_channel, by_sequence = x.shape[-1:], statistics_shape(x.shape)
    for name, given, shape in (
        ("scale", scale, by_channel),
        ("centre", centre, by_channel),
        ("mean", mean, by_sequence),
        ("spread", spread, by_sequence),
    ):
        if given is None:
            continue
        check_shape("quantize", name, given, shape)
        if given.dtype != stored:
            raise TypeError(f"`{name}` of quantize must be {stored}, as stored, got {given.dtype}.")


def _refuses(
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    scale: jax.Array | None,
    centre: jax.Array | None,
    mean: jax.Array | None,
    spread: jax.Array | None,
    *,
    format: Format,
) -> str | None:
    del seed, channels, scale, centre, mean, spread
    return coded.refuses([format], x.dtype, x.shape)


def _dims(
    code: QuantizedCode,
    x: jax.Array,
    seed: jax.Array | None,
    channels: jax.Array | None,
    scale: jax.Array | None,
    centre: jax.Array | None,
    mean: jax.Array | None,
    spread: jax.Array | None,
    *,
    format: Format,
) -> tuple[tuple, QuantizedCode] | None:
    del format
    if seed is not None:
        return None
    result = code.dims()
    tokens_and_features = result.planes[0]
    *tokens, features = tokens_and_features.names
    by_sequence = Dims((*tokens[:-1], features))
    dims = (
        tokens_and_features,
        None,
        None if channels is None else Dims((None,)),
        None if scale is None else Dims((features,)),
        None if centre is None else Dims((features,)),
        None if mean is None else by_sequence,
        None if spread is None else by_sequence,
    )
    return dims, result


def _slower(x: jax.Array, seed: Any, channels: Any, *scales: Any, format: Format) -> bool:
    # On an H100, 4 bits by channel with 1% of the channels whole take 1.1 of XLA's time.
    del x, seed, scales
    return format.scaling == "channel" and channels is not None


KERNEL = Kernel(
    "quantize", reference.quantize, pallas.quantize, _refuses, _dims,
    Mosaic(mosaic.quantize, mosaic.refuses), Triton("actjax.kernels.quantize.triton", "quantize"),
    _slower,
)  # fmt: skip
