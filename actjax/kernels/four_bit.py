"""Arrays in 4 bits: how the moments of an optimizer are stored between steps.

Li et al., "Memory Efficient Optimizers with 4-bit States" (2023, arXiv 2309.01507): a first moment
is cut into groups of 128 and mapped to levels that resolve small values (section 4.1). A second
moment divides the first one, so that it must not become zero: it gets the levels 1/16, 2/16, ... 1,
and since outliers fill whole rows or whole columns of it, a scale for each row and each column
(section 4.2 and Definition 1, rank-1 normalization).

They round to the nearest level. Between two steps a moment moves by less than half the distance of
two levels, so that it may stay where it is for ever: a decay of 0.99 never moves a number from one
level to the next. Rounded stochastically, moments move as they should on average. The random bits
are a hash of the number itself, whose last bits no level resolves: without a seed or a counter, and
the same however the array is divided over devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from actjax.kernels.blockwise import dynamic_index, dynamic_level
from actjax.kernels.noise import random_words

GROUP = 128
"""Values of a first moment that share a scale."""
_DECADES = 2
"""Decades of the signed map below the top one: three bits of magnitude."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignedFourBit:
    """An array in 4 bits, in groups along its last axis with a scale each.

    Byte `j` of a group holds its values `j` and, in the upper half, `j + group / 2`.

    Attributes:
      codes: two values a byte, uint8 [..., groups * group / 2]: sliced and sharded like the array.
      scales: largest magnitude of each group, float32 [..., groups].
      width: length of the last axis of the array. Static.
      group: values in a group; the last group of a row may be padded with zeros. Static.
      dtype: dtype of the array. Static.
      stochastic: whether values are rounded stochastically. Static.
    """

    arrays: ClassVar = ("codes", "scales")

    codes: Any
    scales: Any
    width: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    stochastic: bool = dataclasses.field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Returns the array."""
        index = unpack(self.codes, self.group).astype(jnp.int32)
        # Two's complement of four bits.
        index = jnp.where(index >= 8, index - 16, index)
        unit = jnp.sign(index) * dynamic_level(jnp.abs(index).astype(jnp.float32), _DECADES)
        values = unit * self.scales[..., None]
        return _joined(values, self.width).astype(self.dtype)

    def encode(self, x: jax.Array) -> "SignedFourBit":
        """Returns another array of the same shape in the same form.

        Error: half the distance between two levels, which are 0, 0.01, 0.055, 0.1, 0.325, 0.55,
        0.775 and 1 times the largest magnitude of the group; less than the whole distance if
        rounded stochastically, and then without bias.
        """
        groups = _grouped(x.astype(jnp.float32), self.group)
        scales = jnp.max(jnp.abs(groups), axis=-1)
        unit = groups / jnp.where(scales > 0, scales, 1)[..., None]
        offset = fraction_of_hash(groups) if self.stochastic else 0.5
        index = dynamic_index(jnp.abs(unit), _DECADES, offset).astype(jnp.int32)
        codes = pack(jnp.where(unit < 0, -index, index) & 15)
        return dataclasses.replace(self, codes=codes, scales=scales)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankOneFourBit:
    """A matrix without negative values in 4 bits; each value has the smaller of two scales.

    Attributes:
      codes: two values a byte, uint8 [..., d, groups * group / 2], packed as in `SignedFourBit`.
      rows: largest value of each row, float32 [..., d, 1].
      columns: largest value of each column, float32 [..., 1, n].
      group: values that are packed together. Static.
      dtype: dtype of the array. Static.
      stochastic: whether values are rounded stochastically. Static.
    """

    arrays: ClassVar = ("codes", "rows", "columns")

    codes: Any
    rows: Any
    columns: Any
    group: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    stochastic: bool = dataclasses.field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Returns the array."""
        width = self.columns.shape[-1]
        level = _joined(unpack(self.codes, self.group), width).astype(jnp.float32)
        scale = jnp.minimum(self.rows, self.columns)
        return ((level + 1) * (1 / 16) * scale).astype(self.dtype)

    def encode(self, x: jax.Array) -> "RankOneFourBit":
        """Returns another matrix of the same shape in the same form.

        Error: 1/32 of the smaller of the largest values of its row and its column; 1/16 for values
        below 1/32 of it, which become 1/16 of it and never zero. Rounded stochastically, it is up
        to 1/16 everywhere, and without bias above 1/16.
        """
        x = x.astype(jnp.float32)
        rows = jnp.max(x, axis=-1, keepdims=True)
        columns = jnp.max(x, axis=-2, keepdims=True)
        scale = jnp.minimum(rows, columns)
        offset = fraction_of_hash(x) if self.stochastic else 0.5
        index = jnp.floor(x / jnp.where(scale > 0, scale, 1) * 16 + offset) - 1
        index = jnp.clip(index, 0, 15).astype(jnp.int32)
        codes = pack(_grouped(index, self.group))
        return dataclasses.replace(self, codes=codes, rows=rows, columns=columns)


