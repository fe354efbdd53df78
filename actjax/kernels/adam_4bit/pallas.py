"""`adam_4bit` in two passes: moments are decoded, updated and encoded in registers."""

import dataclasses
from collections.abc import Callable, Mapping
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
from actjax.kernels.adam_4bit.limits import refuses
from actjax.kernels.adam_4bit.reference import TILE, Second, product
from actjax.kernels.adam_4bit.tile import Tile, matrices, tile_of
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import Scaled, result_like, scaled, split_scaled
from actjax.kernels.tail import OnBlocks, Tail
from actjax.kernels.tiles import finish_tail

__all__ = ["adam_4bit", "maxima", "refuses"]

_NUMBERS = 2048
"""Values of a program of the second pass."""

Refs = Mapping[str, Any]
"""References to arrays, by name."""


def maxima(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: RankOneFourBit | None,
    *,
    b1: float,
    b2: float,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `actjax.kernels.adam_4bit.api.MAXIMA`."""
    *stack, d, n = grad.shape
    tiles, steps = pl.cdiv(n, TILE), pl.cdiv(d, STEP)
    whole, factors = split_scaled(grad)
    arrays = _arguments(whole, mu, nu)
    count = arrays["grad"].shape[0]

    def kernel(*refs: Any) -> None:
        factor, refs = (refs[0][0], refs[1:]) if factors else (None, refs)
        program = pl.program_id(0)
        matrix, step, place = program // (tiles * steps), program // tiles % steps, program % tiles
        tile = tile_of(matrix, step, place, (d, n), mu.group, STEP, TILE // mu.group)
        named = dict(zip(arrays, refs[: len(arrays)], strict=True))
        results = refs[len(arrays) :]
        pairs = tuple(zip(results[::2], results[1::2], strict=True))
        _maxima(named, pairs, factor, tile, step, place, b1, b2)

    shapes = (count, d, tiles), (count, steps, n)
    largest = pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in 2 * shapes],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit_maxima",
    )(*factors, *arrays.values())
    return tuple(x.reshape(*stack, *x.shape[1:]) for x in largest)


def _maxima(
    refs: Refs, results: tuple[tuple[Any, Any], ...], factor: Any, tile: Tile, step: Any,
    place: Any, b1: float, b2: float,
) -> None:  # fmt: skip
    """Writes the largest magnitudes of new moments of the rows and columns of a tile.

    Args:
      refs: gradient and moments; without a second moment, the sums of the squares of the gradient
        are in the place of its magnitudes.
      results: of each moment, references to the magnitudes of rows and of columns.
      factor: as in `Scaled`; None for none.
      tile: the tile.
      step: number of its rows of tiles.
      place: its place in them.
      b1: decay of the first moment.
      b2: decay of the second.
    """
    moments, has_second = _Moments(refs, tile), "nu_rows" in refs
    reductions = jnp.max, jnp.max if has_second else jnp.sum
    of_rows: list[list[jax.Array]] = [[], []]

    def reduce(i: int, half: int, moment: jax.Array) -> None:
        exists = tile.number(half)[2]
        if exists is not None:
            moment = jnp.where(exists, moment, 0.0)
        at = jnp.broadcast_to(step, (1, 1, 1)), *tile.of_column(half)[1:]
        tile.store(results[i][1], *at, reductions[i](moment, axis=0, keepdims=True))
        by_group = reductions[i](moment, axis=2, keepdims=True)
        of_rows[i].append(reductions[i](by_group, axis=1, keepdims=True))

    for half in range(2):
        g = _gradient(tile, refs["grad"], factor, half)
        # One moment after the other: together they need more registers than there are.
        reduce(0, half, jnp.abs(moments.first(g, half, b1)))
        reduce(1, half, moments.second(g, half, b2) if has_second else g * g)
    at = tile.row, jnp.broadcast_to(place, (1, 1, 1)), tile.rows_exist
    joined = jnp.maximum, jnp.maximum if has_second else jnp.add
    for i, (by_tile_ref, _) in enumerate(results):
        tile.store(by_tile_ref, *at, joined[i](*of_rows[i]))


def adam_4bit(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: Second,
    scales: tuple[jax.Array, ...],
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    interpret: bool = False,
    **hyper: float,
) -> tuple[Any, SignedFourBit, RankOneFourBit | None]:
    """As `actjax.kernels.adam_4bit.reference.adam_4bit`; a `Layer` is written in its place.

    With a tail its results are in the place of the update.
    """
    *stack, d, n = grad.shape
    tile_groups = max(1, min(_NUMBERS // mu.group, pl.next_power_of_2(pl.cdiv(n, mu.group)), 4))
    tile_rows = _NUMBERS // (tile_groups * mu.group)
    tiles, steps = pl.cdiv(pl.cdiv(n, mu.group), tile_groups), pl.cdiv(d, tile_rows)
    whole, factors = split_scaled(grad)
    arrays = _arguments(whole, mu, nu)
    names = "new_mu_rows", "new_mu_columns", "new_nu_rows", "new_nu_columns"
    arrays |= {name: matrices(x) for name, x in zip(names, scales, strict=False)}
    count = arrays["grad"].shape[0]
    arrays["corrections"] = corrections
    others = [] if tail is None else tail.operands(matrices)
    coded = [name for name in ("mu", "mu_scales", "nu") if name in arrays]
    shapes = [result_like(arrays[name]) for name in coded]
    if tail is None:
        shapes.append(jax.ShapeDtypeStruct(arrays["grad"].shape, jnp.float32))
    else:
        shapes += tail.results(others, count * steps * tiles, (1,))
    stochastic = mu.stochastic, isinstance(nu, RankOneFourBit) and nu.stochastic

    def kernel(*refs: Any) -> None:
        factor, refs = (refs[0][0], refs[1:]) if factors else (None, refs)
        named, refs = dict(zip(arrays, refs, strict=False)), refs[len(arrays) :]
        read, refs = refs[: len(others)], refs[len(others) :]
        named |= {f"new_{name}": ref for name, ref in zip(coded, refs, strict=False)}
        results = refs[len(coded) :]
        program = pl.program_id(0)
        matrix, step, place = program // (tiles * steps), program // tiles % steps, program % tiles
        tile = tile_of(matrix, step, place, (d, n), mu.group, tile_rows, tile_groups)
        block = None if tail is None else OnBlocks(tail, read, results)

        def write(half: int, update: jax.Array) -> None:
            if block is None:
                tile.store(results[0], *tile.number(half), update)
            else:
                tile.run(block, half, update)

        _update(named, factor, write, tile, stochastic, **hyper)
        if block is not None:
            finish_tail(block, program)

    results = pallas_call(
        kernel,
        grid=(count * steps * tiles,),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="actjax_adam_4bit",
    )(*factors, *arrays.values(), *others)
    codes = {name: x.reshape(*stack, *x.shape[1:]) for name, x in zip(coded, results, strict=False)}
    new_mu = dataclasses.replace(
        mu, codes=codes["mu"], scales=codes["mu_scales"], rows=scales[0], columns=scales[1]
    )
    new_nu = None
    if isinstance(nu, RankOneFourBit):
        new_nu = dataclasses.replace(nu, codes=codes["nu"], rows=scales[2], columns=scales[3])
    results = results[len(coded) :]
    update = results[0].reshape(grad.shape) if tail is None else tail.finished(results)
    return update, new_mu, new_nu


def _update(
    refs: Refs, factor: Any, write: Callable[[int, jax.Array], None], tile: Tile,
    stochastic: tuple[bool, bool], *, b1: float, b2: float, eps: float, eps_root: float,
) -> None:  # fmt: skip
    """Updates the moments of a tile; `write` takes the update of a half of the bytes."""
    moments, has_codes = _Moments(refs, tile), "nu" in refs
    corrections = refs["corrections"]
    first_factor, second_factor = 1 / corrections[0], 1 / corrections[1]
    firsts, nu_bytes = [], jnp.zeros_like(moments.mu_codes)
    for half in range(2):
        exists = tile.number(half)[2]
        g = _gradient(tile, refs["grad"], factor, half)
        first, second = moments.first(g, half, b1), moments.second(g, half, b2)
        root = jnp.sqrt(second * second_factor + np.float32(eps_root))
        write(half, first * first_factor / (root + np.float32(eps)))
        if has_codes:
            size = times_inverse(second, _inverse_scale(refs, "new_nu", tile, half))
            index = linear_index(size, fraction_of_hash(second) if stochastic[1] else 0.5)
            index = index if exists is None else jnp.where(exists, index, 0)
            nu_bytes = nu_bytes | index << 4 * half
        scaled = times_inverse(first, _inverse_scale(refs, "new_mu", tile, half))
        scaled = scaled if exists is None else jnp.where(exists, scaled, 0.0)
        firsts.append((scaled, fraction_of_hash(first) if stochastic[0] else 0.5))
    if has_codes:
        tile.store(refs["new_nu"], *tile.byte(), nu_bytes)
    largest = jnp.maximum(*(jnp.abs(scaled) for scaled, _ in firsts))
    new_scale = jnp.max(largest, axis=2, keepdims=True)
    inverse, mu_bytes = inverse_of(new_scale), jnp.zeros_like(moments.mu_codes)
    for half, (scaled, offset) in enumerate(firsts):
        index = signed_index(times_inverse(jnp.abs(scaled), inverse), offset)
        mu_bytes = mu_bytes | (jnp.where(scaled < 0, -index, index) & 15) << 4 * half
    tile.store(refs["new_mu"], *tile.byte(), mu_bytes)
    tile.store(refs["new_mu_scales"], *tile.of_group(), new_scale)


def _inverse_scale(refs: Refs, name: str, tile: Tile, half: int) -> jax.Array:
    """Returns the inverses of the scales of new moments of a half of the bytes."""
    rows = inverse_of(tile.load(refs[f"{name}_rows"], *tile.of_row()))
    columns = inverse_of(tile.load(refs[f"{name}_columns"], *tile.of_column(half)))
    return jnp.maximum(rows, columns)


def _gradient(tile: Tile, ref: Any, factor: Any, half: int) -> jax.Array:
    """Returns the gradient of a half of the bytes, float32; `factor` is as in `Scaled`, or None."""
    g = tile.load(ref, *tile.number(half))
    return (g if factor is None else scaled(g, factor)).astype(jnp.float32)


def _arguments(grad: Any, mu: SignedFourBit, nu: Second | None) -> dict[str, Any]:
    """Returns the gradient and the arrays of the moments by name, as stacks of matrices."""
    arrays = {
        "grad": grad,
        **{"mu": mu.codes, "mu_scales": mu.scales, "mu_rows": mu.rows, "mu_columns": mu.columns},
    }
    if nu is not None:
        arrays |= {"nu_rows": nu.rows, "nu_columns": nu.columns}
    if isinstance(nu, RankOneFourBit):
        arrays["nu"] = nu.codes
    return {name: matrices(x) for name, x in arrays.items()}


class _Moments:
    """The moments of a tile, in registers.

    Attributes:
      mu_codes: bytes of the first moment, int32.
    """

    def __init__(self, refs: Refs, tile: Tile) -> None:
        """Loads the moments from the arrays of `_arguments`."""
        self._refs, self._tile = refs, tile
        self.mu_codes = tile.load(refs["mu"], *tile.byte()).astype(jnp.int32)
        self._scale = tile.load(refs["mu_scales"], *tile.of_group())
        self._mu_rows = tile.load(refs["mu_rows"], *tile.of_row())
        self._nu_codes: Any = None
        self._nu_rows: Any = None
        if "nu" in refs:
            self._nu_codes = tile.load(refs["nu"], *tile.byte()).astype(jnp.int32)
        if "nu_rows" in refs:
            self._nu_rows = tile.load(refs["nu_rows"], *tile.of_row())

    def first(self, g: jax.Array, half: int, b1: float) -> jax.Array:
        """Returns the new first moments of a half of the bytes."""
        index = ((self.mu_codes >> 4 * half) & 15 ^ 8) - 8
        level = signed_level(jnp.abs(index).astype(jnp.float32))
        columns = self._tile.load(self._refs["mu_columns"], *self._tile.of_column(half))
        old = jnp.where(index < 0, -level, level) * self._scale
        old *= jnp.minimum(self._mu_rows, columns)
        return np.float32(b1) * old + np.float32(1 - b1) * g

    def second(self, g: jax.Array, half: int, b2: float) -> jax.Array:
        """Returns the new second moments of a half of the bytes."""
        columns = self._tile.load(self._refs["nu_columns"], *self._tile.of_column(half))
        if self._nu_codes is None:
            return product(self._nu_rows, columns)
        level = ((self._nu_codes >> 4 * half) & 15).astype(jnp.float32)
        old = (level + 1) * np.float32(1 / 16) * jnp.minimum(self._nu_rows, columns)
        return np.float32(b2) * old + np.float32(1 - b2) * (g * g)
