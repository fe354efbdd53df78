"""Storage of residuals besides codecs: masks of bits, and codes of arrays in another shape."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from actjax.codecs import Codec
from actjax.formats.packing import pack, unpack


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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codec",), meta_fields=("shape", "grouped")
)
@dataclasses.dataclass(frozen=True)
class Reshaped:
    """A codec that stores arrays of one shape in another.

    Attributes:
      codec: the codec, or a `BitMask`.
      shape: shape of the arrays.
      grouped: shape in which the codec stores them.
    """

    codec: Any
    shape: tuple[int, ...]
    grouped: tuple[int, ...]

    def __repr__(self) -> str:
        return repr(self.codec)

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def required_key(self, key: Any) -> jax.Array:
        """As in `Codec`."""
        return self.codec.required_key(key)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Any:
        """As in `Codec`."""
        return self.codec.encode(x.reshape(self.grouped), key)

    def decode(self, code: Any) -> jax.Array:
        """As in `Codec`."""
        return self.codec.decode(code).reshape(self.shape)


ResidualCodec = Codec | BitMask | Reshaped


def in_bits(shape: tuple[int, ...]) -> ResidualCodec:
    """Returns what stores booleans of a shape, in bytes that are full if they can be."""
    axes, last = 0, 1
    for size in reversed(shape):
        axes, last = axes + 1, last * size
        if last % 8 == 0:
            break
    mask, grouped = BitMask(last), (*shape[: len(shape) - axes], last)
    return mask if grouped == shape else Reshaped(mask, shape, grouped)


def fitted(codec: Codec, shape: tuple[int, ...], dtype: str) -> ResidualCodec | None:
    """Returns what stores an array with a codec; None if a code would be larger than the array."""
    if not shape:  # The codec raises an error that says so.
        return codec
    grouped = codec.grouped_shape(shape)
    if codec.stored_bytes(grouped, dtype) > math.prod(shape) * jnp.dtype(dtype).itemsize:
        return None
    return codec if grouped == shape else Reshaped(codec, shape, grouped)
