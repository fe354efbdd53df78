"""`adam_4bit` in two passes: moments are decoded, updated and encoded in registers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels.adam_4bit.reference import TILE
from actjax.kernels.blockwise import (
    STEP,
    dynamic_level,
    inverse_of,
    times_inverse,
)
from actjax.kernels.four_bit import (
    DECADES,
    RankOneFourBit,
    SignedFourBit,
    fraction_of_hash,
    linear_index,
    signed_index,
)
from actjax.kernels.tiles import both


@dataclasses.dataclass(frozen=True)
class _Tile:
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
        place, mask = self._place(ref, row, column, mask)
        return plgpu.load(place) if mask is None else plgpu.load(place, mask=mask, other=0)

    def store(self, ref: Any, row: Any, column: Any, mask: Any, value: jax.Array) -> None:
        place, mask = self._place(ref, row, column, mask)
        plgpu.store(place, value.astype(ref.dtype), mask=mask)

    def _place(self, ref: Any, row: Any, column: Any, mask: Any) -> tuple[Any, Any]:
        shape = jnp.broadcast_shapes(row.shape, column.shape)
        row, column = jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)
        place = ref.at[jnp.broadcast_to(self.matrix, shape), row, column]
        return place, None if mask is None else jnp.broadcast_to(mask, shape)


def maxima(
    grad: jax.Array, nu: RankOneFourBit, *, b2: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `actjax.kernels.adam_4bit.api.maxima`."""
    *stack, d, n = grad.shape
    tiles, steps = pl.cdiv(n, TILE), pl.cdiv(d, STEP)
    arrays = [*map(_matrices, (grad, nu.codes, nu.rows, nu.columns))]
    count = arrays[0].shape[0]

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        step, place = program // tiles % steps, program % tiles
        _maxima(
            refs,
            _tile(
                program // (tiles * steps), step, place, (d, n), nu.group, STEP, TILE // nu.group
            ),
            step,
            place,
            b2,
        )

    rows, columns = pl.pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((count, d, tiles), (count, steps, n))
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit_maxima",
    )(*arrays)
    return rows.reshape(*stack, d, tiles), columns.reshape(*stack, steps, n)


