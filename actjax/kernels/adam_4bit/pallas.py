"""`adam_4bit` in two passes: moments are decoded, updated and encoded in registers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.formats.blockwise import STEP, inverse_of, times_inverse
from actjax.formats.four_bit import (
    RankOneFourBit,
    SignedFourBit,
    fraction_of_hash,
    linear_index,
    signed_index,
    signed_level,
)
from actjax.kernels.adam_4bit.reference import TILE
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import Scaled, result_like, scaled, split_scaled
from actjax.kernels.tail import OnBlocks, Tail
from actjax.kernels.tiles import both, finish_tail


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


def refuses(
    grad: jax.Array, mu: SignedFourBit, nu: RankOneFourBit, *args: jax.Array, **hyper: float
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del args, hyper
    if grad.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes gradients of 16 or 32 bits, got {grad.dtype}"
    if mu.group != nu.group:
        return f"takes groups of one size, got {mu.group} and {nu.group}"
    if mu.group & (mu.group - 1) or not 32 <= mu.group <= TILE:
        return f"takes groups of 32, 64, ... {TILE} values, got {mu.group}"
    for moment in (mu, nu):
        if jnp.dtype(moment.dtype) != jnp.float32:
            return f"takes moments of float32, got {moment.dtype}"
    return f"takes arrays that are not empty, got {grad.shape}" if grad.size == 0 else None


def maxima(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    *,
    b1: float,
    b2: float,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `actjax.kernels.adam_4bit.api.MAXIMA`."""
    *stack, d, n = grad.shape
    tiles, steps = pl.cdiv(n, TILE), pl.cdiv(d, STEP)
    whole, factors = split_scaled(grad)
    arrays = [*map(_matrices, (whole, *_of_first(mu), *_of_second(nu)))]
    count = arrays[0].shape[0]

    def kernel(*refs: Any) -> None:
        factor, refs = (refs[0][0], refs[1:]) if factors else (None, refs)
        program = pl.program_id(0)
        matrix, step, place = program // (tiles * steps), program // tiles % steps, program % tiles
        tile = _tile(matrix, step, place, (d, n), nu.group, STEP, TILE // nu.group)
        _maxima(refs, factor, tile, step, place, b1, b2)

    shapes = (count, d, tiles), (count, steps, n)
    largest = pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in 2 * shapes],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit_maxima",
    )(*factors, *arrays)
    return tuple(x.reshape(*stack, *x.shape[1:]) for x in largest)


def _maxima(
    refs: Sequence[Any], factor: Any, tile: _Tile, step: Any, place: Any, b1: float, b2: float
) -> None:
    """Writes the largest magnitudes of new moments of the rows and columns of a tile."""
    grad_ref, moments, results = refs[0], _Moments(refs[1:8], tile), (refs[8:10], refs[10:12])
    of_rows: list[list[jax.Array]] = [[], []]
    for half in range(2):
        g = _gradient(tile, grad_ref, factor, half)
        exists = tile.number(half)[2]
        new = jnp.abs(moments.first(g, half, b1)), moments.second(g, half, b2)
        for i, moment in enumerate(new):
            if exists is not None:
                moment = jnp.where(exists, moment, 0.0)
            at = jnp.broadcast_to(step, (1, 1, 1)), *tile.of_column(half)[1:]
            tile.store(results[i][1], *at, jnp.max(moment, axis=0, keepdims=True))
            by_group = jnp.max(moment, axis=2, keepdims=True)
            of_rows[i].append(jnp.max(by_group, axis=1, keepdims=True))
    at = tile.row, jnp.broadcast_to(place, (1, 1, 1)), tile.rows_exist
    for (by_tile_ref, _), halves in zip(results, of_rows, strict=True):
        tile.store(by_tile_ref, *at, jnp.maximum(*halves))


