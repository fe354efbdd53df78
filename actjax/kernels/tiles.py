"""The division of rows of grouped features into programs of a kernel, with their loads and stores.

A tile is [tokens, groups, lanes]. A group is processed in slices that lie side by side in its bytes
(see `actjax.formats.packing`), so nothing moves between lanes. All blocks are powers of two, as
Triton requires.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels.tail import OnBlocks, Tail


@dataclasses.dataclass(frozen=True)
class Part:
    """Some groups of some tokens, with each group cut into slices.

    Attributes:
      token: indices of the tokens, [tokens, 1, 1].
      tokens: number of tokens of the array, if a tile may exceed it; else None.
      group: indices of the groups, [1, groups, 1].
      groups: number of groups of a token, if a tile may exceed it; else None.
      size: features of a group.
      features: d; the last group may be filled up.
      slices: number of slices of a group.
      interpret: whether XLA runs the program, not Triton.
      program: number of the program.
    """

    token: Any
    tokens: int | None
    group: Any
    groups: int | None
    size: int
    features: int
    slices: int
    interpret: bool = False
    program: Any = 0

    @property
    def width(self) -> int:
        """Features of a slice; the last slice of a group may have fewer."""
        return -(-self.size // self.slices)

    @property
    def lane(self) -> jax.Array:
        """Index within a slice, [1, 1, lanes]."""
        return _iota(pl.next_power_of_2(self.width), 2)

    def place(self, number: int) -> jax.Array:
        """Returns the indices of a slice within its group, [1, 1, lanes]."""
        return number * self.width + self.lane

    def feature(self, number: int) -> jax.Array:
        """Returns the features of a slice, [1, groups, lanes]."""
        return self.group * self.size + self.place(number)

    def groups_exist(self) -> jax.Array | None:
        """Returns which tokens and groups of a tile exist; None for all."""
        tokens = None if self.tokens is None else self.token < self.tokens
        return both(tokens, None if self.groups is None else self.group < self.groups)

    def is_held(self, number: int) -> jax.Array | None:
        """Returns which numbers of a slice the groups have, also to fill up; None for all."""
        end = min(self.width, self.size - number * self.width)
        is_full = end == pl.next_power_of_2(self.width)
        return both(self.groups_exist(), None if is_full else self.lane < end)

    def exists(self, number: int) -> jax.Array | None:
        """Returns which numbers of a slice are of the array; None for all."""
        is_whole = self.features % self.size == 0
        return both(
            self.is_held(number), None if is_whole else self.feature(number) < self.features
        )


def load_row(ref: Any, part: Part, number: int, fill: float = 0) -> jax.Array:
    """Returns the entries of an array [1, d] for the features of a slice, [1, groups, lanes]."""
    mask = dataclasses.replace(part, tokens=None).exists(number)
    return load(ref, jnp.zeros((1, 1, 1), jnp.int32), part.feature(number), mask, fill)


def load_sequence(ref: Any, part: Part, number: int, tokens: int) -> jax.Array:
    """Returns the entries of an array [N, d] for a slice, [tokens, groups, lanes].

    Args:
      ref: an array with a row for each of N sequences of equal length.
      part: groups of some tokens.
      number: number of the slice.
      tokens: T, the tokens of all sequences.
    """
    sequence = part.token // (tokens // ref.shape[0])
    return load(ref, sequence, part.feature(number), part.exists(number))


def as_float(scale: jax.Array) -> jax.Array:
    """Returns stored scales, float32 or the bits of bfloat16, as float32."""
    if scale.dtype != jnp.uint16:
        return scale
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 16, jnp.float32)


def both(*masks: jax.Array | None) -> jax.Array | None:
    """Returns where all masks are true; a mask of None is true everywhere."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def load(ref: Any, row: Any, column: Any, mask: Any, fill: float = 0) -> jax.Array:
    """Returns the entries of an array of rows, and `fill` where the mask is false."""
    shape = jnp.broadcast_shapes(row.shape, column.shape, () if mask is None else mask.shape)
    place = ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)]
    if mask is None:
        return plgpu.load(place)
    return plgpu.load(place, mask=jnp.broadcast_to(mask, shape), other=fill)


