"""`adam_8bit` in one pass, in Triton: moments are decoded, updated and encoded in registers."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from actjax.formats.blockwise import Blockwise, decades
from actjax.kernels import triton_adam, triton_operations, triton_tail
from actjax.kernels.adam_8bit.limits import refuses
from actjax.kernels.layers import Layer, Scaled, result_like, rows, split_scaled, value_of
from actjax.kernels.tail import Tail
from actjax.kernels.triton_call import Call, block_for, step

__all__ = ["adam_8bit", "launch", "refuses", "refuses_tail"]

refuses_tail = triton_tail.refuses


def adam_8bit(
    grad: jax.Array | Scaled,
    mu: Blockwise,
    nu: Blockwise,
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    **hyper: float,
) -> tuple[Any, Blockwise, Blockwise]:
    """As `actjax.kernels.adam_8bit.api.adam_8bit`; a `Layer` is written in its place.

    With a tail its results are in the place of the update.
    """
    results = launch(grad, mu, nu, corrections, tail=tail, **hyper).run()
    shaped = [x.reshape(*grad.shape[:-1], x.shape[-1]) for x in results[:4]]
    new_mu = dataclasses.replace(mu, codes=shaped[0], scales=shaped[1])
    new_nu = dataclasses.replace(nu, codes=shaped[2], scales=shaped[3])
    if tail is None:
        return results[4].reshape(grad.shape), new_mu, new_nu
    return triton_tail.finished(tail, results[4:]), new_mu, new_nu


def launch(
    grad: jax.Array | Scaled,
    mu: Blockwise,
    nu: Blockwise,
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    tokens, features = math.prod(grad.shape[:-1]), grad.shape[-1]
    whole, factors = split_scaled(grad)
    moments = [rows(x) for x in (mu.codes, mu.scales, nu.codes, nu.scales)]
    block, blocks = min(mu.block, features), moments[1].shape[-1]
    width = triton.next_power_of_2(block)
    tile = max(1, block_for("actjax_adam_8bit")["NUMBERS"] // width)
    programs = triton.cdiv(tokens, tile) * blocks
    of_tail = triton_tail.operands(tail, rows, programs)
    results = [*map(result_like, moments), *of_tail.results]
    if tail is None:
        results[4] = jax.ShapeDtypeStruct((tokens, features), jnp.float32)
    return Call(
        actjax_adam_8bit,
        [
            rows(whole),
            *(factors or [jnp.zeros(1)]),
            value_of(corrections),
            *of_tail.arguments,
        ],
        results,
        lambda _: (programs,),
        {
            "ROWS": tokens,
            "FEATURES": features,
            "BLOCK": block,
            "WIDTH": width,
            "BLOCKS": blocks,
            "TILE": tile,
            "GRAD_STEP": step(rows(whole)),
            "SCALED": bool(factors),
            "MOMENTS": tuple((isinstance(x, Layer), step(x)) for x in moments),
            "HYPER": (b1, 1 - b1, b2, 1 - b2, eps, eps_root),
            "TAIL": of_tail.constants,
            "FIRST": _lines(False),
            "SECOND": _lines(True),
        },
        replaced=moments,
    )


Lines = tuple[tuple[float, float], ...]
"""Slopes and intercepts."""


@functools.cache
def _lines(unsigned: bool) -> tuple[Lines, Lines]:
    """Returns the lines of a moment's decades, as `blockwise.dynamic_index` has them.

    A level is a convex function of its index, made of a line for each decade: the largest of all.
    So the index of half a magnitude is the smallest of their inverses.

    Returns:
      levels: from an index to the level, for a scale of 1.
      indices: from half the magnitude to the index.
    """
    top = decades(unsigned)
    power = np.arange(top + 1)
    slope, intercept = 10.0 ** (power - top) * 0.9 / 2.0**power, 10.0 ** (power - top) * -0.8
    intercept += slope
    # The lowest decade has one level, its upper end.
    slope[0], intercept[0] = 10.0**-top, 0.0
    inverse = np.stack([2 / slope, -intercept / slope], axis=1)
    levels = np.stack([slope, intercept], axis=1)
    return tuple(map(tuple, levels.tolist())), tuple(map(tuple, inverse.tolist()))


@triton.jit
def actjax_adam_8bit(
    layer, grad, factor, corrections, m0, m1, m2, m3, m4, m5,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    held0, held1, held2, held3, held4, held5, held6, held7, held8, held9,
    mu, mu_scale, nu, nu_scale, out0, out1, out2, out3, sum0, sum1,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, GRAD_STEP: tl.constexpr, SCALED: tl.constexpr,
    MOMENTS: tl.constexpr, HYPER: tl.constexpr, TAIL: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Some rows of one block of columns."""
    group = tl.program_id(0) % BLOCKS
    row = (tl.program_id(0) // BLOCKS * TILE + tl.arange(0, TILE))[:, None]
    if ROWS * FEATURES >= 2**31:
        row = row.to(tl.int64)
    lane = tl.arange(0, WIDTH)[None, :]
    column = group * BLOCK + lane
    live = row < ROWS if ROWS % TILE else None
    exists = None
    if WIDTH > BLOCK or FEATURES % BLOCK:
        exists = (lane < BLOCK) & (column < FEATURES)
    mask = live if exists is None else exists if live is None else live & exists
    place = row * FEATURES + column
    at = tl.load(layer).to(tl.int64)
    g = triton_adam.gradient(grad + at * GRAD_STEP, factor, place, mask, SCALED)
    mu += at * MOMENTS[0][1]
    nu += at * MOMENTS[2][1]
    of_block = row * BLOCKS + group
    mu_scale += at * MOMENTS[1][1] + of_block
    nu_scale += at * MOMENTS[3][1] + of_block
    first = _moment(
        mu if MOMENTS[0][0] else held0, mu_scale if MOMENTS[1][0] else held1 + of_block,
        place, mask, live, 1.0, triton_operations.of(FIRST, 0),
    )  # fmt: skip
    first = HYPER[0] * first + HYPER[1] * g
    # Its sum does not cancel, so that it may be rounded otherwise than in the definition.
    second = _moment(
        nu if MOMENTS[2][0] else held2, nu_scale if MOMENTS[3][0] else held3 + of_block,
        place, mask, live, HYPER[2], triton_operations.of(SECOND, 0),
    )  # fmt: skip
    second += HYPER[3] * (g * g)
    update = triton_adam.update_of(first, second, corrections, HYPER[4], HYPER[5])
    if TAIL is None:
        tl.store(out0 + place, update, mask)
    else:
        triton_operations.run(
            update, (m0, m1, m2, m3, m4, m5), (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9),
            (out0, out1, out2, out3), (sum0, sum1), at, row, column, place, mask,
            tl.program_id(0), TAIL,
        )  # fmt: skip
    # A block ends after a number of columns that 16 divides, or they are looked at one by one.
    GRAIN: tl.constexpr = 16 if FEATURES % 16 == 0 and BLOCK % 16 == 0 else 1
    end = tl.minimum(BLOCK, FEATURES - group * BLOCK) // GRAIN if exists is not None else None
    _store_moment(
        first, mu + place, mu_scale, mask, live, end, GRAIN, False, triton_operations.of(FIRST, 1)
    )
    _store_moment(
        second, nu + place, nu_scale, mask, live, end, GRAIN, True, triton_operations.of(SECOND, 1)
    )


@triton.jit
def _moment(codes, scale, place, mask, live, FACTOR: tl.constexpr, LINES: tl.constexpr):
    """A decoded moment times a factor."""
    code = tl.load(codes + place, mask, None if mask is None else 0).to(tl.int32)
    # The bits of 1.5 * 2^23 and a whole number.
    index = (code + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    size = tl.abs(index)
    level = size * triton_operations.of(LINES, 0, 0)
    for i in tl.static_range(1, len(LINES)):
        level = tl.maximum(level, _on_line(size, triton_operations.of(LINES, i)))
    if codes.dtype.element_ty == tl.int8:
        sign = index.to(tl.uint32, bitcast=True) & 0x80000000
        level = (level.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return level * (FACTOR * tl.load(scale, live))


@triton.jit
def _store_moment(
    value, codes, scale, mask, live, end, GRAIN: tl.constexpr, UNSIGNED: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Writes a moment, as `Blockwise.encode`; the numbers from `end * GRAIN` on do not exist."""
    size = value if UNSIGNED else tl.abs(value)
    # Integers are in the same order, and a maximum of them does not drop a NaN.
    bits = size.to(tl.uint32, bitcast=True)
    if end is not None:
        # Each thread has some whole grains.
        COUNT: tl.constexpr = bits.shape[1] // GRAIN
        bits = tl.max(tl.reshape(bits, (bits.shape[0], COUNT, GRAIN)), 2)
        bits = tl.where(tl.arange(0, COUNT)[None, :] < end, bits, 0)
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)[:, None]
    # Half of a factor that could overflow.
    size *= 0.5 / tl.maximum(largest, 2.0**-125, propagate_nan=tl.PropagateNan.ALL)
    index = size * triton_operations.of(LINES, 0, 0)
    for i in tl.static_range(1, len(LINES)):
        index = tl.minimum(index, _on_line(size, triton_operations.of(LINES, i)))
    if UNSIGNED:
        # A positive value never becomes zero: it divides the first moment.
        index = tl.where(value > 0, tl.maximum(index, 1.0), 0.0)
    else:
        sign = value.to(tl.uint32, bitcast=True) & 0x80000000
        index = (index.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    code = (index + 12582912.0).to(tl.int32, bitcast=True)
    tl.store(codes, code.to(codes.dtype.element_ty), mask)
    tl.store(scale, largest, live)


@triton.jit
def _on_line(x, LINE: tl.constexpr):
    return tl.fma(x, triton_operations.of(LINE, 0), triton_operations.of(LINE, 1))
