"""What numbers in few bits mean: levels, scales, and the order that they are stored in.

Shared by the kernels that write them and those that read them.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import accumulation_dtype
from actjax.kernels.rotation import rotate

Rounding = Literal["nearest", "stochastic", "dither"]
Scaling = Literal["group", "channel"]
Levels = Literal["uniform", "normal"]
ScaleDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class Format:
    """How numbers are stored; as in `actjax.Quantized`, which explains each and checks them.

    Attributes:
      bits: of a number.
      group: features that share a scale.
      rounding: "nearest", "stochastic" or "dither".
      scaling: "group" or "channel".
      scale_dtype: of scales and lowest values.
      levels: "uniform" or "normal".
      rotate: whether groups are rotated.
    """

    bits: int
    group: int
    rounding: Rounding
    scaling: Scaling
    scale_dtype: ScaleDtype
    levels: Levels
    rotate: bool

    @property
    def affine(self) -> bool:
        """Whether groups have a lowest value beside their scale."""
        return self.scaling == "group" and self.levels == "uniform"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCode:
    """Numbers in a few bits each, and what they stand for.

    Attributes:
      planes: bytes, as `actjax.kernels.packing.pack` returns them, by group.
      offset: what the code 0 stands for, by group [..., groups]; None where that follows from `scale`.
      scale: distance of two levels, or unit of uneven ones: [..., groups], or [d] by channel. Both
        as the bits of their dtype if that has 16.
      centre: what the middle of the levels stands for, by channel [d], likewise as bits; None where
        that is zero, or follows from `offset`.
      outliers: channels that are kept whole, [..., m]; None if there are none.
      channels: which channels these are, int32 [m].
      seed: of the dither, uint32 [2]; None without.
      features: d. Static.
      dtype: of the activation. Static.
      format: what the bits mean. Static.
    """

    planes: Any
    offset: Any
    scale: Any
    centre: Any
    outliers: Any
    channels: Any
    seed: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})


class Segment(NamedTuple):
    """A run of features that is cut into groups of one size.

    Attributes:
      start: its first feature.
      first: its first group.
      groups: how many.
      size: features of each.
    """

    start: int
    first: int
    groups: int
    size: int

    def take(self, x: jax.Array) -> jax.Array:
        """Returns its part of `x` [..., d], as [..., groups, size]."""
        part = x[..., self.start : self.start + self.groups * self.size]
        return part.reshape(*x.shape[:-1], self.groups, self.size)

    def of_groups(self, scale: jax.Array) -> jax.Array:
        """Returns its part of scales by group, as [..., groups, 1]."""
        return scale[..., self.first : self.first + self.groups, None]

    @staticmethod
    def flatten(part: jax.Array) -> jax.Array:
        """Inverse of `take`."""
        return part.reshape(*part.shape[:-2], part.shape[-2] * part.shape[-1])


def segments(features: int, group: int) -> list[Segment]:
    """Returns the whole groups, and the rest as one of its own."""
    groups, rest = divmod(features, group)
    whole = [Segment(0, 0, groups, group)] if groups or not rest else []
    return whole + ([Segment(groups * group, groups, 1, rest)] if rest else [])


def group_count(features: int, group: int) -> int:
    """Returns the number of groups, the rest counted as one."""
    return -(-features // group)


def noise_words(features: int, group: int) -> int:
    """Returns the random words of a token: of a group, half as many as features, rounded up."""
    groups, rest = divmod(features, group)
    return groups * -(-group // 2) + -(-rest // 2)


def prepare(part: jax.Array, format: Format) -> jax.Array:
    """Returns what is rounded of `part` [..., groups, size], in the accumulation dtype."""
    return rotate(part) if format.rotate else part.astype(accumulation_dtype(part.dtype))


def fit(part: jax.Array, format: Format) -> tuple[jax.Array | None, jax.Array]:
    """Returns the lowest value and the scale of each group of `part` [..., groups, size].

    As they will be stored, but in the dtype of `part`, with axes for it to broadcast against.
    """
    axes = (-1,) if format.scaling == "group" else tuple(range(part.ndim - 2))
    top = 2**format.bits - 1
    if format.levels == "normal":
        # Of numbers within one, so that no square overflows.
        largest = jnp.max(jnp.abs(part), axes, keepdims=True, initial=0)
        part = over(part, largest)
        deviation = jnp.sqrt(jnp.mean(part * part, axes, keepdims=True))
        levels = level_values(nearest_level(part, deviation, format.bits), format.bits, part.dtype)
        fitted = jnp.sum(part * levels, axes, keepdims=True) / jnp.sum(
            levels * levels, axes, keepdims=True
        )
        return None, rounded_scale(fitted * largest, format.scale_dtype)
    if format.scaling == "channel":
        largest = jnp.max(jnp.abs(part), axes, keepdims=True, initial=0)
        return None, rounded_scale(largest * (2 / top), format.scale_dtype, towards=1)
    high = jnp.max(part, axes, keepdims=True)
    offset = rounded_scale(jnp.min(part, axes, keepdims=True), format.scale_dtype, towards=-1)
    return offset, rounded_scale((high - offset) / top, format.scale_dtype, towards=1)


SLACK = 2.0**-20
"""Part of a scale that it may fall short of the range over its levels.

