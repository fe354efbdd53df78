"""Arrays in 4 bits: how the moments of an optimizer are stored between steps.

Li et al., "Memory Efficient Optimizers with 4-bit States" (2023, arXiv 2309.01507): a first moment
is cut into groups of 128 and mapped to levels that resolve small values (section 4.1). A second
moment divides the first one, so that it must not become zero: it gets the levels 1/16, 2/16, ... 1,
and since outliers fill whole rows or whole columns of it, a scale for each row and each column
(section 4.2 and Definition 1, rank-1 normalization).

Here a first moment is divided by the smaller of the largest magnitudes of its row and of its column
too, before its groups get their scales. The values left in a group are of similar size, so nearly
even levels fit: on the moments of a small trained model, their rounding errors, relative to the
root of the second moment, have less than a fifth of the variance of those of the published map
(`benchmarks/results/moment_rounding.json`). They are bounded, too: both moments of a number have
scales of the same row and the same column.

Li et al. round to the nearest level. Between two steps a moment moves by less than half the
distance of two levels, so that it may stay where it is for ever. Here moments are rounded
stochastically, and move as they should on average. The random bits are a hash of the number itself,
whose last bits no level resolves: without a seed or a counter, and the same however the array is
divided over devices. Equal numbers are rounded alike: a moment that does not change from step to
step is rounded the same way each time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.blockwise import (
    inverse_of,
    largest_of_column,
    largest_of_row,
    times_inverse,
)

GROUP = 128
"""Values of a first moment that share a scale."""
_SHIFTS = np.array([[0], [4]], np.int32)
"""Bits below the lower and below the upper half of a group in its bytes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignedFourBit:
    """An array in 4 bits, in groups along its last axis, with scales of groups, rows and columns.

    Byte `j` of a group holds its values `j` and, in the upper half, `j + group / 2`.

    Attributes:
      codes: two values a byte, uint8 [..., d, groups * group / 2]: sliced and sharded like the
        array.
      scales: largest magnitude of each group, after it was divided by the smaller of the scales of
        its row and its column, float32 [..., d, groups].
      rows: largest magnitude of each row, float32 [..., d, 1].
      columns: largest magnitude of each column, float32 [..., 1, n].
      width: length of the last axis of the array. Static.
      group: values in a group; the last group of a row may be padded with zeros. Static.
      dtype: dtype of the array. Static.
      stochastic: whether values are rounded stochastically, or to the nearest level, which programs
        in two precisions agree on. Static.
    """

    arrays: ClassVar = ("codes", "scales", "rows", "columns")

    codes: Any
    scales: Any
    rows: Any
    columns: Any
    width: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    stochastic: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """[..., groups]; [..., 1] if the last group of a row is padded.

        Devices can divide the codes as they divide this.
        """
        return self.scales.shape if self.width % self.group == 0 else (*self.codes.shape[:-1], 1)

    def decode(self) -> jax.Array:
        """Returns the array."""
        # Two's complement of four bits.
        index = (unpack_nibbles(self.codes, self.group) ^ 8) - 8
        unit = signed_level(jnp.abs(index).astype(jnp.float32))
        values = jnp.where(index < 0, -unit, unit) * self.scales[..., None]
        values = _joined(values, self.width) * jnp.minimum(self.rows, self.columns)
        return values.astype(self.dtype)

    def encode(self, x: jax.Array) -> "SignedFourBit":
        """Returns another array of the same shape in the same form.

        Error: less than the distance between two levels, which are 0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8
        and 1 times the scales, and without bias.
        """
        x = x.astype(jnp.float32)
        return self.encode_with(largest_of_row(x)[..., None], largest_of_column(x)[..., None, :], x)

    def encode_with(self, rows: jax.Array, columns: jax.Array, x: jax.Array) -> "SignedFourBit":
        """Returns `encode(x)`, whose scales of rows and columns are given."""
        x = x.astype(jnp.float32)
        scaled = times_inverse(x, jnp.maximum(inverse_of(rows), inverse_of(columns)))
        scaled, offset = scaled.astype(jnp.float32), _offset(x, self.stochastic)
        parts = zip(_grouped(scaled, self.group), _grouped(offset, self.group), strict=True)
        coded = [_encoded_groups(*part) for part in parts]
        codes, scales = (jnp.concatenate(part, axis=-1) for part in zip(*coded, strict=True))
        return dataclasses.replace(self, codes=codes, scales=scales, rows=rows, columns=columns)


