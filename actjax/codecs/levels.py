"""Any number of levels, chosen while the program runs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import contract_tokens, over
from actjax.codecs.base import Codec, check_activation
from actjax.codecs.quantized import Quantized
from actjax.formats import code as fmt
from actjax.formats import scales as group_scales
from actjax.formats.code import QuantizedCode
from actjax.formats.packing import pack
from actjax.kernels.dequantize.api import dequantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class AnyLevels(Codec, holds_arrays=True):
    """Rounds to the nearest of so many uniform levels, and stores each number in 8 bits.

    One compiled program measures the error of a gradient for any bits of any of its arrays.

    Storage: that of `codec` with 8 bits.
    Error: that of `codec` with `log2(top + 1)` bits, uniform levels, rounded to the nearest.
    Devices: exchange no more than for an exact `x`.
    Biased: as rounding to the nearest is.

    Attributes:
      top: the highest level, a float of at most 255: `2^bits - 1`.
      codec: group and rotation. Static.
    """

    top: Any
    codec: Quantized = dataclasses.field(metadata={"static": True})

    biased = True
    needs_key = False

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> QuantizedCode:
        del key
        check_activation(self, x)
        format = self._stored.format_of(x.shape[-1])
        part = group_scales.prepare(x, format)
        top = jnp.asarray(self.top, part.dtype)
        offset, scale = group_scales.fit_range(part, top, format)
        position = jnp.round(over(part - offset, scale))
        codes = fmt.joined(jnp.clip(position, 0, top).astype(jnp.uint8))
        return QuantizedCode(
            planes=pack(codes, format.bits, format.group),
            scale=group_scales.stored(scale[..., 0], format.scale_dtype),
            features=x.shape[-1],
            dtype=jnp.dtype(x.dtype),
            format=format,
            offset=group_scales.stored(offset[..., 0], format.scale_dtype),
        )

    def decode(self, code: QuantizedCode) -> jax.Array:
        return dequantize(code)

    def weight_grad(self, code: QuantizedCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return self._stored.stored_bytes(shape, dtype)

    def grouped_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As for `codec` with few bits, so that the same numbers share a scale."""
        return self.codec.grouped_shape(shape)

    @property
    def _stored(self) -> Quantized:
        codec = self.codec
        return Quantized(8, codec.group, scale_dtype=codec.scale_dtype, rotate=codec.rotate)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Rounded(Codec, holds_arrays=True):
    """The error of `AnyLevels` or none, chosen while the program runs, without its storage.

    One compiled program measures the error of a gradient with some arrays exact.

    Storage: as without a code.
    Error: that of `AnyLevels`; none if `top` is infinite.
    Devices: exchange no more than for an exact `x`.
    Biased: as `AnyLevels`.

    Attributes:
      top: as of `AnyLevels`, or infinity.
      codec: as of `AnyLevels`. Static.
    """

    top: Any
    codec: Quantized = dataclasses.field(metadata={"static": True})

    biased = True
    needs_key = False

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        del key
        levels = AnyLevels(jnp.minimum(self.top, 255.0), self.codec)
        return jnp.where(jnp.isinf(self.top), x, levels.decode(levels.encode(x)))

    def decode(self, code: jax.Array) -> jax.Array:
        return code

    def weight_grad(self, code: jax.Array, dz: jax.Array) -> jax.Array:
        return contract_tokens(code, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return math.prod(shape) * jnp.dtype(dtype).itemsize

    def grouped_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As for `codec`."""
        return self.codec.grouped_shape(shape)
