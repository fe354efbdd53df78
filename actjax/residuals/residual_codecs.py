"""Storage of residuals besides codecs: masks of bits, and codes of arrays in another shape."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype
from actjax.codecs import Codec, Exact
from actjax.formats.packing import pack, unpack
from actjax.residuals.graph.divisors import without_zeros
from actjax.residuals.graph.storing import Form

_TIMES_QUARTILE = 1e4
"""Reciprocals that are so many times as large as most are those of a tiny constant, as where a sum
is empty."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BitMask:
    """Stores booleans [..., d] in one bit each. This is exact, so no rule decides on it.

    Attributes:
      features: d.
    """

    features: int
    needs_key = False

    def __repr__(self) -> str:
        return "a bit each"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """Returns bytes with eight booleans each."""
        del key
        return pack(x.astype(jnp.uint8), 1)

    def decode(self, code: tuple[jax.Array, ...]) -> jax.Array:
        """Inverse of `encode`."""
        return unpack(code, 1, self.features, fuse=True).astype(bool)


@dataclasses.dataclass(frozen=True, repr=False)
class _Around:
    """Base of the classes that store arrays with a codec in another form.

    Attributes:
      codec: the codec, or a `BitMask`, or another of these.
    """

    codec: Any

    def __repr__(self) -> str:
        return repr(self.codec)

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def required_key(self, key: Any) -> jax.Array:
        """As in `Codec`."""
        return self.codec.required_key(key)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codec",), meta_fields=("shape", "grouped")
)
@dataclasses.dataclass(frozen=True, repr=False)
class Reshaped(_Around):
    """A codec that stores arrays of one shape in another.

    Attributes:
      shape: shape of the arrays.
      grouped: shape in which the codec stores them.
    """

    shape: tuple[int, ...]
    grouped: tuple[int, ...]

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        """As in `Codec`."""
        return self.codec.encode(x.reshape(self.grouped), key)

    def decode(self, code: Any) -> jax.Array:
        """As in `Codec`."""
        return self.codec.decode(code).reshape(self.shape)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codec",), meta_fields=("limit",))
@dataclasses.dataclass(frozen=True, repr=False)
class Ordinary(_Around):
    """Stores extreme numbers of [..., d] apart, so that the range of the others stays small.

    A bit marks them, and all of a row get the value of the largest.

    Attributes:
      limit: the size above which a number is extreme; None for 1e4 times the lower quartile of the
        sizes of its row.
    """

    limit: float | None

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        """As in `Codec`."""
        size = jnp.abs(x)
        limit = self.limit
        if limit is None:
            quarter = x.shape[-1] // 4
            limit = _TIMES_QUARTILE * jnp.sort(size, -1)[..., quarter : quarter + 1]
        # NaN is no extreme: it is to be seen.
        is_extreme = size > limit
        highest = jnp.max(jnp.where(is_extreme, x, 0), -1, keepdims=True)
        lowest = jnp.min(jnp.where(is_extreme, x, 0), -1, keepdims=True)
        extreme = jnp.where(highest > -lowest, highest, lowest)
        low = jnp.min(jnp.where(is_extreme, jnp.inf, x), -1, keepdims=True)
        low = jnp.where(jnp.isfinite(low), low, 0)
        ordinary = jnp.where(is_extreme, low, x)
        mask = in_bits(x.shape).encode(is_extreme)
        return self.codec.encode(ordinary, key), mask, extreme

    def decode(self, code: Any) -> jax.Array:
        """As in `Codec`."""
        code, mask, extreme = code
        x = self.codec.decode(code)
        is_extreme = in_bits(x.shape).decode(mask)
        return jnp.where(is_extreme, extreme, x)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codec",), meta_fields=())
@dataclasses.dataclass(frozen=True, repr=False)
class NaNApart(_Around):
    """Stores NaN in a bit each, so that the other numbers of its group keep their values."""

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        """As in `Codec`."""
        is_nan = jnp.isnan(x)
        return self.codec.encode(jnp.where(is_nan, 0, x), key), in_bits(x.shape).encode(is_nan)

    def decode(self, code: Any) -> jax.Array:
        """As in `Codec`."""
        code, mask = code
        x = self.codec.decode(code)
        return jnp.where(in_bits(x.shape).decode(mask), jnp.nan, x)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codec",), meta_fields=("dtype",))
@dataclasses.dataclass(frozen=True, repr=False)
class Reciprocal(_Around):
    """Stores the reciprocals of numbers that a backward pass divides by.

    Attributes:
      dtype: of the numbers. Their reciprocals may exceed its range.
    """

    dtype: str

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        """As in `Codec`."""
        return self.codec.encode(1 / x.astype(accumulation_dtype(x.dtype)), key)

    def decode(self, code: Any) -> jax.Array:
        """As in `Codec`."""
        x = self.codec.decode(code)
        x = without_zeros(x) if may_be_zero(self.codec) else x
        return (1 / x).astype(self.dtype)


def may_be_zero(codec: Any) -> bool:
    """Returns whether a number that is not zero may be decoded as zero."""
    while isinstance(codec, _Around):
        if isinstance(codec, Reciprocal):
            return False
        codec = codec.codec
    return not isinstance(codec, BitMask | Exact)


ResidualCodec = Codec | BitMask | Reshaped | Ordinary | NaNApart | Reciprocal


def in_bits(shape: tuple[int, ...]) -> ResidualCodec:
    """Returns what stores booleans of a shape, in bytes that are full if they can be."""
    axes, last = 0, 1
    for size in reversed(shape):
        axes, last = axes + 1, last * size
        if last % 8 == 0:
            break
    mask, grouped = BitMask(last), (*shape[: len(shape) - axes], last)
    return mask if grouped == shape else Reshaped(mask, shape, grouped)


def fitted(
    codec: Codec, shape: tuple[int, ...], dtype: str, form: Form = Form()
) -> ResidualCodec | None:
    """Returns what stores an array with a codec; None if a code would be larger than the array.

    Args:
      codec: the codec.
      shape: shape of the array.
      dtype: its dtype.
      form: the form in which it is encoded.
    """
    if not shape:  # The codec raises an error that says so.
        return codec
    grouped = codec.grouped_shape(shape)
    if codec.stored_bytes(grouped, dtype) > math.prod(shape) * jnp.dtype(dtype).itemsize:
        return None
    inner: Any = codec
    if isinstance(codec, Exact):
        return codec if grouped == shape else Reshaped(codec, shape, grouped)
    if form.is_reciprocal:
        inner = Reciprocal(Ordinary(codec, None), dtype)
    elif form.limit is not None:
        inner = Ordinary(codec, form.limit)
    if form.may_be_nan:
        inner = NaNApart(inner)
    return inner if grouped == shape else Reshaped(inner, shape, grouped)