def adam_4bit(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    mu_rows: jax.Array,
    mu_columns: jax.Array,
    nu_rows: jax.Array,
    nu_columns: jax.Array,
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    interpret: bool = False,
    **hyper: float,
) -> tuple[Any, SignedFourBit, RankOneFourBit]:
    """As `actjax.kernels.adam_4bit.reference.adam_4bit`; a `Layer` is written in its place.

    With a tail its results are in the place of the update.
    """
    *stack, d, n = grad.shape
    tile_groups = max(1, min(_NUMBERS // mu.group, pl.next_power_of_2(pl.cdiv(n, mu.group)), 4))
    tile_rows = _NUMBERS // (tile_groups * mu.group)
    tiles, steps = pl.cdiv(pl.cdiv(n, mu.group), tile_groups), pl.cdiv(d, tile_rows)
    new_scales = mu_rows, mu_columns, nu_rows, nu_columns
    whole, factors = split_scaled(grad)
    arrays = [*map(_matrices, (whole, *_of_first(mu), *_of_second(nu), *new_scales))]
    count = arrays[0].shape[0]
    stochastic = mu.stochastic, nu.stochastic
    others = [] if tail is None else tail.operands(_matrices)
    # The codes of both, and the scales of groups.
    shapes = [result_like(arrays[i]) for i in (1, 2, 5)]
    if tail is None:
        shapes.append(jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32))
    else:
        shapes += tail.results(others, count * steps * tiles, (1,))

    def kernel(*refs: Any) -> None:
        factor, refs = (refs[0][0], refs[1:]) if factors else (None, refs)
        end, first = 13 + len(others), 16 + len(others)
        program = pl.program_id(0)
        matrix, step, place = program // (tiles * steps), program // tiles % steps, program % tiles
        tile = _tile(matrix, step, place, (d, n), mu.group, tile_rows, tile_groups)
        block = None if tail is None else OnBlocks(tail, refs[13:end], refs[first:])

        def write(half: int, update: jax.Array) -> None:
            if block is None:
                tile.store(refs[first], *tile.number(half), update)
            else:
                tile.run(block, half, update)

        _update((*refs[:13], *refs[end:first]), factor, write, tile, stochastic, **hyper)
        if block is not None:
            finish_tail(block, program)

    results = pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit",
    )(*factors, *arrays, corrections, *others)
    mu_codes, scales, nu_codes = (x.reshape(*stack, *x.shape[1:]) for x in results[:3])
    new_mu = dataclasses.replace(
        mu, codes=mu_codes, scales=scales, rows=mu_rows, columns=mu_columns
    )
    new_nu = dataclasses.replace(nu, codes=nu_codes, rows=nu_rows, columns=nu_columns)
    update = results[3].reshape(grad.shape) if tail is None else tail.finished(results[3:])
    return update, new_mu, new_nu


_NUMBERS = 2048
"""Values of a program of the second pass."""


