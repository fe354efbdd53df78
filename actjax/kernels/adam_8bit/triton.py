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
            *map(jnp.asarray, _tables()),
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
        },
        replaced=moments,
    )


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the level of each code for a scale of 1, and the lines of `blockwise.dynamic_index`.

    Returns:
      levels: of the codes -128 to 127 of `mu`, and 0 to 255 of `nu`.
      lines: [3, 2, 256, 2], of `mu` and of `nu`, the two lines that the index of a magnitude can be
        on, by the exponent of half the magnitude: slope for the half, and intercept. A NaN may have
        a sign, with which it reads what is behind its own.
    """
    signed, unsigned = np.arange(-128, 128), np.arange(256)
    levels = [np.sign(signed) * _levels(abs(signed), decades(False))]
    levels.append(_levels(unsigned, decades(True)))
    lines = np.zeros((3, 2, 256, 2))
    # Magnitudes are up to 1, so that other exponents are those of infinity and of no number.
    least = 2.0 ** (np.arange(127) - 126)
    for of_moment, top in zip(lines[:2], (decades(False), decades(True)), strict=True):
        count = 2.0 ** np.arange(top, -1, -1)
        slope = 10.0 ** np.arange(top + 1) * count / 0.9
        intercept = count - 1 - count / 9
        # The last decade has one level, its upper end.
        slope[-1], intercept[-1] = 10.0**top, 0.0
        for of_end, end in zip(of_moment, (least, 2 * least), strict=True):
            decade = np.clip(np.floor(-np.log10(end)), 0, top).astype(int)
            of_end[:127] = np.stack([2 * slope[decade], intercept[decade]], axis=1)
    return np.float32(np.concatenate(levels)), np.float32(lines)


def _levels(index: np.ndarray, top: int) -> np.ndarray:
    """Returns the magnitude of levels, as documented by `blockwise.dynamic_index`."""
    power = np.floor(np.log2(np.maximum(index, 1)))
    fraction = 0.1 + 0.9 * ((index + 1) / 2**power - 1)
    return np.where(index > 0, 10.0 ** (power - top) * fraction, 0.0)


@triton.jit
def actjax_adam_8bit(
    layer, grad, factor, corrections, levels, lines, m0, m1, m2, m3, m4, m5,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    held0, held1, held2, held3, held4, held5, held6, held7, held8, held9,
    mu, mu_scale, nu, nu_scale, out0, out1, out2, out3, sum0, sum1,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, GRAD_STEP: tl.constexpr, SCALED: tl.constexpr,
    MOMENTS: tl.constexpr, HYPER: tl.constexpr, TAIL: tl.constexpr,
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
        place, mask, live, levels + 128, 1.0,
    )  # fmt: skip
    first = HYPER[0] * first + HYPER[1] * g
    # Its sum does not cancel, so that it may be rounded otherwise than in the definition.
    second = _moment(
        nu if MOMENTS[2][0] else held2, nu_scale if MOMENTS[3][0] else held3 + of_block,
        place, mask, live, levels + 256, HYPER[2],
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
    _store_moment(first, mu + place, mu_scale, mask, live, end, lines, GRAIN, False)
    _store_moment(second, nu + place, nu_scale, mask, live, end, lines + 4 * 256, GRAIN, True)


@triton.jit
def _moment(codes, scale, place, mask, live, levels, FACTOR: tl.constexpr):
    """A decoded moment times a factor; `levels` begin with that of the lowest code."""
    code = tl.load(codes + place, mask, None if mask is None else 0).to(tl.int32)
    # Registers cannot be indexed, but the cache answers such loads.
    return tl.load(levels + code) * (FACTOR * tl.load(scale, live))


@triton.jit
def _store_moment(
    value, codes, scale, mask, live, end, lines, GRAIN: tl.constexpr, UNSIGNED: tl.constexpr
):
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
    lines = lines.to(tl.pointer_type(tl.int64), bitcast=True)
    lines += size.to(tl.uint32, bitcast=True) >> 23
    index = tl.minimum(_on_line(size, tl.load(lines)), _on_line(size, tl.load(lines + 256)))
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
def _on_line(x, line):
    """A point of a line, whose slope and intercept are the bits of one number."""
    slope = line.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.fma(x, slope, (line >> 32).to(tl.int32).to(tl.float32, bitcast=True))
