"""The first pass of `adam_4bit`, in Triton: the largest magnitudes of new moments."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats.blockwise import STEP
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels import triton_adam
from actjax.kernels.adam_4bit import triton_moments as moments
from actjax.kernels.adam_4bit.limits import refuses
from actjax.kernels.adam_4bit.reference import TILE
from actjax.kernels.layers import Scaled, split_scaled
from actjax.kernels.triton_call import Call, step

__all__ = ["launch", "maxima", "refuses"]


def maxima(
    grad: jax.Array | Scaled, mu: SignedFourBit, nu: RankOneFourBit | None, **decays: float
) -> tuple[jax.Array, ...]:
    """As `actjax.kernels.adam_4bit.api.MAXIMA`."""
    stack = grad.shape[:-2]
    results = launch(grad, mu, nu, **decays).run()
    return tuple(x.reshape(*stack, *x.shape[1:]) for x in results)


def launch(
    grad: jax.Array | Scaled, mu: SignedFourBit, nu: RankOneFourBit | None, *, b1: float, b2: float
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    *stack, d, n = grad.shape
    count, steps, tiles = math.prod(stack), triton.cdiv(d, STEP), triton.cdiv(n, TILE)
    whole, factors = split_scaled(grad)
    codes = [mu.codes, mu.scales, jnp.zeros(1, jnp.uint8) if nu is None else nu.codes]
    of_nu = [jnp.zeros(1)] * 2 if nu is None else [nu.rows, nu.columns]
    arrays = [whole, *codes, mu.rows, mu.columns, *of_nu]
    shapes = [(count, d, tiles), (count, steps, n)] * 2
    return Call(
        actjax_adam_4bit_maxima,
        [*(factors or [jnp.zeros(1)]), *arrays],
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        lambda _: (count * steps * tiles,),
        {
            "COUNT": count,
            "ROWS": d,
            "FEATURES": n,
            "GROUP": mu.group,
            "TILE": STEP,
            "PARTS": TILE // mu.group,
            "SCALED": bool(factors),
            "STEP": tuple(map(step, arrays)),
            "HYPER": (b1, 1 - b1, b2, 1 - b2),
            "SECOND": "none" if nu is None else "codes",
        },
    )


@triton.jit
def actjax_adam_4bit_maxima(
    layer, factor, grad, mu, mu_scale, nu, mu_row, mu_column, nu_row, nu_column,
    held0, held1, held2, held3, mu_by_row, mu_by_column, nu_by_row, nu_by_column,
    COUNT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, STEP: tl.constexpr,
    HYPER: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Some rows of `PARTS` groups of columns."""
    TILES: tl.constexpr = (FEATURES + PARTS * GROUP - 1) // (PARTS * GROUP)
    STEPS: tl.constexpr = (ROWS + TILE - 1) // TILE
    tile, step = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    matrix = step // STEPS
    row = (step % STEPS * TILE + tl.arange(0, TILE))[:, None]
    live = row < ROWS if ROWS % TILE else None
    if COUNT * ROWS * FEATURES >= 2**31:
        row, matrix, step = row.to(tl.int64), matrix.to(tl.int64), step.to(tl.int64)
    row += matrix * ROWS
    at = tl.load(layer).to(tl.int64)
    grad += at * STEP[0]
    mu += at * STEP[1]
    mu_scale += at * STEP[2]
    nu += at * STEP[3]
    first_row = tl.load(mu_row + at * STEP[4] + row, live)
    second_row = tl.load(nu_row + at * STEP[6] + row, live) if SECOND == "codes" else 0.0
    mu_column += at * STEP[5] + matrix * FEATURES
    nu_column += at * STEP[7] + matrix * FEATURES
    mu_by_column += step * FEATURES
    nu_by_column += step * FEATURES
    firsts = tl.full((TILE,), 0.0, tl.float32)
    seconds = firsts
    GROUPS: tl.constexpr = (FEATURES + GROUP - 1) // GROUP
    lane = tl.arange(0, GROUP // 2)[None, :]
    for part in range(PARTS):
        group = tile * PARTS + part
        exists = group * GROUP + lane < FEATURES if FEATURES % (PARTS * GROUP) else None
        mask = exists if live is None else live if exists is None else live & exists
        byte = (row * GROUPS + group) * (GROUP // 2) + lane
        first_codes = tl.load(mu + byte, mask).to(tl.int32)
        second_codes = tl.load(nu + byte, mask).to(tl.int32) if SECOND == "codes" else 0
        # Groups beyond the last one, whose numbers do not count, have its scale.
        scale = tl.load(mu_scale + row * GROUPS + tl.minimum(group, GROUPS - 1), live)
        for half in tl.static_range(2):
            column = group * GROUP + half * (GROUP // 2) + lane
            exists = column < FEATURES if FEATURES % (PARTS * GROUP) else None
            mask = exists if live is None else live if exists is None else live & exists
            g = triton_adam.gradient(grad, factor, row * FEATURES + column, mask, SCALED)
            scales = tl.load(mu_column + column, exists)
            first = moments.first_moment(
                first_codes, scale, first_row, scales, g, half, HYPER[0], HYPER[1]
            )
            size = tl.abs(first)
            if mask is not None:
                size = tl.where(mask, size, 0.0)
            firsts = _larger(firsts, moments.largest(size, 1))
            tl.store(mu_by_column + column, moments.largest(size, 0)[None, :], exists)
            second = g * g
            if SECOND == "codes":
                second = moments.second_moment(
                    second_codes, second_row, tl.load(nu_column + column, exists), g, half,
                    HYPER[2], HYPER[3], SECOND,
                )  # fmt: skip
            if mask is not None:
                second = tl.where(mask, second, 0.0)
            if SECOND == "codes":
                seconds = _larger(seconds, moments.largest(second, 1))
                of_column = moments.largest(second, 0)
            else:
                seconds += tl.sum(second, 1)
                of_column = tl.sum(second, 0)
            tl.store(nu_by_column + column, of_column[None, :], exists)
    tl.store(mu_by_row + row * TILES + tile, firsts[:, None], live)
    tl.store(nu_by_row + row * TILES + tile, seconds[:, None], live)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