def _update(
    refs: Sequence[Any], factor: Any, write: Callable[[int, jax.Array], None], tile: _Tile,
    stochastic: tuple[bool, bool], *, b1: float, b2: float, eps: float, eps_root: float,
) -> None:  # fmt: skip
    """Updates the moments of a tile; `write` takes the update of a half of the bytes."""
    grad_ref, moments, corrections_ref = refs[0], _Moments(refs[1:8], tile), refs[12]
    mu_rows_ref, mu_columns_ref, nu_rows_ref, nu_columns_ref = refs[8:12]
    new_mu_ref, new_scales_ref, new_nu_ref = refs[13:]
    mu_row, nu_row = (
        inverse_of(tile.load(ref, *tile.of_row())) for ref in (mu_rows_ref, nu_rows_ref)
    )
    first_factor, second_factor = 1 / corrections_ref[0], 1 / corrections_ref[1]
    firsts, nu_bytes = [], jnp.zeros_like(moments.nu_codes)
    for half in range(2):
        place = tile.number(half)
        g = _gradient(tile, grad_ref, factor, half)
        first, second = moments.first(g, half, b1), moments.second(g, half, b2)
        root = jnp.sqrt(second * second_factor + np.float32(eps_root))
        write(half, first * first_factor / (root + np.float32(eps)))
        mu_column, nu_column = (
            inverse_of(tile.load(ref, *tile.of_column(half)))
            for ref in (mu_columns_ref, nu_columns_ref)
        )
        size = times_inverse(second, jnp.maximum(nu_row, nu_column))
        index = linear_index(size, fraction_of_hash(second) if stochastic[1] else 0.5)
        scaled = times_inverse(first, jnp.maximum(mu_row, mu_column))
        if place[2] is not None:
            index, scaled = jnp.where(place[2], index, 0), jnp.where(place[2], scaled, 0.0)
        nu_bytes = nu_bytes | index << 4 * half
        firsts.append((scaled, fraction_of_hash(first) if stochastic[0] else 0.5))
    tile.store(new_nu_ref, *tile.byte(), nu_bytes)
    largest = jnp.maximum(*(jnp.abs(scaled) for scaled, _ in firsts))
    new_scale = jnp.max(largest, axis=2, keepdims=True)
    inverse, mu_bytes = inverse_of(new_scale), jnp.zeros_like(moments.mu_codes)
    for half, (scaled, offset) in enumerate(firsts):
        index = signed_index(times_inverse(jnp.abs(scaled), inverse), offset)
        mu_bytes = mu_bytes | (jnp.where(scaled < 0, -index, index) & 15) << 4 * half
    tile.store(new_mu_ref, *tile.byte(), mu_bytes)
    tile.store(new_scales_ref, *tile.of_group(), new_scale)


def _gradient(tile: _Tile, ref: Any, factor: Any, half: int) -> jax.Array:
    """Returns the gradient of a half of the bytes, float32; `factor` is as in `Scaled`, or None."""
    g = tile.load(ref, *tile.number(half))
    return (g if factor is None else scaled(g, factor)).astype(jnp.float32)


def _of_first(mu: SignedFourBit) -> tuple[jax.Array, ...]:
    return mu.codes, mu.scales, mu.rows, mu.columns


def _of_second(nu: RankOneFourBit) -> tuple[jax.Array, ...]:
    return nu.codes, nu.rows, nu.columns


class _Moments:
    """The moments of a tile, in registers.

    Attributes:
      mu_codes: bytes of the first moment, int32.
      nu_codes: bytes of the second one, int32.
    """

    def __init__(self, refs: Sequence[Any], tile: _Tile) -> None:
        """Loads the moments from the arrays of `_of_first` and of `_of_second`."""
        mu_ref, scales_ref, mu_rows_ref, self._mu_columns, nu_ref, nu_rows_ref, self._nu_columns = (
            refs
        )
        self.mu_codes, self.nu_codes = (
            tile.load(ref, *tile.byte()).astype(jnp.int32) for ref in (mu_ref, nu_ref)
        )
        self._scale = tile.load(scales_ref, *tile.of_group())
        self._mu_rows, self._nu_rows = (
            tile.load(ref, *tile.of_row()) for ref in (mu_rows_ref, nu_rows_ref)
        )
        self._tile = tile

    def first(self, g: jax.Array, half: int, b1: float) -> jax.Array:
        """Returns the new first moments of a half of the bytes."""
        index = ((self.mu_codes >> 4 * half) & 15 ^ 8) - 8
        level = signed_level(jnp.abs(index).astype(jnp.float32))
        columns = self._tile.load(self._mu_columns, *self._tile.of_column(half))
        old = jnp.where(index < 0, -level, level) * self._scale
        old *= jnp.minimum(self._mu_rows, columns)
        return np.float32(b1) * old + np.float32(1 - b1) * g

    def second(self, g: jax.Array, half: int, b2: float) -> jax.Array:
        """Returns the new second moments of a half of the bytes."""
        level = ((self.nu_codes >> 4 * half) & 15).astype(jnp.float32)
        columns = self._tile.load(self._nu_columns, *self._tile.of_column(half))
        old = (level + 1) * np.float32(1 / 16) * jnp.minimum(self._nu_rows, columns)
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
