"""Scales and offsets of groups: fitting them, rounding them, storing them, and dividing by them."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from actjax._explicit import explicit_spec
from actjax._math.precision import accumulation_dtype, over
from actjax.formats.code import Format, ScaleDtype, grouped
from actjax.formats.rotation import rotate


def prepare(x: jax.Array, format: Format) -> jax.Array:
    """Returns `x` [..., d] in whole groups, [..., groups, group], in the accumulation dtype.

    They are rotated if `format` says so. Numbers that are then rounded to the nearest level are
    rounded to bfloat16 before, as the matrix units of GPUs take them.
    """
    part = grouped(x.astype(accumulation_dtype(x.dtype)), format)
    if not format.rotate:
        return part
    if format.rounding == "nearest":
        # XLA may simplify a cast there and back to the identity.
        part = jax.lax.reduce_precision(part, 8, 7)
    return rotate(part)


def fit(part: jax.Array, format: Format) -> tuple[jax.Array | None, jax.Array]:
    """Returns the offset (or None) and the scale of each group of `part` [..., groups, group].

    They have the dtype of `part`, and broadcast against it. The offset and the scale of uniform
    levels have the values that will be stored.
    """
    if format.levels == "normal":
        return None, root_mean_square(part, (-1,))
    return fit_range(part, 2**format.bits - 1, format)


def root_mean_square(part: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the scale of "normal" levels: one for the numbers along `axes`."""
    # Of numbers relative to the largest, so that no square overflows.
    largest = jnp.max(jnp.abs(part), axes, keepdims=True, initial=0)
    unit = over(part, largest)
    return jnp.sqrt(jnp.mean(unit * unit, axes, keepdims=True)) * largest


def fit_range(part: jax.Array, top: jax.Array | int, format: Format) -> tuple[jax.Array, jax.Array]:
    """Returns offset and scale of uniform levels from 0 to `top` over the range of each group."""
    high = nan_where_any(part, (-1,), jnp.max(part, -1, keepdims=True))
    offset = rounded_scale(jnp.min(part, -1, keepdims=True), format.scale_dtype, towards=-1)
    return offset, rounded_scale((high - offset) / top, format.scale_dtype, towards=1)


def nan_where_any(part: jax.Array, axes: tuple[int, ...], extreme: jax.Array) -> jax.Array:
    """Returns an extreme of `part` over `axes`, NaN where it has one: XLA for CPUs may drop it."""
    return jnp.where(jnp.isnan(part).any(axes, keepdims=True), jnp.nan, extreme)


SLACK = 2.0**-20
"""Part of a scale by which the levels may fall short of the range of a group.

It never changes a code, but it exceeds the rounding of a division. A quotient that is exact, as it
often is between bfloat16 numbers, therefore stays exact on every device."""


def rounded_scale(scale: jax.Array, dtype: ScaleDtype, towards: int = 0) -> jax.Array:
    """Rounds to `dtype`: to the nearest (0), down (-1), or up except for `SLACK` (1)."""
    info = jnp.finfo(dtype)
    if info.nmant >= jnp.finfo(scale.dtype).nmant:
        return scale
    # XLA may simplify a cast there and back to the identity.
    rounded = jax.lax.reduce_precision(scale, info.nexp, info.nmant)
    if towards == 0:
        return rounded
    size = jnp.abs(scale)
    # Between half a unit in the last place and one and a half.
    moved = scale + size * (towards * 2.0 ** -(info.nmant + 1))
    next_one = jax.lax.reduce_precision(moved, info.nexp, info.nmant)
    wrong = rounded > scale if towards < 0 else rounded - scale < size * -SLACK
    return jax.lax.select(wrong, next_one, rounded)


def stored(x: jax.Array, dtype: ScaleDtype) -> jax.Array:
    """Returns scales or statistics in the form that codes hold: bfloat16 as its bits, uint16."""
    rounded = x.astype(dtype)
    # As bits, because XLA for CPUs holds stacks of 16-bit floats in 32 bits.
    return cast(jax.Array, rounded if dtype == "float32" else rounded.view(jnp.uint16))


def of_groups(scale: jax.Array, format: Format, dtype: Any) -> jax.Array:
    """Returns stored scales [..., groups] as numbers, [..., groups, 1]."""
    return scale.view(format.scale_dtype).astype(dtype)[..., None]


def balanced(
    x: jax.Array, mean: jax.Array | None, spread: jax.Array | None, format: Format
) -> jax.Array:
    """Returns `(x - mean) / spread` in the accumulation dtype; `x` itself without `mean`.

    Args:
      x: [..., d].
      mean: stored means of the channels of each sequence, as `balance_of` returns them; or None.
      spread: stored divisors, likewise; None with `mean`.
      format: format of the code.
    """
    if mean is None or spread is None:
        return x
    wide = accumulation_dtype(x.dtype)
    mean, spread = (_of_tokens(stored, x.ndim, format, wide) for stored in (mean, spread))
    return (x.astype(wide) - mean) * (1 / spread)


def unbalanced(
    y: jax.Array, mean: jax.Array | None, spread: jax.Array | None, format: Format
) -> jax.Array:
    """Returns `y * spread + mean`; the inverse of `balanced`."""
    if mean is None or spread is None:
        return y
    mean, spread = (_of_tokens(stored, y.ndim, format, y.dtype) for stored in (mean, spread))
    return y * spread + mean


def _of_tokens(stored: jax.Array, ndim: int, format: Format, dtype: Any) -> jax.Array:
    """Returns statistics [..., d] of sequences, which broadcast against [..., S, d]."""
    values = stored.view(format.scale_dtype).astype(dtype)
    return values if ndim == 1 else values[..., None, :]


def without(channels: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x` [..., d] with zeros in the given channels."""
    if channels is None:
        return x
    is_outlier = jnp.zeros(x.shape[-1], bool).at[channels].set(True)
    return jnp.where(is_outlier, jnp.zeros((), x.dtype), x)


def of_channels(channels: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """Returns the given channels of `x` [..., d], [..., m]; None without channels."""
    if channels is None:
        return None
    return x.at[..., channels].get(out_sharding=explicit_spec(x, whole=(-1,)))


def with_channels(channels: jax.Array | None, values: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x` [..., d] with `values` [..., m] in the given channels."""
    if channels is None:
        return x
    return x.at[..., channels].set(values, out_sharding=explicit_spec(x))
