"""`point_assignment` in one pass: scores stay in registers, and the best of each token leaves."""

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
"""Scores of a tile of tokens with so many points fit the registers, by the bytes of a number."""


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
    # Three stages of both operands, of which the shared memory of a core holds so many bytes.
    most = 160_000 // (3 * (tile + padded) * x.dtype.itemsize)
    block = min(128, 2 ** (most.bit_length() - 1), max(16, pl.next_power_of_2(features)))
    kernel = functools.partial(
        _kernel,
        tokens=tokens,
        count=count,
        features=features,
        tile=tile,
        block=block,
        tolerance=tolerance,
        precision=tiles.dot_precision(x.dtype, interpret),
    )
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
    tokens: int,
    count: int,
    features: int,
    tile: int,
    block: int,
    tolerance: float,
    precision: Any,
) -> None:
    padded = inverse_norm_ref.shape[0]
    row = pl.program_id(0) * tile + jnp.arange(tile)
    point = jnp.arange(padded)
    blocks = pl.cdiv(features, block)

    def columns(i: Any) -> jax.Array:
        return i * block + jnp.arange(block)

    def tile_of(ref: Any, rows: jax.Array, limit: int, column: jax.Array) -> jax.Array:
        mask = (rows < limit)[:, None] & (column < features)[None, :]
        shape = (rows.shape[0], column.shape[0])
        place = ref.at[
            jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(column[None, :], shape)
        ]
        return plgpu.load(place, mask=mask, other=0)

    dot = functools.partial(plgpu.dot, precision=precision)

    def score(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        products, largest = carry
        part = tile_of(x_ref, row, tokens, columns(i))
        points = tile_of(points_ref, point, count, columns(i))
        if not math.isinf(tolerance):
            largest = jnp.maximum(largest, jnp.max(jnp.abs(part).astype(jnp.float32), axis=1))
        return products + dot(part, points, trans_b=True), largest

    zeros = jnp.zeros((tile,), jnp.float32)
    products, largest = jax.lax.fori_loop(
        0, blocks, score, (jnp.zeros((tile, padded), jnp.float32), zeros)
    )
    inverse_norm = inverse_norm_ref[...]
    index = jnp.argmax(jnp.abs(products) * inverse_norm[None, :], axis=1).astype(jnp.int32)
    chosen = index[:, None] == point[None, :]
    alpha = jnp.sum(
        jnp.where(chosen, products * (inverse_norm * inverse_norm)[None, :], 0.0), axis=1
    )
    if math.isinf(tolerance):
        kept = jnp.full((tile,), 1, jnp.int8)
    else:
        size = jnp.where(largest > 0, largest, 1)

        def measure(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            unit = tile_of(x_ref, row, tokens, columns(i)).astype(jnp.float32) / size[:, None]
            points = tile_of(points_ref, point, count, columns(i))
            # A product with ones and zeros takes the chosen rows, exactly.
            nearest = dot(chosen.astype(points.dtype), points)
            rest = unit - (alpha / size)[:, None] * nearest
            return sums[0] + jnp.sum(rest * rest, axis=1), sums[1] + jnp.sum(unit * unit, axis=1)

        rest, whole = jax.lax.fori_loop(0, blocks, measure, (zeros, zeros))
        kept = (jnp.sqrt(rest) <= np.float32(tolerance) * jnp.sqrt(whole)).astype(jnp.int8)
    for ref, value in ((index_ref, index), (alpha_ref, alpha), (kept_ref, kept)):
        plgpu.store(ref.at[row], value, mask=row < tokens)
