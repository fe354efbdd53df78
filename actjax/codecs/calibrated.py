"""Quantizing with statistics of channels that were measured once, for many training steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import over
from actjax.codecs.base import Codec, check_activation
from actjax.codecs.by_channel import ChannelCode
from actjax.codecs.quantized import Quantized
from actjax.formats import scales as group_scales
from actjax.formats.balance import balance_of, spread_of, weighted_sums
from actjax.formats.code import QuantizedCode
from actjax.formats.levels import normal_levels
from actjax.formats.scales import stored

REACHES = tuple(2 ** (-i / 3) for i in range(25))
"""Parts of the range of a channel that its levels may cover: from all of it to 1/256, because first
tokens may be hundreds of times larger than others. Each part is a fifth smaller than the one
before, which comes within a few per cent of the least error."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelRange:
    """Statistics of the channels of activations, over any number of tokens.

    Attributes:
      low: least number of each channel, float32 [d].
      high: largest number, [d].
      mean: mean, [d].
      squares: sum of the squares, [d].
      tokens: number of tokens, a scalar.
      directions: sum of the tokens, each divided by its norm, [d].
      weight: sum of the inverses of the norms, a scalar.
    """

    low: jax.Array
    high: jax.Array
    mean: jax.Array
    squares: jax.Array
    tokens: jax.Array
    directions: jax.Array
    weight: jax.Array

    @property
    def typical(self) -> jax.Array:
        """Mean of the tokens, weighted by the inverses of their norms, [d].

        A few tokens that are hundreds of times larger than the others hardly move it.
        """
        return over(self.directions, self.weight)

    @classmethod
    def of(cls, x: jax.Array) -> "ChannelRange":
        """Returns the statistics of an activation [..., d].

        Raises:
          ValueError: `x` has no tokens.
        """
        if x.size == 0:
            raise ValueError(f"`x` must have tokens and features to measure, got shape {x.shape}.")
        wide = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        low, high = wide.min(0), wide.max(0)
        # Divided first, because the sum of large numbers would overflow.
        mean = jnp.sum(wide / len(wide), 0)
        squares, count = jnp.square(wide).sum(0), jnp.float32(len(wide))
        weight, directions = weighted_sums(wide)
        return cls(low, high, jnp.clip(mean, low, high), squares, count, directions, weight)

    def merged(self, other: "ChannelRange") -> "ChannelRange":
        """Returns the statistics of both activations together."""
        tokens = self.tokens + other.tokens
        return ChannelRange(
            low=jnp.minimum(self.low, other.low),
            high=jnp.maximum(self.high, other.high),
            mean=self.mean * (self.tokens / tokens) + other.mean * (other.tokens / tokens),
            squares=self.squares + other.squares,
            tokens=tokens,
            directions=self.directions + other.directions,
            weight=self.weight + other.weight,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Calibrated(Codec, holds_arrays=True):
    """A `Quantized` whose statistics of channels are given as arrays.

    They are the scales of a codec by channel, or the means and spreads of a codec by group with
    `balance`, whose scales of groups are still of each token.

    It is a pytree and not static: the statistics are data that a training state holds and
    refreshes. Encoding needs no pass over `x` to find them, and no reduction over the devices of
    its tokens.

    Storage: that of `codec` without its statistics of channels and the indices of outlier channels.
    Error: that of `codec`; numbers outside the calibrated range of a channel saturate, and NaN, for
      which a code by channel has no place, becomes one of its levels: the value of an operator,
      which is computed from `x` itself, shows it. With `balance` none saturate, since a group has
      the range of its token, but channels that differ from those of the calibration err more.
    Unbiased, within that range, if `codec` is.
    Source: HyC-LoRA (2025), section on the calibration of intra-operator scales. Its scales and
      zero points cover the whole range; those of `least_error` are better at few bits. Balanced
      channels are `actjax.formats.balance`.

    Attributes:
      codec: how numbers are stored. Static.
      scale: scales of the channels, or their spreads, [d].
      channels: outlier channels, which are stored whole, [m]; None if there are none.
      centre: middles of the levels of the channels, [d]; None for zero. With `balance` their means.
    """

    codec: Quantized = dataclasses.field(metadata={"static": True})
    scale: Any
    channels: Any
    centre: Any = None

    @classmethod
    def fit(cls, codec: Quantized, x: jax.Array) -> "Calibrated":
        """Returns `codec` with the statistics and outlier channels that it finds for `x` [..., d].

        With `balance` they are of all tokens of `x` together.

        Raises:
          ValueError: `codec` has neither scaling="channel" nor `balance`.
        """
        _check_channels(codec)
        check_activation(codec, x)
        channels = codec.outlier_channels(x)
        if codec.balance:
            mean, spread = balance_of(x.reshape(-1, x.shape[-1]), codec.scale_dtype)
            return cls(codec, spread, channels, mean)
        return cls(codec, codec.fit_channels(x, channels), channels)

    @classmethod
    def over_range(cls, codec: Quantized, known: ChannelRange) -> "Calibrated":
        """Returns `codec` with levels around the mean of each channel, over its whole range.

        With `balance`, channels have their typical means, and spreads of 1 until `refined`.

        Raises:
          ValueError: `codec` has neither scaling="channel" nor `balance`, or it rotates channels
            that have no spreads.
        """
        _check_channels(codec)
        if not isinstance(known, ChannelRange):
            raise TypeError(
                f"`known` must be a ChannelRange, got {type(known).__name__}: ChannelRange.of(x)."
            )
        dtype = codec.scale_dtype
        # A single token with the norms of the channels has the same outlier channels.
        channels = codec.outlier_channels(jnp.sqrt(known.squares)[None])
        if codec.balance:
            mean = known.typical
            return cls(codec, stored(jnp.ones_like(mean), dtype), channels, stored(mean, dtype))
        if codec.rotate:
            raise ValueError(
                f"`codec` has rotate=True, {codec}: the range of rotated channels is not known."
            )
        centre = group_scales.rounded_scale(known.mean, dtype)
        reach = jnp.maximum(known.high - centre, centre - known.low)
        if codec.levels == "normal":
            top = float(normal_levels(codec.bits)[-1])
            return cls(codec, stored(reach / top, dtype), channels, stored(centre, dtype))
        scale = codec.fit_channels(reach[None], None)
        return cls(codec, scale, channels, stored(centre, dtype))

    @classmethod
    def least_error(cls, codec: Quantized, x: jax.Array) -> "Calibrated":
        """Returns `codec` with statistics of about the least squared error on `x` [..., d].

        Levels over the whole range of a channel are far apart if a few numbers are large: at 2 bits
        most other numbers then share the two levels in the middle. Random rounding is unbiased only
        within the range, so for it the levels still cover the whole range.

        Raises:
          ValueError: as `over_range`, or `x` has no tokens.
        """
        check_activation(codec, x)
        if x.size == 0:
            raise ValueError(f"`x` must have tokens and features to calibrate {codec}: {x.shape}.")
        first = cls.over_range(codec, ChannelRange.of(x))
        return first.refined(first.observe(x)) if first.narrows else first

    def __repr__(self) -> str:
        return f"Calibrated({self.codec!r})"

    @property
    def narrows(self) -> bool:
        """Whether a second pass over the activations improves the statistics of `over_range`."""
        return self.codec.balance or self.codec.rounding == "nearest"

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.codec.biased

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def observe(self, x: jax.Array) -> jax.Array:
        """Returns what `refined` needs to know of an activation [..., d], float32 [k, d].

        Sums of several activations may be added.
        """
        return self._deviations(x) if self.codec.balance else self.errors(x)

    def refined(self, observed: jax.Array) -> "Calibrated":
        """Returns this codec with better statistics: those of the activations that were observed.

        Spreads for balanced channels; for a codec by channel as `narrowed`.
        """
        if not self.codec.balance:
            return self.narrowed(observed)
        weight, squares = observed
        # The root of each, because the square of a large deviation would overflow.
        spread = spread_of(over(jnp.sqrt(squares), jnp.sqrt(weight)))
        return dataclasses.replace(self, scale=stored(spread, self.codec.scale_dtype))

    def _deviations(self, x: jax.Array) -> jax.Array:
        """Returns weights, and weighted squares of the distances from the means: [2, d]."""
        centre = jnp.asarray(self.centre).view(self.codec.scale_dtype).astype(jnp.float32)
        weight, squares = weighted_sums(x, centre)
        return jnp.stack([jnp.broadcast_to(weight, squares.shape), squares])

    def errors(self, x: jax.Array) -> jax.Array:
        """Returns the sum of squared errors of each channel of `x` [..., d], float32 [reaches, d].

        Row i multiplies the scales by `REACHES[i]`. Sums of several activations may be added.

        Raises:
          ValueError: `codec` has no scales of channels.
        """
        if self.codec.balance:
            raise ValueError(f"{self} has no scales of channels to narrow: use `observe`.")

        def squared_error(reach: jax.Array) -> jax.Array:
            codec = self._scaled(reach)
            error = (codec.decode(codec.encode(x)) - x).astype(jnp.float32)
            return jnp.square(error).sum(range(x.ndim - 1))

        return jax.lax.map(squared_error, jnp.asarray(REACHES, jnp.float32))

    def narrowed(self, errors: jax.Array) -> "Calibrated":
        """Returns this codec with each scale multiplied by the reach of the least of `errors`."""
        return self._scaled(jnp.asarray(REACHES, jnp.float32)[jnp.argmin(errors, 0)])

    def _scaled(self, factor: jax.Array) -> "Calibrated":
        dtype = self.codec.scale_dtype
        scale = self.scale.view(dtype).astype(jnp.float32) * factor
        rounded = group_scales.rounded_scale(scale, dtype)
        return dataclasses.replace(self, scale=stored(rounded, dtype))

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> QuantizedCode | ChannelCode:
        if jnp.shape(x)[-1:] != self.scale.shape:
            raise ValueError(
                f"`x` has {jnp.shape(x)[-1:]} channels, but the calibration has {self.scale.shape}."
            )
        check_activation(self, x)
        code = self.codec.encode_with(x, key, self.channels, self.scale, self.centre)
        return dataclasses.replace(code, channels=None)

    def decode(self, code: QuantizedCode | ChannelCode) -> jax.Array:
        return self.codec.decode(self._whole(code))

    def weight_grad(self, code: QuantizedCode | ChannelCode, dz: jax.Array) -> jax.Array:
        return self.codec.weight_grad(self._whole(code), dz)

    def _whole(self, code: Any) -> Any:
        """Returns the code completed with the arrays of this codec."""
        if self.codec.balance:
            # Scales of groups, [..., S, groups], tell the number of sequences.
            shape = (*code.scale.shape[:-1], code.features)
            mean, spread = (self.codec.of_sequences(a, shape) for a in (self.centre, self.scale))
            return dataclasses.replace(code, mean=mean, spread=spread, channels=self.channels)
        return dataclasses.replace(
            code, scale=self.scale, centre=self.centre, channels=self.channels
        )

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        codec, indices = dataclasses.replace(self.codec, balance=False), 0
        if self.channels is not None:
            indices = self.channels.size * self.channels.dtype.itemsize
        scales = self.scale.size * self.scale.dtype.itemsize if codec.scaling == "channel" else 0
        return codec.stored_bytes(shape, dtype) - scales - indices


def _check_channels(codec: Quantized) -> None:
    if not isinstance(codec, Quantized):
        raise TypeError(f"`codec` of Calibrated must be a Quantized, got {codec!r}.")
    if codec.scaling != "channel" and not codec.balance:
        raise ValueError(
            f"`codec` of Calibrated must have scaling='channel', got {codec}: the scale of a group"
            " is measured for one token. Or give it balance=True, to calibrate means and spreads."
        )