def _encoded_groups(groups: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes and scales of some groups, [..., groups, group]."""
    scales = largest_of_row(groups)
    size = times_inverse(jnp.abs(groups), inverse_of(scales)[..., None])
    index = signed_index(size, offset)
    return pack_nibbles(jnp.where(groups < 0, -index, index) & 15), scales


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
      stochastic: whether values are rounded stochastically, or to the nearest level, which programs
        in two precisions agree on. Static.
    """

    arrays: ClassVar = ("codes", "rows", "columns")

    codes: Any
    rows: Any
    columns: Any
    group: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    stochastic: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """[..., groups]; [..., 1] if the last group of a row is padded."""
        groups, rest = divmod(self.columns.shape[-1], self.group)
        return (*self.codes.shape[:-1], 1 if rest else groups)

    def decode(self) -> jax.Array:
        """Returns the array."""
        width = self.columns.shape[-1]
        level = _joined(unpack_nibbles(self.codes, self.group), width).astype(jnp.float32)
        scale = jnp.minimum(self.rows, self.columns)
        return ((level + 1) * (1 / 16) * scale).astype(self.dtype)

    def encode(self, x: jax.Array) -> "RankOneFourBit":
        """Returns another matrix of the same shape in the same form.

        Error: up to 1/16 of the smaller of the largest values of its row and its column, and
        without bias above 1/16 of it. Smaller values become 1/16 of it, and never zero.
        """
        x = x.astype(jnp.float32)
        return self.encode_with(largest_of_row(x)[..., None], largest_of_column(x)[..., None, :], x)

    def encode_with(self, rows: jax.Array, columns: jax.Array, x: jax.Array) -> "RankOneFourBit":
        """Returns `encode(x)`, whose scales are given."""
        x = x.astype(jnp.float32)
        # The inverse of the smaller scale.
        inverse = jnp.maximum(inverse_of(rows), inverse_of(columns))
        index = linear_index(times_inverse(x, inverse), _offset(x, self.stochastic))
        parts = [pack_nibbles(groups) for groups in _grouped(index, self.group)]
        codes = jnp.concatenate(parts, axis=-1)
        return dataclasses.replace(self, codes=codes, rows=rows, columns=columns)


def _offset(x: jax.Array, stochastic: bool) -> jax.Array:
    """Returns what is added to an index before it is rounded down."""
    return fraction_of_hash(x) if stochastic else jnp.full(x.shape, 0.5, jnp.float32)


def signed_zeros(shape: Sequence[int], dtype: Any, group: int = GROUP) -> SignedFourBit:
    """Returns zeros in 4 bits; `.encode(x)` brings an array into this form.

    Storage: half a byte per value and 4 bytes per group, row and column. No group crosses the end
    of a row. The last group of a row is stored whole.

    Args:
      shape: shape of a matrix, or of a stack of them.
      dtype: dtype of the array.
      group: values that share a scale.

    Raises:
      ValueError: the shape is not that of a matrix.
    """
    _check_matrix("first", shape)
    group = _fitted(group, shape[-1])
    groups = -(-shape[-1] // group)
    codes = jnp.zeros((*shape[:-1], groups * group // 2), jnp.uint8)
    scales = jnp.zeros((*shape[:-1], groups), jnp.float32)
    rows, columns = _zero_scales(shape)
    return SignedFourBit(codes, scales, rows, columns, shape[-1], group, jnp.dtype(dtype))


def rank_one_zeros(shape: Sequence[int], dtype: Any, group: int = GROUP) -> RankOneFourBit:
    """Returns a matrix of zeros in 4 bits; `.encode(x)` brings a matrix into this form.

    Storage: half a byte per value and 4 bytes for each row and each column.

    Raises:
      ValueError: the shape is not that of a matrix.
    """
    _check_matrix("second", shape)
    group = _fitted(group, shape[-1])
    codes = jnp.zeros((*shape[:-1], -(-shape[-1] // group) * group // 2), jnp.uint8)
    return RankOneFourBit(codes, *_zero_scales(shape), group, jnp.dtype(dtype))


def signed_index(size: jax.Array, offset: jax.typing.ArrayLike) -> jax.Array:
    """Returns one of the two neighboring levels of magnitudes in [0, 1] as an index, int32.

    The levels are 0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8 and 1: the smaller of two lines through them.

    Args:
      size: the magnitudes, float32.
      offset: uniform in [0, 1) for stochastic rounding, which keeps the mean; 0.5 for the nearest
        level.
    """
    line, upper = size * 10.0, size * 5.0 + 2.0
    index = jnp.floor(jnp.where(upper < line, upper, line) + offset)
    return jnp.where(index < 7, index, 7).astype(jnp.int32)


def signed_level(index: jax.Array) -> jax.Array:
    """Returns the magnitude of levels of `signed_index`, which are whole numbers in float32."""
    level, upper = index * 0.1, index * 0.2 - 0.4
    return jnp.where(upper > level, upper, level)


def linear_index(size: jax.Array, offset: jax.typing.ArrayLike) -> jax.Array:
    """Returns one of the levels 1/16, 2/16, ... 1, int32; arguments as `signed_index`."""
    index = jnp.floor(size * 16 + offset) - 1
    index = jnp.where(index < 15, index, 15)
    return jnp.where(index > 0, index, 0).astype(jnp.int32)


def fraction_of_hash(x: jax.Array) -> jax.Array:
    """Returns a number in [0, 1) that is a hash of the bits of each float32.

    The hash has two products, whose constants Wellons found ("Prospecting for hash functions",
    2018). Its lower bits, of which a last shift would make better ones, count least.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    # The bits of a number in [1, 2).
    word = (word >> np.uint32(9)) | np.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(word, jnp.float32) - 1


def pack_nibbles(index: jax.Array) -> jax.Array:
    """Returns numbers below 16 in groups, int32 [..., groups, group], as bytes [..., bytes]."""
    halves = index.reshape(*index.shape[:-1], 2, -1)
    halves = halves << jax.lax.broadcast_to_rank(_SHIFTS, halves.ndim)
    # A sum, which XLA fuses with the numbers, unlike two slices of them.
    return jnp.sum(halves, axis=-2).reshape(*index.shape[:-2], -1).astype(jnp.uint8)


def unpack_nibbles(codes: jax.Array, group: int) -> jax.Array:
    """Returns what `pack_nibbles` packed, int32 [..., groups, group]."""
    halves = codes.reshape(*codes.shape[:-1], -1, 1, group // 2).astype(jnp.int32)
    # Shifts of the same bytes: XLA for CPUs writes joined halves to memory.
    halves = (halves >> jax.lax.broadcast_to_rank(_SHIFTS, halves.ndim)) & 15
    return halves.reshape(*codes.shape[:-1], -1, group)


def _check_matrix(moment: str, shape: Sequence[int]) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"a {moment} moment in 4 bits has a scale for each row and each column: got the shape"
            f" {tuple(shape)}, which is no matrix."
        )


def _zero_scales(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Returns zeros for the scales of rows and of columns."""
    rows = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return rows, jnp.zeros((*shape[:-2], 1, shape[-1]), jnp.float32)


def _fitted(group: int, width: int) -> int:
    """Returns an even group that is not much wider than a row."""
    return min(group, width + width % 2)


def _grouped(x: jax.Array, group: int) -> list[jax.Array]:
    """Returns the groups of [..., n], each [..., groups, group]: whole ones, and the last one.

    The last group of a row has zeros after its end. They are apart, since XLA for CPUs writes
    padded arrays to memory.
    """
    rest = x.shape[-1] % group
    whole, last = x[..., : x.shape[-1] - rest], x[..., x.shape[-1] - rest :]
    parts = [whole.reshape(*x.shape[:-1], -1, group)] if whole.shape[-1] else []
    if rest:
        last = jnp.pad(last, [*[(0, 0)] * (x.ndim - 1), (0, group - rest)])
        parts.append(last[..., None, :])
    return parts


def _joined(groups: jax.Array, width: int) -> jax.Array:
    """Returns [..., groups, group] as [..., width]."""
    return groups.reshape(*groups.shape[:-2], -1)[..., :width]