def signed_zeros(
    shape: Sequence[int], dtype: Any, group: int = GROUP, *, stochastic: bool = True
) -> SignedFourBit:
    """Returns zeros in 4 bits; `.encode(x)` brings an array into this form.

    Storage: half a byte per value and 4 bytes per group. No group crosses the end of a row. The
    last group of a row is stored whole.
    """
    group = _fitted(group, shape[-1])
    groups = -(-shape[-1] // group)
    codes = jnp.zeros((*shape[:-1], groups * group // 2), jnp.uint8)
    scales = jnp.zeros((*shape[:-1], groups), jnp.float32)
    return SignedFourBit(codes, scales, shape[-1], group, jnp.dtype(dtype), stochastic)


def rank_one_zeros(
    shape: Sequence[int], dtype: Any, group: int = GROUP, *, stochastic: bool = True
) -> RankOneFourBit:
    """Returns a matrix of zeros in 4 bits; `.encode(x)` brings a matrix into this form.

    Storage: half a byte per value and 4 bytes for each row and each column.

    Raises:
      ValueError: the shape is not that of a matrix.
    """
    if len(shape) < 2:
        raise ValueError(
            f"a second moment in 4 bits has a scale for each row and each column: got the shape"
            f" {tuple(shape)}, which is no matrix."
        )
    group = _fitted(group, shape[-1])
    codes = jnp.zeros((*shape[:-1], -(-shape[-1] // group) * group // 2), jnp.uint8)
    rows = jnp.zeros((*shape[:-1], 1), jnp.float32)
    columns = jnp.zeros((*shape[:-2], 1, shape[-1]), jnp.float32)
    return RankOneFourBit(codes, rows, columns, group, jnp.dtype(dtype), stochastic)


def fraction_of_hash(x: jax.Array) -> jax.Array:
    """Returns a number in [0, 1) that is a hash of the bits of each float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    words = random_words(bits, np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B))
    return (words >> 8).astype(jnp.float32) * np.float32(2**-24)


def pack(index: jax.Array) -> jax.Array:
    """Returns numbers below 16 in groups, [..., groups, group], as bytes [..., bytes]."""
    index = index.astype(jnp.uint8)
    half = index.shape[-1] // 2
    joined = index[..., :half] | (index[..., half:] << 4)
    return joined.reshape(*index.shape[:-2], -1)


def unpack(codes: jax.Array, group: int) -> jax.Array:
    """Returns what `pack` packed, uint8 [..., groups, group]."""
    halves = codes.reshape(*codes.shape[:-1], -1, group // 2)
    return jnp.concatenate([halves & 15, halves >> 4], axis=-1)


def _fitted(group: int, width: int) -> int:
    """Returns an even group that is not much wider than a row."""
    return min(group, width + width % 2)


def _grouped(x: jax.Array, group: int) -> jax.Array:
    """Returns [..., n] as [..., groups, group], with zeros after the end of a row."""
    missing = -x.shape[-1] % group
    if missing:
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)])
    return x.reshape(*x.shape[:-1], -1, group)


def _joined(groups: jax.Array, width: int) -> jax.Array:
    """Inverse of `_grouped`."""
    return groups.reshape(*groups.shape[:-2], -1)[..., :width]
