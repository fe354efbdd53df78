"""Tiles of a matrix in 4 bits, which a program reads and writes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels.tail import OnBlocks
from actjax.kernels.tiles import both


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some rows and some groups of a matrix of a stack, as [rows, groups, bytes of a group].

    Attributes:
      matrix: index of the matrix in the stack.
      row: indices of the rows, [rows, 1, 1].
      group: indices of the groups, [1, groups, 1].
      shape: d and n.
      size: values of a group.
      rows_exist: which rows exist, [rows, 1, 1]; None for all.
      groups_exist: which groups exist, [1, groups, 1]; None for all.
    """

    matrix: Any
    row: Any
    group: Any
    shape: tuple[int, int]
    size: int
    rows_exist: Any
    groups_exist: Any

    @property
    def lane(self) -> jax.Array:
        """Numbers of the bytes of a group, [1, 1, bytes]."""
        return _iota(self.size // 2, 2)

    def column(self, half: int) -> jax.Array:
        """Returns the columns whose values are in a half of the bytes, [1, groups, bytes]."""
        return self.group * self.size + half * (self.size // 2) + self.lane

    def columns_exist(self, half: int) -> Any:
        """Returns which of these columns exist; None for all."""
        n = self.shape[1]
        return self.groups_exist if n % self.size == 0 else self.column(half) < n

    def byte(self) -> tuple[Any, Any, Any]:
        """Returns the places of the bytes of codes."""
        column = self.group * (self.size // 2) + self.lane
        return self.row, column, both(self.rows_exist, self.groups_exist)

    def number(self, half: int) -> tuple[Any, Any, Any]:
        """Returns the places of the values in a half of the bytes."""
        return self.row, self.column(half), both(self.rows_exist, self.columns_exist(half))

    def of_group(self) -> tuple[Any, Any, Any]:
        """Returns the places of the scales of groups, [rows, groups, 1]."""
        return self.row, self.group, both(self.rows_exist, self.groups_exist)

    def of_row(self) -> tuple[Any, Any, Any]:
        """Returns the places of what belongs to rows, [rows, 1, 1]."""
        return self.row, jnp.zeros((1, 1, 1), jnp.int32), self.rows_exist

    def of_column(self, half: int) -> tuple[Any, Any, Any]:
        """Returns the places of what belongs to columns, [1, groups, bytes]."""
        return jnp.zeros((1, 1, 1), jnp.int32), self.column(half), self.columns_exist(half)

    def load(self, ref: Any, row: Any, column: Any, mask: Any) -> jax.Array:
        """Returns entries of a stack of matrices; 0 where the mask is false."""
        place, mask = self._place(ref, row, column, mask)
        return plgpu.load(place) if mask is None else plgpu.load(place, mask=mask, other=0)

    def store(self, ref: Any, row: Any, column: Any, mask: Any, value: jax.Array) -> None:
        """Writes entries of a stack of matrices where the mask is true."""
        place, mask = self._place(ref, row, column, mask)
        plgpu.store(place, value.astype(ref.dtype), mask=mask)

    def run(self, block: OnBlocks, half: int, update: jax.Array) -> None:
        """Runs a tail on the update of a half of the bytes."""
        row, column, mask = self.number(half)
        block.run(
            *(update, row, column, mask),
            lambda ref: self.load(ref, row, column, mask),
            lambda ref, value: self.store(ref, row, column, mask, value),
        )

    def _place(self, ref: Any, row: Any, column: Any, mask: Any) -> tuple[Any, Any]:
        shape = jnp.broadcast_shapes(row.shape, column.shape)
        row, column = jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)
        place = ref.at[jnp.broadcast_to(self.matrix, shape), row, column]
        return place, None if mask is None else jnp.broadcast_to(mask, shape)


def tile_of(
    matrix: Any, step: Any, place: Any, shape: tuple[int, int], size: int, rows: int, groups: int
) -> Tile:
    """Returns tile `place` of tile row `step`.

    Args:
      matrix: index of the matrix.
      step: index of the tile in the first axis.
      place: index in the second axis.
      shape: shape of the matrix.
      size: values of a group.
      rows: rows of a tile.
      groups: groups of a tile.
    """
    row, group = step * rows + _iota(rows, 0), place * groups + _iota(groups, 1)
    count = pl.cdiv(shape[1], size)
    return Tile(
        matrix,
        row,
        group,
        shape,
        size,
        row < shape[0] if shape[0] % rows else None,
        group < count if count % groups else None,
    )


def _iota(size: int, axis: int) -> jax.Array:
    shape = [1, 1, 1]
    shape[axis] = size
    return jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)


def matrices(x: jax.Array) -> jax.Array:
    """Returns a stack of matrices with one leading axis."""
    return x.reshape(-1, *x.shape[-2:])