def store(ref: Any, row: Any, column: Any, value: jax.Array, mask: Any) -> None:
    """Writes entries of an array of rows where the mask is true."""
    shape = jnp.broadcast_shapes(row.shape, column.shape, () if mask is None else mask.shape)
    place = ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)]
    value = jnp.broadcast_to(value, shape).astype(ref.dtype)
    plgpu.store(place, value, mask=None if mask is None else jnp.broadcast_to(mask, shape))


def run_tail(
    tail: Tail, operands: Sequence[Any], results: Sequence[Any], part: Part, first: Any
) -> None:
    """Runs a tail in a program whose part has groups that are not cut.

    Args:
      tail: the tail.
      operands: references to its operands.
      results: references to its results.
      part: the part.
      first: numbers of the result of the kernel; None for none.
    """
    block = OnBlocks(tail, operands, results)
    row, column, mask = part.token, part.feature(0), part.exists(0)
    block.run(
        *(first, row, column, mask),
        lambda ref: load(ref, row, column, mask),
        lambda ref, value: store(ref, row, column, value, mask),
    )
    finish_tail(block, part.program)


def finish_tail(block: OnBlocks, program: Any) -> None:
    """Writes the sums of a tail, after the last block of a program.

    Args:
      block: the tail.
      program: number of the program.
    """
    zero = jnp.zeros((1, 1, 1), jnp.int32)
    program = zero + program
    block.finish(lambda ref, total: store(ref, program, zero, total, None))


def _iota(size: int, axis: int) -> jax.Array:
    shape = [1, 1, 1]
    shape[axis] = size
    return jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The division of an array of grouped features into programs.

    Attributes:
      rows: T.
      features: d.
      group: features of a group.
      tile_rows: tokens of a program.
      tile_groups: groups of a program.
      interpret: whether XLA runs the program, not Triton.
    """

    rows: int
    features: int
    group: int
    tile_rows: int
    tile_groups: int
    interpret: bool = False

    @property
    def programs(self) -> tuple[int]:
        """Number of programs."""
        return (self._blocks * pl.cdiv(self.rows, self.tile_rows),)

    def run(self, body: Callable[[Callable[[int], Part]], None]) -> None:
        """Runs `body` for a program, with a function from a number of slices to its `Part`."""
        program = pl.program_id(0)
        row, block = program // self._blocks, program % self._blocks
        part = functools.partial(
            Part,
            row * self.tile_rows + _iota(self.tile_rows, 0),
            self.rows if self.rows % self.tile_rows else None,
            block * self.tile_groups + _iota(self.tile_groups, 1),
            self._groups if self._groups % self.tile_groups else None,
            self.group,
            self.features,
            interpret=self.interpret,
            program=program,
        )
        body(part)

    @property
    def _groups(self) -> int:
        return pl.cdiv(self.features, self.group)

    @property
    def _blocks(self) -> int:
        return pl.cdiv(self._groups, self.tile_groups)


def grid_of(
    rows: int, features: int, group: int, numbers: int = 4096, *, interpret: bool = False
) -> Grid:
    """Returns a grid whose programs process about `numbers` numbers each."""
    groups = pl.cdiv(features, group)
    # As many groups as possible, since their scales are written together, but few idle ones.
    sizes = [size for size in (16, 8, 4, 2, 1) if size * group <= numbers] or [1]
    busy = [size for size in sizes if pl.cdiv(groups, size) * size <= 1.15 * groups]
    tile_groups = busy[0] if busy else sizes[-1]
    tile_rows = max(1, numbers // (tile_groups * pl.next_power_of_2(group)))
    tile_rows = min(tile_rows, pl.next_power_of_2(rows))
    return Grid(rows, features, group, tile_rows, tile_groups, interpret)
