"""`point_assignment` in one pass: scores stay in registers, and only the best is written."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels import tiles
from actjax.kernels.point_assignment.reference import normalized

MOST_POINTS = {2: 512, 4: 128}
"""Largest number of points whose scores fit the registers, by the bytes of a number."""


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """The blocks in which a program reads tokens and points.

    Attributes:
      tokens: T.
      count: number of points.
      features: d.
      tile: tokens of a program.
      block: features that are read at once.
      padded: number of points, padded to a power of two.
      precision: precision of the products.
    """

    tokens: int
    count: int
    features: int
    tile: int
    block: int
    padded: int
    precision: Any

    def load(self, ref: Any, rows: jax.Array, limit: int, number: Any) -> jax.Array:
        """Returns a block of features of some rows, zero beyond `limit` rows."""
        column = number * self.block + jnp.arange(self.block)
        mask = (rows < limit)[:, None] & (column < self.features)[None, :]
        shape = (rows.shape[0], column.shape[0])
        place = ref.at[
            jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(column[None, :], shape)
        ]
        return plgpu.load(place, mask=mask, other=0)

    def sum_blocks(self, body: Any, initial: Any) -> Any:
        """Runs `body(block, carry)` over all blocks of features."""
        return jax.lax.fori_loop(0, pl.cdiv(self.features, self.block), body, initial)


def refuses(x: jax.Array, points: jax.Array, *, tolerance: float) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del tolerance
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or x.dtype != points.dtype:
        return f"takes tokens and points of one dtype, not float64: {x.dtype} and {points.dtype}"
    most = MOST_POINTS[x.dtype.itemsize]
    if x.size == 0 or points.shape[0] > most:
        return f"takes up to {most} points of {x.dtype}, got {points.shape[0]} for {x.shape}"
    return None


def point_assignment(
    x: jax.Array, points: jax.Array, *, tolerance: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `actjax.kernels.point_assignment.api.point_assignment`."""
    lead, features = x.shape[:-1], x.shape[-1]
    tokens, count = math.prod(lead), points.shape[0]
    scaled, exponent, inverse_norm = normalized(points, x.dtype)
    # The matrix units take 16 points at least.
    padded = max(16, pl.next_power_of_2(count))
    inverse_norm = jnp.pad(inverse_norm, (0, padded - count))
    tile = {16: 32, 32: 32, 256: 128}.get(padded, 64)
    # The shared memory of a core holds three stages of both operands.
    most = 160_000 // (3 * (tile + padded) * x.dtype.itemsize)
    block = min(128, 2 ** (most.bit_length() - 1), max(16, pl.next_power_of_2(features)))
    precision = tiles.dot_precision(x.dtype, interpret)
    tiling = _Tiling(tokens, count, features, tile, block, padded, precision)
    kernel = functools.partial(_kernel, tiling=tiling, tolerance=tolerance)
    index, alpha, kept = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens, tile),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int8),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if tile * padded > 8192 else 4, num_stages=3
        ),
        interpret=interpret,
        name="actjax_point_assignment",
    )(x.reshape(tokens, features), scaled, inverse_norm)
    alpha = jnp.ldexp(alpha, -exponent[index])
    return index.reshape(lead), alpha.reshape(lead), kept.reshape(lead) != 0


def _kernel(
    x_ref: Any,
    points_ref: Any,
    inverse_norm_ref: Any,
    index_ref: Any,
    alpha_ref: Any,
    kept_ref: Any,
    *,
    tiling: _Tiling,
    tolerance: float,
) -> None:
    row = pl.program_id(0) * tiling.tile + jnp.arange(tiling.tile)
    products, largest = _scores(x_ref, points_ref, row, tiling, with_largest=tolerance < math.inf)
    inverse_norm = inverse_norm_ref[...]
    index = jnp.argmax(jnp.abs(products) * inverse_norm[None, :], axis=1).astype(jnp.int32)
    chosen = index[:, None] == jnp.arange(tiling.padded)[None, :]
    alpha = jnp.sum(
        jnp.where(chosen, products * (inverse_norm * inverse_norm)[None, :], 0.0), axis=1
    )
    if math.isinf(tolerance):
        kept = jnp.full((tiling.tile,), 1, jnp.int8)
    else:
        rest, whole = _squares(x_ref, points_ref, row, tiling, chosen, alpha, largest)
        # A token that is not finite is kept, so that it is seen: it compares as false.
        dropped = jnp.sqrt(rest) > np.float32(tolerance) * jnp.sqrt(whole)
        kept = jnp.where(dropped, 0, 1).astype(jnp.int8)
    for ref, value in ((index_ref, index), (alpha_ref, alpha), (kept_ref, kept)):
        plgpu.store(ref.at[row], value, mask=row < tiling.tokens)


def _scores(
    x_ref: Any, points_ref: Any, row: jax.Array, tiling: _Tiling, *, with_largest: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the products of tokens and points, and the largest magnitude of each token."""
    point = jnp.arange(tiling.padded)

    def add(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        products, largest = carry
        part = tiling.load(x_ref, row, tiling.tokens, i)
        points = tiling.load(points_ref, point, tiling.count, i)
        if with_largest:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(part).astype(jnp.float32), axis=1))
        product = tiles.dot(part, points, trans_b=True, precision=tiling.precision)
        return products + product, largest

    zeros = jnp.zeros((tiling.tile, tiling.padded), jnp.float32)
    return tiling.sum_blocks(add, (zeros, jnp.zeros((tiling.tile,), jnp.float32)))


def _squares(
    x_ref: Any,
    points_ref: Any,
    row: jax.Array,
    tiling: _Tiling,
    chosen: jax.Array,
    alpha: jax.Array,
    largest: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the squared norms of the residual and of the token, divided by `largest²`."""
    point, size = jnp.arange(tiling.padded), jnp.where(largest > 0, largest, 1)

    def add(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        unit = tiling.load(x_ref, row, tiling.tokens, i).astype(jnp.float32) / size[:, None]
        points = tiling.load(points_ref, point, tiling.count, i)
        # A product with ones and zeros selects the chosen rows exactly.
        nearest = tiles.dot(chosen.astype(points.dtype), points, precision=tiling.precision)
        rest = unit - (alpha / size)[:, None] * nearest
        return sums[0] + jnp.sum(rest * rest, axis=1), sums[1] + jnp.sum(unit * unit, axis=1)

    zeros = jnp.zeros((tiling.tile,), jnp.float32)
    return tiling.sum_blocks(add, (zeros, zeros))
