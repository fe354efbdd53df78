"""Storing each number in a few bits.

Affine groups with stochastic rounding follow ActNN (Chen et al., 2021) and GACT (Liu et al., 2022,
appendix A.4); symmetric channels and outlier channels follow HyC-LoRA (2025). Further options are
subtractive dither (Schuchman, 1964), which is unbiased with the variance of rounding to the
nearest, rotated groups, levels for normally distributed values (Lloyd, 1982), and balanced
channels (`actjax.formats.balance`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens
from actjax._shards import gathered
from actjax.codecs import by_channel
from actjax.codecs.base import Codec, check_activation, check_positive_integer, token_count
from actjax.formats import code as fmt
from actjax.formats import noise
from actjax.formats.balance import balance_of, statistics_shape
from actjax.formats.code import (
    Format,
    Levels,
    QuantizedCode,
    QuantizeInputs,
    Rounding,
    ScaleDtype,
    Scaling,
)
from actjax.formats.packing import BITS, packed_bytes
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize

_SEED_BYTES = 8
_LEAST_GROUP = 32
"""Features that a group is not halved below, if a token has as many."""
_CHOICES = {"rounding": Rounding, "scaling": Scaling, "scale_dtype": ScaleDtype, "levels": Levels}


@dataclasses.dataclass(frozen=True, repr=False)
class Quantized(Codec):
    """Stores each number of `x` in 1, 2, 3, 4, 5, 6 or 8 bits.

    With scaling="group", `group` neighboring features of a token share a scale and an offset
    (their lowest value). With scaling="channel", all tokens of a feature share a scale, and the
    levels are symmetric about zero. `Δ`, the scale, is the distance between two levels:
    `(max - min) / (2^bits - 1)`.

    Storage: `bits` bits per number, each token padded to whole groups and whole bytes (3, 5 and 6
      bits are two planes, of 2 + 1, 4 + 1 and 4 + 2 bits, each padded); a scale and an offset per
      group ("normal" levels: a scale), or a scale per channel and no padded groups, in
      `scale_dtype`; outlier channels in the dtype of `x`, with a 4-byte index each; 8 bytes of seed
      for dither; with `balance` a mean and a spread per channel and sequence, in `scale_dtype`.
    Error: at most `Δ/2` for rounding to the nearest (in rotated groups on average over a group);
      variance `Δ²/12` for dither, and at most `Δ²/4` for stochastic rounding (`Δ²/6` on average).
      The result is then rounded to the dtype of `x`. Scales are rounded so that a group lies within
      its levels, up to 2^-20 of its range. With `balance` all this is of `(x - mean) / spread`, and
      the result is multiplied by `spread`, which is at most 1. A range above the largest number of
      the dtype, or with dither above two thirds of it, overflows to NaN or infinity; so do rotated
      values above that number over the square root of the group, and balanced values above 1/64 of
      it. NaN and infinities of a group, or of a channel, decode to NaN or infinity somewhere in it.
      A range whose scale is below 2^-126 (1.2e-38) is
      taken for zero where the device takes such numbers for zero, as XLA's CPUs and most GPUs do:
      then the group decodes to its lowest value. Scales have the exponents of float32, for float64
      too.
    Devices: exchange no more than for an exact `x`, except statistics over tokens that they divide:
      d scales of channels, d norms to find outlier channels, and with `balance`, where they share a
      sequence, a mean and a deviation of each of its channels.
    Unbiased for stochastic rounding and dither, except for the rounding to the dtype of `x`.
    Biased: rounding to the nearest, and "normal" levels.
    Source: GACT (Liu et al., 2022), appendix A.4; HyC-LoRA (2025); dither, rotation and normal
      levels as in the module docstring.

    Attributes:
      bits: bits of a number.
      group: features that share a scale. It is halved, to no less than 32, where a token then takes
        fewer bytes, and where half of it holds a token: 576 features are 9 groups of 64. With
        scaling="channel", the features that are rotated together; of these the largest number that
        divides all features.
      rounding: "nearest"; "stochastic", up or down with probabilities that make it unbiased; or
        "dither", which adds a random shift before rounding and subtracts it again in `decode`.
      outlier_fraction: share of the channels, those with the largest norms, that are stored whole.
      scaling: "group" or "channel".
      scale_dtype: dtype of scales and offsets.
      levels: "uniform", or "normal": levels of least mean square error for normally distributed
        values (`actjax.formats.levels`), times the root mean square of the group. For up to 4 bits,
        rounded to the nearest.
      rotate: whether to rotate each group by a Hadamard matrix before encoding, and back in
        `decode`. It spreads outliers over their group and makes its values look normal. A group is
        rotated in blocks of the largest power of two that divides its size. If `rounding` is
        "nearest", values are rounded to bfloat16 before.
      balance: whether to subtract the mean of each channel over the tokens of a sequence, and to
        divide by the root of its deviation, before anything else. The tokens of a sequence are the
        second last axis of `x`. Both are measured on all tokens, on every fourth from 512 on, and
        on every eighth from 1,024 on; one number in these that is not finite spoils the sequence.
        Needs scaling="group".
    """

    bits: int
    group: int = 128
    rounding: Rounding = "nearest"
    outlier_fraction: float = 0.0
    scaling: Scaling = "group"
    scale_dtype: ScaleDtype = "bfloat16"
    levels: Levels = "uniform"
    rotate: bool = False
    balance: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool | float):
            raise ValueError(f"`bits` of Quantized must be one of {BITS}, got {self.bits!r}.")
        check_positive_integer("Quantized", "group", self.group)
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(known):
                raise ValueError(
                    f"`{name}` of Quantized must be one of {get_args(known)}, got {value!r}."
                )
        for name in ("rotate", "balance"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` of Quantized must be True or False, got {value!r}.")
        if self.rotate and self.group % 2:
            raise ValueError(
                "`rotate` of Quantized has no effect in a group of odd size, got"
                f" group={self.group}: pass an even one, best a power of two, or rotate=False."
            )
        if self.balance and self.scaling != "group":
            raise ValueError(
                "`balance` of Quantized needs scaling='group', got scaling='channel', whose scales"
                " are by channel already: drop one."
            )
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
        """The meaning of the bits of features in whole groups: all but outliers and balance."""
        names = (field.name for field in dataclasses.fields(Format))
        return Format(**{name: getattr(self, name) for name in names})

    def format_of(self, features: int) -> Format:
        """Returns the meaning of the bits of so many features."""
        return dataclasses.replace(self.format, group=self._group_of(features))

    def _group_of(self, features: int) -> int:
        """Returns the features that share a scale, or that are rotated together."""
        if features == 0:
            return self.group
        if self.scaling == "channel":
            return max(1, math.gcd(self.group, features) if self.rotate else features)
        sizes = [self.group]
        while sizes[-1] % 2 == 0 and (sizes[-1] // 2 >= min(features, _LEAST_GROUP)):
            sizes.append(sizes[-1] // 2)
        return min(sizes, key=lambda size: self._bytes_of_token(features, size))

    def _bytes_of_token(self, features: int, group: int) -> int:
        """Returns the bytes of the codes and scales of groups of a token."""
        groups = fmt.group_count(features, group)
        scale = jnp.dtype(self.scale_dtype).itemsize * (1 + (self.levels == "uniform"))
        return packed_bytes(self.bits, groups * group) + groups * scale

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.rounding == "nearest"

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.rounding != "nearest"

    def encode(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> QuantizedCode | by_channel.ChannelCode:
        if self.scaling == "channel":
            check_activation(self, x)
            channels = self.outlier_channels(x)
            scale = self.fit_channels(x, channels)
            return dataclasses.replace(self.encode_with(x, key, channels, scale), scale=scale)
        inputs = self.inputs_of(x, key)
        return self.with_statistics(quantize(inputs, format=self.format_of(x.shape[-1])), inputs)

    def decode(self, code: QuantizedCode | by_channel.ChannelCode) -> jax.Array:
        is_by_channel = isinstance(code, by_channel.ChannelCode)
        return by_channel.decode(code) if is_by_channel else dequantize(code)

    def weight_grad(self, code: QuantizedCode | by_channel.ChannelCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode(code), dz)

    def inputs_of(self, x: jax.Array, key: jax.Array | None = None) -> QuantizeInputs:
        """Returns `x` with what its groups are encoded by: statistics, outlier channels, a seed."""
        check_activation(self, x)
        mean, spread = balance_of(x, self.scale_dtype) if self.balance else (None, None)
        return QuantizeInputs(x, self._seed(key), self.outlier_channels(x), mean, spread)

    @staticmethod
    def with_statistics(code: QuantizedCode, inputs: QuantizeInputs) -> QuantizedCode:
        """Returns the code of `inputs` with the statistics that `decode` needs."""
        return dataclasses.replace(code, mean=inputs.mean, spread=inputs.spread)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        tokens, features = token_count(shape), shape[-1]
        if self.scaling == "channel":
            scales = features * jnp.dtype(self.scale_dtype).itemsize
            codes_and_scales = tokens * packed_bytes(self.bits, features) + scales
        else:
            group = self._group_of(features)
            codes_and_scales = tokens * self._bytes_of_token(features, group)
        return (
            codes_and_scales
            + (
                self._statistics(shape) * jnp.dtype(self.scale_dtype).itemsize
                if self.balance
                else 0
            )
            + self._outlier_count(features) * (tokens * jnp.dtype(dtype).itemsize + 4)
            + (_SEED_BYTES if self.rounding == "dither" else 0)
        )

    def grouped_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns a shape whose last axes are joined until scales are at most a quarter of a code.

        The last axis of the scores of grouped-query attention, for example, may have two numbers.
        """
        shape = tuple(shape)
        if self.scaling != "group" or self.balance or self.outlier_fraction:
            return shape
        scales = self._bytes_of_token(1, 1) - packed_bytes(self.bits, 1)
        enough = min(self.group, 3 * scales * 8 // self.bits)
        while len(shape) > 1 and shape[-1] < enough:
            shape = (*shape[:-2], shape[-2] * shape[-1])
        return shape

    def outlier_channels(self, x: jax.Array) -> jax.Array | None:
        """Returns the channels of `x` [..., d] with the largest norms, [m]; None for m = 0."""
        count = self._outlier_count(x.shape[-1])
        if count == 0:
            return None
        wide = x.astype(accumulation_dtype(x.dtype))
        largest = jnp.max(jnp.abs(x), initial=0).astype(wide.dtype)
        unit = wide / jnp.where(largest > 0, largest, 1)
        norms = jnp.sum(unit * unit, axis=range(x.ndim - 1))
        return jax.lax.top_k(gathered(norms, axes=(0,)), count)[1].astype(jnp.int32)

    def encode_with(
        self,
        x: jax.Array,
        key: jax.Array | None,
        channels: jax.Array | None,
        scale: jax.Array,
        centre: jax.Array | None = None,
    ) -> QuantizedCode | by_channel.ChannelCode:
        """Returns the code of `x` for given outlier channels and statistics of channels.

        Numbers outside the levels saturate. The code does not hold the statistics.

        Args:
          x: [..., d].
          key: as for `encode`.
          channels: outlier channels, [m]; None for none.
          scale: stored scales of the channels, [d]; with `balance` their spreads.
          centre: stored middles of the levels of the channels, [d]; None for zero. With `balance`
            their means.
        """
        check_activation(self, x)
        if self.scaling == "channel":
            format = self.format_of(x.shape[-1])
            return by_channel.encode(x, self._seed(key), channels, scale, centre, format=format)
        if centre is None:
            raise ValueError(f"`scale` and `centre` of {self} must be given together.")
        mean, spread = (self.of_sequences(y, x.shape) for y in (centre, scale))
        inputs = QuantizeInputs(x, self._seed(key), channels, mean, spread)
        return quantize(inputs, format=self.format_of(x.shape[-1]))

    def _seed(self, key: jax.Array | None) -> jax.Array | None:
        return noise.seed_of(self.required_key(key)) if self.needs_key else None

    @staticmethod
    def of_sequences(statistics: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Returns means or spreads of channels [d] as those of all sequences of [..., S, d]."""
        return jnp.broadcast_to(statistics, statistics_shape(shape))

    def fit_channels(self, x: jax.Array, channels: jax.Array | None) -> jax.Array:
        """Returns the stored scales [d] of the channels of `x` [..., d], without outliers."""
        return by_channel.fit_scales(x, channels, self.format_of(x.shape[-1]))

    @staticmethod
    def _statistics(shape: Sequence[int]) -> int:
        """Returns the number of means and spreads of an activation."""
        return 2 * math.prod(statistics_shape(shape))

    def _outlier_count(self, features: int) -> int:
        if self.outlier_fraction == 0:
            return 0
        return max(0, min(features - 1, round(self.outlier_fraction * features) or 1))
