"""`point_assignment`, written by hand in Triton.

Where the Pallas program multiplies by a matrix of ones and zeros to find the chosen points again,
for a tolerance, this one reads them by their index. It takes any number of stages of loads.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.kernels.point_assignment.reference import normalized
from actjax.kernels.triton_call import Call, choices

MOST_POINTS = {2: 256, 4: 128}
"""Largest number of points whose scores fit the registers, by the bytes of a number."""


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
    x: jax.Array, points: jax.Array, *, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `actjax.kernels.point_assignment.api.point_assignment`."""
    index, alpha, kept = launch(x, points, tolerance=tolerance).run()
    alpha = jnp.ldexp(alpha, -normalized(points, x.dtype)[1][index])
    lead = x.shape[:-1]
    return index.reshape(lead), alpha.reshape(lead), kept.reshape(lead) != 0


def launch(x: jax.Array, points: jax.Array, *, tolerance: float) -> Call:
    """Returns the launch. It writes indices, coefficients of the scaled points, and a mask."""
    features, rows, count = x.shape[-1], math.prod(x.shape[:-1]), points.shape[0]
    scaled, _, inverse_norm = normalized(points, x.dtype)
    padded = max(16, triton.next_power_of_2(count))
    # Shared memory holds the stages of both operands; registers hold the scores.
    block = min(64 if x.dtype.itemsize == 4 else 128, max(16, triton.next_power_of_2(features)))
    # Blocks whose numbers fit the registers.
    blocks = ((16, 2), (32, 4), (64, 8))
    if padded >= 128 and x.dtype.itemsize == 4:
        blocks, block = ((64, 8),), min(block, 32)
    elif padded >= 128:
        blocks, block = ((32, 4), (64, 8)), min(block, 64)
    elif math.isinf(tolerance):
        blocks = ((16, 2), (32, 4), (64, 4))
    return Call(
        actjax_point_assignment,
        [x.reshape(rows, features), scaled, inverse_norm],
        [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.int8)],
        lambda meta: (triton.cdiv(rows, meta["TILE"]),),
        {
            "ROWS": rows,
            "FEATURES": features,
            "COUNT": count,
            "PADDED": padded,
            "BLOCK": block,
            "TOLERANCE": -1.0 if math.isinf(tolerance) else tolerance,
            # The matrix units keep all bits of 16-bit numbers, and 11 of others: then three
            # products of parts of the numbers.
            "PRECISION": "tf32x3",
        },
        [choice for stages in (2, 4) for choice in choices(*blocks, stages=stages)],
    )


@triton.jit
def actjax_point_assignment(
    x, points, inverse_norm, index, alpha, kept,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TOLERANCE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens. A negative tolerance keeps all of them."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    point, column = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    products = tl.zeros((TILE, PADDED), tl.float32)
    most = tl.zeros((TILE, BLOCK), tl.float32)
    for first in tl.range(0, FEATURES, BLOCK):
        live = (first + column < FEATURES)[None, :]
        place = row[:, None] * FEATURES + (first + column)[None, :]
        tokens = tl.load(x + place, live & (row < ROWS)[:, None], 0)
        # Transposed: features by points.
        place = point[None, :] * FEATURES + (first + column)[:, None]
        mask = (first + column < FEATURES)[:, None] & (point < COUNT)[None, :]
        products = tl.dot(
            tokens, tl.load(points + place, mask, 0), products, input_precision=PRECISION
        )
        if TOLERANCE >= 0:
            most = tl.maximum(most, tl.abs(tokens.to(tl.float32)))
    norm = tl.load(inverse_norm + point, point < COUNT, 0)
    # All scores of a token with a NaN are NaN, and the largest is at any place.
    chosen = tl.minimum(tl.argmax(tl.abs(products) * norm[None, :], axis=1), COUNT - 1)
    is_chosen = chosen[:, None] == point[None, :]
    factor = tl.sum(tl.where(is_chosen, products * (norm * norm)[None, :], 0.0), 1)
    live = row < ROWS
    tl.store(index + row, chosen, live)
    tl.store(alpha + row, factor, live)
    fits = tl.full((TILE,), 1, tl.int8)
    if TOLERANCE >= 0:
        size = tl.max(most, 1)
        size = tl.where(size > 0, size, 1.0)
        rest, whole = tl.zeros((TILE, BLOCK), tl.float32), tl.zeros((TILE, BLOCK), tl.float32)
        for first in tl.range(0, FEATURES, BLOCK):
            mask = (first + column < FEATURES)[None, :] & live[:, None]
            place = row[:, None] * FEATURES + (first + column)[None, :]
            unit = tl.load(x + place, mask, 0).to(tl.float32) / size[:, None]
            place = chosen[:, None] * FEATURES + (first + column)[None, :]
            nearest = tl.load(points + place, mask, 0).to(tl.float32)
            apart = unit - (factor / size)[:, None] * nearest
            rest += apart * apart
            whole += unit * unit
        # A token that is not finite is kept, so that it is seen: it compares as false.
        dropped = tl.sqrt(tl.sum(rest, 1)) > TOLERANCE * tl.sqrt(tl.sum(whole, 1))
        fits = tl.where(dropped, 0, 1).to(tl.int8)
    tl.store(kept + row, fits, live)