Far less than decides a code, but more than what division is rounded by: a quotient that is exact,
as it often is between numbers of bfloat16, stays so on every device."""


def rounded_scale(scale: jax.Array, dtype: ScaleDtype, towards: int = 0) -> jax.Array:
    """Rounds to what `dtype` can hold: to the nearest, down (-1), or up but for `SLACK` (1)."""
    info = jnp.finfo(dtype)
    if info.nmant >= jnp.finfo(scale.dtype).nmant:
        return scale
    # Not a cast there and back, which XLA may take for the identity.
    rounded = jax.lax.reduce_precision(scale, info.nexp, info.nmant)
    if towards != 0:
        # Half a unit of the last place, at least, and less than one and a half.
        moved = scale + towards * jnp.abs(scale) * 2.0 ** -(info.nmant + 1)
        next_one = jax.lax.reduce_precision(moved, info.nexp, info.nmant)
        slack = SLACK * jnp.abs(scale) if towards > 0 else 0
        rounded = jnp.where((rounded - scale) * towards < -slack, next_one, rounded)
    return rounded


def stored_scales(scales: list[jax.Array], format: Format) -> jax.Array:
    """Returns the scales of all segments side by side, as they are stored."""
    if format.scaling == "channel":
        flat = [scale.reshape(-1) for scale in scales]
    else:
        flat = [scale[..., 0] for scale in scales]
    joined = jnp.concatenate(flat, axis=-1).astype(format.scale_dtype)
    # As bits: XLA for CPUs holds stacks of 16-bit floats in 32 bits.
    return joined if format.scale_dtype == "float32" else joined.view(jnp.uint16)


def scale_of(segment: Segment, scale: jax.Array, format: Format, dtype: Any) -> jax.Array:
    """Returns the stored scales of a segment, to broadcast against its [..., groups, size]."""
    scale = scale.view(format.scale_dtype).astype(dtype)
    return segment.take(scale) if format.scaling == "channel" else segment.of_groups(scale)


def without(channels: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x` [..., d] with zeros in these channels."""
    if channels is None:
        return x
    whole = jnp.zeros(x.shape[-1], bool).at[channels].set(True)
    return jnp.where(whole, jnp.zeros((), x.dtype), x)


def over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, and `x` where that is zero."""
    factor, inverse = inverse_of(scale)
    return x * factor * inverse


def inverse_of(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two factors, whose product is the inverse of `scale`, and 1 where that is zero.

    One would do, but for the inverse of the largest numbers, which is subnormal and so taken for
    zero, and of the smallest, which is infinite.
    """
    small = jnp.where(scale < 2.0**-64, 2.0**64, 1)
    factor = jnp.where(scale > 2.0**64, 2.0**-64, small).astype(scale.dtype)
    return factor, 1 / jnp.where(scale > 0, scale * factor, 1)


def nearest_level(part: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of the "normal" levels nearest to `part` over `scale`, uint8."""
    position = over(part, scale)
    levels = normal_levels(bits)
    above = (position > bound for bound in (levels[1:] + levels[:-1]) / 2)
    return functools.reduce(jnp.add, (b.astype(jnp.uint8) for b in above))


def level_values(codes: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Returns the "normal" levels of codes, of scale 1."""
    return jnp.asarray(normal_levels(bits), dtype)[codes]


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
    """Returns the `2^bits` levels of least mean square error for standard normal numbers.

    Lloyd, "Least squares quantization in PCM" (1982): each is the mean of what is rounded to it.
    """
    count = 2**bits
    levels = np.sqrt(2) * np.linspace(-1.5, 1.5, count)
    for _ in range(2000):
        bounds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-(bounds**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([(1 + math.erf(b / math.sqrt(2))) / 2 for b in bounds])
        levels = -np.diff(density) / np.diff(below)
    return levels


def normal_error(bits: int) -> float:
    """Returns the mean square error of `normal_levels` for standard normal numbers."""
    levels = normal_levels(bits)
    bounds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    shares = np.diff([(1 + math.erf(b / math.sqrt(2))) / 2 for b in bounds])
    # Each level is the mean of what is rounded to it, so that lacks of the variance what it errs.
    return float(1 - np.sum(shares * levels**2))
