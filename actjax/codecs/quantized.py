"""Storing each number in a few bits.

ActNN (Chen et al., 2021) and GACT (Liu et al., 2022, appendix A.4) are followed for affine groups
with stochastic rounding, HyC-LoRA (2025) for symmetric channels and outliers kept whole. To these
come subtractive dither (Schuchman, 1964), which is unbiased with the variance of rounding to the
nearest, rotated groups, and levels for values that are normally distributed (Lloyd, 1982).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from actjax.codecs.base import (
    Codec,
    check_positive_integer,
    key_bytes,
    raw_key,
    token_count,
    wrap_key,
)
from actjax.codecs.packing import BITS, pack, packed_bytes, unpack
from actjax.codecs.rotation import rotate, rotate_back
from actjax.precision import accumulation_dtype, contract_tokens

Rounding = Literal["nearest", "stochastic", "dither"]
Scaling = Literal["group", "channel"]
Levels = Literal["uniform", "normal"]
ScaleDtype = Literal["bfloat16", "float16", "float32"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCode:
    """Numbers in a few bits each, and what they stand for.

    Attributes:
      planes: bytes, as `actjax.codecs.packing.pack` returns them.
      low: what the code 0 stands for, by group [..., groups]; None where that follows from `step`.
      step: distance of two levels, or unit of uneven ones: [..., groups], or [d] by channel. Both
        as the bits of their dtype if that has 16.
      outliers: channels that are kept whole, [..., m]; None if there are none.
      channels: which channels these are, [m].
      key: words of the key of the dither; None without.
      features: d. Static.
      dtype: of the activation. Static.
      key_impl: generator of the key. Static.
    """

    planes: Any
    low: Any
    step: Any
    outliers: Any
    channels: Any
    key: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    key_impl: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, repr=False)
class Quantized(Codec):
    """Stores each number of `x` in 1, 2, 3, 4 or 8 bits.

    By "group", `group` neighbouring features of a token share a scale and a lowest value; by
    "channel", all tokens of a feature share a scale, which is symmetric about zero. With `Δ` the
    distance of two levels, `(max - min) / (2^bits - 1)`:

    Storage: `bits` bits a number, each token filled up to a byte (3 bits are 2 and 1, each filled
      up); for each group a scale and a lowest value, or for each channel a scale, in `scale_dtype`;
      outlier channels in the dtype of `x`, and a 4-byte index each; 8 bytes of key under dither.
    Error: at most `Δ/2` where rounded to the nearest (in rotated groups, on average over a group),
      of variance `Δ²/12` under dither and at most `Δ²/4` under stochastic rounding (on average
      `Δ²/6`); then the result is rounded to the dtype of `x`. Scales are rounded so that a group
      lies within its levels. A range above the largest number of the dtype, or of float16 scales,
      overflows to NaN; so do rotated values above that number over the root of the group.
    Unbiased under stochastic rounding and dither, but for that last rounding.
    Biased: rounding to the nearest, and "normal" levels, but with an error that is as small.
    Source: GACT (Liu et al., 2022), appendix A.4; HyC-LoRA (2025); DESIGN.md, section 4.

    Attributes:
      bits: of one number.
      group: features that share a scale; the last of a token may be fewer. Of "channel", what is
        rotated together.
      rounding: "nearest"; "stochastic", up or down with probabilities that make it unbiased; or
        "dither", which adds a random shift before rounding to the nearest and takes it off again.
      outlier_fraction: share of the channels, those with the largest norms, that are stored whole.
      scaling: "group" or "channel".
      scale_dtype: of scales and lowest values.
      levels: "uniform", or "normal": the levels of least mean square error for normally distributed
        values, about zero, times a scale by least squares. For up to 4 bits, to the nearest.
      rotate: whether to rotate each group by a Hadamard matrix, and back when decoding, which
        spreads what is large over its group and makes its values look normal.
    """

    bits: int
    group: int = 128
    rounding: Rounding = "nearest"
    outlier_fraction: float = 0.0
    scaling: Scaling = "group"
    scale_dtype: ScaleDtype = "bfloat16"
    levels: Levels = "uniform"
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool | float):
            raise ValueError(f"`bits` of Quantized must be one of {BITS}, got {self.bits!r}.")
        check_positive_integer("Quantized", "group", self.group)
        choices = {
            "rounding": Rounding,
            "scaling": Scaling,
            "scale_dtype": ScaleDtype,
            "levels": Levels,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in get_args(known):
                raise ValueError(
                    f"`{name}` of Quantized must be one of {get_args(known)}, got {value!r}."
                )
        if not isinstance(self.rotate, bool):
            raise ValueError(f"`rotate` of Quantized must be True or False, got {self.rotate!r}.")
        share = self.outlier_fraction
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"`outlier_fraction` of Quantized must be in [0, 1), got {share!r}.")
        if self.levels == "normal" and (self.bits > 4 or self.rounding != "nearest"):
            raise ValueError(
                "`levels` of Quantized can be 'normal' for up to 4 bits with rounding='nearest',"
                f" got bits={self.bits}, rounding={self.rounding!r}: use levels='uniform'."
            )

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.rounding == "nearest"

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.rounding != "nearest"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> QuantizedCode:
        self._check(x)
        return self.encode_with(x, key, self.outlier_channels(x), None)

    def decode(self, code: QuantizedCode) -> jax.Array:
        wide = accumulation_dtype(code.dtype)
        codes = unpack(code.planes, self.bits, code.features)
        shift = jnp.zeros((), wide)
        if code.key is not None:
            shift = _dither(wrap_key(code.key, code.key_impl), codes.shape, wide)
        parts = []
        for segment in _segments(code.features, self.group):
            step = self._scale_of(segment, code.step, wide)
            low = None if code.low is None else self._scale_of(segment, code.low, wide)
            part = self._values(segment.take(codes), low, step, segment.take(shift))
            if self.rotate:
                part = rotate_back(part)
            parts.append(segment.flatten(part).astype(code.dtype))
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return x if code.channels is None else x.at[..., code.channels].set(code.outliers)

    def weight_grad(self, code: QuantizedCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        tokens, features = token_count(shape), shape[-1]
        groups = sum(segment.groups for segment in _segments(features, self.group))
        scales = features if self.scaling == "channel" else tokens * groups
        if self.scaling == "group" and self.levels == "uniform":
            scales *= 2
        return (
            tokens * packed_bytes(self.bits, features)
            + scales * jnp.dtype(self.scale_dtype).itemsize
            + self._outlier_count(features) * (tokens * jnp.dtype(dtype).itemsize + 4)
            + (key_bytes() if self.rounding == "dither" else 0)
        )

    def expected_error(self, x: jax.Array) -> jax.Array:
        """Returns the mean squared error of each number of `x` by theory, in the dtype of sums.

        `Δ²/12` to the nearest and under dither, `Δ²/6` under stochastic rounding, but for the two
        numbers of a group that its levels begin and end with; Lloyd's error of "normal" levels. The
        mean over a group, rotated or not.
        """
        channels = self.outlier_channels(x)
        parts = []
        for segment in _segments(x.shape[-1], self.group):
            part = self._prepare(segment.take(_without(channels, x)))
            unit = self._fit(part)[1]
            errors = self._error_of_unit(segment.size) * unit * unit
            parts.append(segment.flatten(jnp.broadcast_to(errors, part.shape)))
        joined = jnp.concatenate(parts, axis=-1)
        return joined if channels is None else joined.at[..., channels].set(0)

    def _error_of_unit(self, size: int) -> float:
        """Returns the mean squared error over the squared scale, in a group of some size."""
        if self.levels == "normal":
            return normal_error(self.bits)
        if self.rounding == "dither":
            return 1 / 12
        inner = max(0, size - 2) / size if self.scaling == "group" else 1
        return inner / (6 if self.rounding == "stochastic" else 12)

    def _check(self, x: jax.Array) -> None:
        if x.ndim < 1:
            raise ValueError(f"`x` of {self} must have features, [..., d], got shape {x.shape}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"`x` of {self} must be floating point, got {x.dtype}: cast it.")

    def outlier_channels(self, x: jax.Array) -> jax.Array | None:
        """Returns the channels of `x` [..., d] with the largest norms, [m]; None for m = 0."""
        count = self._outlier_count(x.shape[-1])
        if count == 0:
            return None
        largest = jnp.max(jnp.abs(x), initial=0)
        unit = x.astype(accumulation_dtype(x.dtype)) / jnp.where(largest > 0, largest, 1)
        norms = jnp.sum(unit * unit, axis=range(x.ndim - 1))
        return jax.lax.top_k(norms, count)[1].astype(jnp.int32)

    def encode_with(
        self,
        x: jax.Array,
        key: jax.Array | None,
        channels: jax.Array | None,
        step: jax.Array | None,
    ) -> QuantizedCode:
        """Returns the code of `x` with given outlier channels and, unless None, given scales [d].

        What lies outside given scales becomes the nearest level: it saturates.
        """
        self._check(x)
        wide = accumulation_dtype(x.dtype)
        values, outliers = _without(channels, x), None if channels is None else x[..., channels]
        shift = jnp.zeros((), wide)
        if self.needs_key:
            shift = _dither(self.required_key(key), x.shape, wide)
        codes, lows, steps = [], [], []
        for segment in _segments(x.shape[-1], self.group):
            part = self._prepare(segment.take(values))
            if step is None:
                low, own = self._fit(part)
            else:
                low, own = None, self._scale_of(segment, step, wide)
            codes.append(segment.flatten(self._round(part, low, own, segment.take(shift))))
            lows.append(low)
            steps.append(own)
        words, impl = (None, None)
        if self.rounding == "dither":
            words, impl = raw_key(self.required_key(key))
        return QuantizedCode(
            planes=pack(jnp.concatenate(codes, axis=-1), self.bits),
            low=None if lows[0] is None else self._stored(lows),
            step=self._stored(steps) if step is None else None,
            outliers=outliers,
            channels=channels,
            key=words,
            features=x.shape[-1],
            dtype=jnp.dtype(x.dtype),
            key_impl=impl,
        )

    def fit_channels(self, x: jax.Array, channels: jax.Array | None) -> jax.Array:
        """Returns the scales [d] of the channels of `x` [..., d], outlier channels apart."""
        segments = _segments(x.shape[-1], self.group)
        parts = [self._prepare(segment.take(_without(channels, x))) for segment in segments]
        return self._stored([self._fit(part)[1] for part in parts])

    def _prepare(self, part: jax.Array) -> jax.Array:
        """Returns what is rounded of `part` [..., groups, size], in the accumulation dtype."""
        return rotate(part) if self.rotate else part.astype(accumulation_dtype(part.dtype))

    def _outlier_count(self, features: int) -> int:
        if self.outlier_fraction == 0:
            return 0
        return max(0, min(features - 1, round(self.outlier_fraction * features) or 1))

    def _fit(self, part: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """Returns the lowest value and the scale of each group of `part` [..., groups, size].

        As they will be stored, but in the dtype of `part`, with axes for it to broadcast against.
        """
        axes = (-1,) if self.scaling == "group" else tuple(range(part.ndim - 2))
        steps = 2**self.bits - 1
        if self.levels == "normal":
            # Of numbers within one, so that no square overflows.
            largest = jnp.max(jnp.abs(part), axes, keepdims=True, initial=0)
            part = _over(part, largest)
            deviation = jnp.sqrt(jnp.mean(part * part, axes, keepdims=True))
            levels = self._levels(self._nearest_level(part, deviation), part.dtype)
            fitted = jnp.sum(part * levels, axes, keepdims=True) / jnp.sum(
                levels * levels, axes, keepdims=True
            )
            return None, self._rounded(fitted * largest)
        if self.scaling == "channel":
            largest = jnp.max(jnp.abs(part), axes, keepdims=True, initial=0)
            return None, self._rounded(largest * (2 / steps), towards=1)
        high = jnp.max(part, axes, keepdims=True)
        low = self._rounded(jnp.min(part, axes, keepdims=True), towards=-1)
        return low, self._rounded((high - low) / steps, towards=1)

    def _rounded(self, scale: jax.Array, towards: int = 0) -> jax.Array:
        """Rounds to what `scale_dtype` can hold: to the nearest, or `towards` plus or minus."""
        info = jnp.finfo(self.scale_dtype)
        if info.nmant >= jnp.finfo(scale.dtype).nmant:
            return scale
        # Not a cast there and back, which XLA may take for the identity.
        rounded = jax.lax.reduce_precision(scale, info.nexp, info.nmant)
        if towards != 0:
            # Half a unit of the last place, at least, and less than one and a half.
            moved = scale + towards * jnp.abs(scale) * 2.0 ** -(info.nmant + 1)
            next_one = jax.lax.reduce_precision(moved, info.nexp, info.nmant)
            rounded = jnp.where((rounded - scale) * towards < 0, next_one, rounded)
        if self.scale_dtype != "float16":
            return rounded
        # Which takes subnormal numbers for zero: those of float16 are not small.
        units = scale / float(info.smallest_subnormal)
        whole = {-1: jnp.floor, 0: jnp.round, 1: jnp.ceil}[towards](units)
        subnormal = jnp.abs(scale) < float(info.smallest_normal)
        return jnp.where(subnormal, whole * float(info.smallest_subnormal), rounded)

    def _round(
        self, part: jax.Array, low: jax.Array | None, step: jax.Array, shift: jax.Array
    ) -> jax.Array:
        """Returns the codes of `part`, uint8. `shift` is uniform within half a level."""
        if self.levels == "normal":
            return self._nearest_level(part, step)
        steps = 2**self.bits - 1
        position = _over(part, step) + steps / 2 if low is None else _over(part - low, step)
        return jnp.clip(jnp.round(position + shift), 0, steps).astype(jnp.uint8)

    def _values(
        self, codes: jax.Array, low: jax.Array | None, step: jax.Array, shift: jax.Array
    ) -> jax.Array:
        """Returns what codes stand for."""
        if self.levels == "normal":
            return self._levels(codes, step.dtype) * step
        position = codes.astype(step.dtype) - shift
        if low is None:
            return (position - (2**self.bits - 1) / 2) * step
        return position * step + low

    def _nearest_level(self, part: jax.Array, scale: jax.Array) -> jax.Array:
        position = _over(part, scale)
        levels = normal_levels(self.bits)
        above = (position > bound for bound in (levels[1:] + levels[:-1]) / 2)
        return functools.reduce(jnp.add, (b.astype(jnp.uint8) for b in above))

    def _levels(self, codes: jax.Array, dtype: Any) -> jax.Array:
        return jnp.asarray(normal_levels(self.bits), dtype)[codes]

    def _stored(self, scales: list[jax.Array]) -> jax.Array:
        if self.scaling == "channel":
            flat = [scale.reshape(-1) for scale in scales]
        else:
            flat = [scale[..., 0] for scale in scales]
        joined = jnp.concatenate(flat, axis=-1).astype(self.scale_dtype)
        # As bits: XLA for CPUs holds stacks of 16-bit floats in 32 bits.
        return joined if self.scale_dtype == "float32" else joined.view(jnp.uint16)

    def _scale_of(self, segment: "_Segment", scale: jax.Array, dtype: Any) -> jax.Array:
        """Returns the stored scales of a segment, to broadcast against its [..., groups, size]."""
        scale = scale.view(self.scale_dtype).astype(dtype)
        return segment.take(scale) if self.scaling == "channel" else segment.of_groups(scale)


class _Segment(NamedTuple):
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
        """Returns its part of `x` [..., d], as [..., groups, size]; a scalar as it is."""
        if x.ndim == 0:
            return x
        part = x[..., self.start : self.start + self.groups * self.size]
        return part.reshape(*x.shape[:-1], self.groups, self.size)

    def of_groups(self, scale: jax.Array) -> jax.Array:
        """Returns its part of scales by group, as [..., groups, 1]."""
        return scale[..., self.first : self.first + self.groups, None]

    @staticmethod
    def flatten(part: jax.Array) -> jax.Array:
        """Inverse of `take`."""
        return part.reshape(*part.shape[:-2], part.shape[-2] * part.shape[-1])


def _segments(features: int, group: int) -> list[_Segment]:
    """Returns the whole groups, and the rest as one of its own."""
    groups, rest = divmod(features, group)
    whole = [_Segment(0, 0, groups, group)] if groups or not rest else []
    return whole + ([_Segment(groups * group, groups, 1, rest)] if rest else [])


def _without(channels: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x` [..., d] with zeros in these channels."""
    if channels is None:
        return x
    whole = jnp.zeros(x.shape[-1], bool).at[channels].set(True)
    return jnp.where(whole, jnp.zeros((), x.dtype), x)


def _over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, and `x` where that is zero."""
    # XLA multiplies by the inverse instead, which of the largest numbers it takes for zero.
    smaller = jnp.where(scale > 2.0**64, 2.0**-64, 1).astype(x.dtype)
    return x * smaller / jnp.where(scale > 0, scale * smaller, 1)


def _dither(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns uniform numbers of [-1/2, 1/2)."""
    return jax.random.uniform(key, shape, dtype) - 0.5


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