def _maxima(refs: Sequence[Any], tile: _Tile, step: Any, place: Any, b2: float) -> None:
    """Writes the largest new second moments of the rows and columns of a tile."""
    grad_ref, codes_ref, rows_ref, columns_ref, by_tile_ref, by_step_ref = refs
    codes = tile.load(codes_ref, *tile.byte()).astype(jnp.int32)
    row_scale = tile.load(rows_ref, *tile.of_row())
    of_rows = []
    for half in range(2):
        g = tile.load(grad_ref, *tile.number(half)).astype(jnp.float32)
        column_scale = tile.load(columns_ref, *tile.of_column(half))
        second = _second(g, codes, half, row_scale, column_scale, b2)
        exists = tile.number(half)[2]
        if exists is not None:
            second = jnp.where(exists, second, 0.0)
        at = jnp.broadcast_to(step, (1, 1, 1)), *tile.of_column(half)[1:]
        tile.store(by_step_ref, *at, jnp.max(second, axis=0, keepdims=True))
        of_rows.append(jnp.max(jnp.max(second, axis=2, keepdims=True), axis=1, keepdims=True))
    largest = jnp.maximum(*of_rows)
    tile.store(by_tile_ref, tile.row, jnp.broadcast_to(place, (1, 1, 1)), tile.rows_exist, largest)


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    rows: jax.Array,
    columns: jax.Array,
    corrections: jax.Array,
    *,
    interpret: bool = False,
    **hyper: float,
) -> tuple[jax.Array, SignedFourBit, RankOneFourBit]:
    """As `actjax.kernels.adam_4bit.reference.adam_4bit`."""
    *stack, d, n = grad.shape
    tile_groups = max(1, min(_NUMBERS // mu.group, pl.next_power_of_2(pl.cdiv(n, mu.group)), 4))
    tile_rows = _NUMBERS // (tile_groups * mu.group)
    tiles, steps = pl.cdiv(pl.cdiv(n, mu.group), tile_groups), pl.cdiv(d, tile_rows)
    given = (grad, mu.codes, mu.scales, nu.codes, nu.rows, nu.columns, rows, columns)
    arrays = [*map(_matrices, given)]
    count = arrays[0].shape[0]
    dtypes = jnp.float32, jnp.uint8, jnp.float32, jnp.uint8
    stochastic = mu.stochastic, nu.stochastic

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        tile = _tile(
            program // (tiles * steps),
            program // tiles % steps,
            program % tiles,
            (d, n),
            mu.group,
            tile_rows,
            tile_groups,
        )
        _update(refs, tile, stochastic, **hyper)

    update, *codes = pl.pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=tuple(
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(arrays[:4], dtypes, strict=True)
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit",
    )(*arrays, corrections)
    mu_codes, scales, nu_codes = (x.reshape(*stack, *x.shape[1:]) for x in codes)
    new_mu = dataclasses.replace(mu, codes=mu_codes, scales=scales)
    new_nu = dataclasses.replace(nu, codes=nu_codes, rows=rows, columns=columns)
    return update.reshape(grad.shape), new_mu, new_nu


_NUMBERS = 2048
"""Values of a program of the second pass."""


def _update(
    refs: Sequence[Any], tile: _Tile, stochastic: tuple[bool, bool], *,
    b1: float, b2: float, eps: float, eps_root: float,
) -> None:  # fmt: skip
    """Updates the moments of a tile, and writes its update."""
    grad_ref, mu_ref, scales_ref, nu_ref, *of_nu, corrections_ref = refs[:9]
    rows_ref, columns_ref, new_rows_ref, new_columns_ref = of_nu
    update_ref, new_mu_ref, new_scales_ref, new_nu_ref = refs[9:]
    mu_codes, nu_codes = (
        tile.load(ref, *tile.byte()).astype(jnp.int32) for ref in (mu_ref, nu_ref)
    )
    scale = tile.load(scales_ref, *tile.of_group())
    row_scale = tile.load(rows_ref, *tile.of_row())
    row_inverse = inverse_of(tile.load(new_rows_ref, *tile.of_row()))
    first_factor, second_factor = 1 / corrections_ref[0], 1 / corrections_ref[1]
    firsts, nu_bytes = [], jnp.zeros_like(nu_codes)
    for half in range(2):
        place = tile.number(half)
        g = tile.load(grad_ref, *place).astype(jnp.float32)
        column_scale = tile.load(columns_ref, *tile.of_column(half))
        first = np.float32(b1) * (_signed(mu_codes, half) * scale) + np.float32(1 - b1) * g
        second = _second(g, nu_codes, half, row_scale, column_scale, b2)
        root = jnp.sqrt(second * second_factor + np.float32(eps_root))
        tile.store(update_ref, *place, first * first_factor / (root + np.float32(eps)))
        column_inverse = inverse_of(tile.load(new_columns_ref, *tile.of_column(half)))
        size = times_inverse(second, jnp.maximum(row_inverse, column_inverse))
        index = linear_index(size, fraction_of_hash(second) if stochastic[1] else 0.5)
        if place[2] is not None:
            index, first = jnp.where(place[2], index, 0), jnp.where(place[2], first, 0.0)
        nu_bytes = nu_bytes | index << 4 * half
        firsts.append(first)
    tile.store(new_nu_ref, *tile.byte(), nu_bytes)
    new_scale = jnp.max(jnp.maximum(*map(jnp.abs, firsts)), axis=2, keepdims=True)
    inverse, mu_bytes = inverse_of(new_scale), jnp.zeros_like(mu_codes)
    for half, first in enumerate(firsts):
        size = times_inverse(jnp.abs(first), inverse)
        index = signed_index(size, first, stochastic[0])
        mu_bytes = mu_bytes | (jnp.where(first < 0, -index, index) & 15) << 4 * half
    tile.store(new_mu_ref, *tile.byte(), mu_bytes)
    tile.store(new_scales_ref, *tile.of_group(), new_scale)


def _signed(codes: jax.Array, half: int) -> jax.Array:
    """Returns the levels of a half of the bytes, as `four_bit.SignedFourBit.decode`."""
    index = ((codes >> 4 * half) & 15 ^ 8) - 8
    level = dynamic_level(jnp.abs(index).astype(jnp.float32), DECADES)
    return jnp.where(index < 0, -level, level)


def _second(
    g: jax.Array, codes: jax.Array, half: int, rows: jax.Array, columns: jax.Array, b2: float
) -> jax.Array:
    """Returns the new second moments of a half of the bytes."""
    level = ((codes >> 4 * half) & 15).astype(jnp.float32)
    old = (level + 1) * np.float32(1 / 16) * jnp.minimum(rows, columns)
    return np.float32(b2) * old + np.float32(1 - b2) * (g * g)


def _tile(
    matrix: Any, step: Any, place: Any, shape: tuple[int, int], size: int, rows: int, groups: int
) -> _Tile:
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
    return _Tile(
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


def _matrices(x: jax.Array) -> jax.Array:
    """Returns a stack of matrices with one leading axis."""
    return x.reshape(-1, *x.shape[-2:])
