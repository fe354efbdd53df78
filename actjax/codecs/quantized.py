"""Storing each number in a few bits.

ActNN (Chen et al., 2021) and GACT (Liu et al., 2022, appendix A.4) are followed for affine groups
with stochastic rounding, HyC-LoRA (2025) for symmetric channels and outliers kept whole. To these
come subtractive dither (Schuchman, 1964), which is unbiased with the variance of rounding to the
nearest, rotated groups, and levels for values that are normally distributed (Lloyd, 1982).
"""

import dataclasses
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens
from actjax.codecs.base import Codec, check_positive_integer, token_count
from actjax.kernels import format as fmt
from actjax.kernels import noise
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.format import Format, Levels, QuantizedCode, Rounding, ScaleDtype, Scaling
from actjax.kernels.packing import BITS, packed_bytes
from actjax.kernels.quantize.api import quantize

_SEED_BYTES = 8


@dataclasses.dataclass(frozen=True, repr=False)
class Quantized(Codec):
    """Stores each number of `x` in 1, 2, 3, 4 or 8 bits.

    By "group", `group` neighbouring features of a token share a scale and a lowest value; by
    "channel", all tokens of a feature share a scale, which is symmetric about zero. With `Δ` the
    distance of two levels, `(max - min) / (2^bits - 1)`:

    Storage: `bits` bits a number, each token filled up to a byte (3 bits are 2 and 1, each filled
      up); for each group a scale and a lowest value, or for each channel a scale, in `scale_dtype`;
      outlier channels in the dtype of `x`, and a 4-byte index each; 8 bytes of seed under dither.
    Error: at most `Δ/2` where rounded to the nearest (in rotated groups, on average over a group),
      of variance `Δ²/12` under dither and at most `Δ²/4` under stochastic rounding (on average
      `Δ²/6`); then the result is rounded to the dtype of `x`. Scales are rounded so that a group
      lies within its levels, but for 2^-20 of its range. A range above the largest number of the
      dtype, or of float16 scales, overflows to NaN; so do rotated values above that number over the
      root of the group.
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
    def format(self) -> Format:
        """What the bits mean, as the kernels are told."""
        return Format(
            bits=self.bits,
            group=self.group,
            rounding=self.rounding,
            scaling=self.scaling,
            scale_dtype=self.scale_dtype,
            levels=self.levels,
            rotate=self.rotate,
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
        channels = self.outlier_channels(x)
        if self.scaling == "group":
            return self.encode_with(x, key, channels, None)
        scale = self.fit_channels(x, channels)
        return dataclasses.replace(self.encode_with(x, key, channels, scale), scale=scale)

    def decode(self, code: QuantizedCode) -> jax.Array:
        return dequantize(code)

    def weight_grad(self, code: QuantizedCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        tokens, features = token_count(shape), shape[-1]
        groups = fmt.group_count(features, self.group)
        scales = features if self.scaling == "channel" else tokens * groups
        if self.scaling == "group" and self.levels == "uniform":
            scales *= 2
        return (
            tokens * packed_bytes(self.bits, features)
            + scales * jnp.dtype(self.scale_dtype).itemsize
            + self._outlier_count(features) * (tokens * jnp.dtype(dtype).itemsize + 4)
            + (_SEED_BYTES if self.rounding == "dither" else 0)
        )

    def expected_error(self, x: jax.Array) -> jax.Array:
        """Returns the mean squared error of each number of `x` by theory, in the dtype of sums.

        `Δ²/12` to the nearest and under dither, `Δ²/6` under stochastic rounding, but for the two
        numbers of a group that its levels begin and end with; Lloyd's error of "normal" levels. The
        mean over a group, rotated or not.
        """
        channels = self.outlier_channels(x)
        parts = []
        for segment in fmt.segments(x.shape[-1], self.group):
            part = fmt.prepare(segment.take(fmt.without(channels, x)), self.format)
            unit = fmt.fit(part, self.format)[1]
            errors = self._error_of_unit(segment.size) * unit * unit
            parts.append(segment.flatten(jnp.broadcast_to(errors, part.shape)))
        joined = jnp.concatenate(parts, axis=-1)
        return joined if channels is None else joined.at[..., channels].set(0)

    def _error_of_unit(self, size: int) -> float:
        """Returns the mean squared error over the squared scale, in a group of some size."""
        if self.levels == "normal":
            return fmt.normal_error(self.bits)
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
        scale: jax.Array | None,
        centre: jax.Array | None = None,
    ) -> QuantizedCode:
        """Returns the code of `x` with given outlier channels and, by channel, given scales [d].

        And with given middles of the levels [d]. These are not in the code. What lies outside them
        becomes the nearest level: it saturates.
        """
        self._check(x)
        seed = noise.seed_of(self.required_key(key)) if self.needs_key else None
        return quantize(x, seed, channels, scale, centre, format=self.format)

    def fit_channels(self, x: jax.Array, channels: jax.Array | None) -> jax.Array:
        """Returns the scales [d] of the channels of `x` [..., d], outlier channels apart."""
        values = fmt.without(channels, x)
        parts = [
            fmt.fit(fmt.prepare(segment.take(values), self.format), self.format)[1]
            for segment in fmt.segments(x.shape[-1], self.group)
        ]
        return fmt.stored_scales(parts, self.format)

    def _outlier_count(self, features: int) -> int:
        if self.outlier_fraction == 0:
            return 0
        return max(0, min(features - 1, round(self.outlier_fraction * features) or 1))
