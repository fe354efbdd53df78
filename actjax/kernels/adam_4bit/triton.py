"""The second pass of `adam_4bit`, in Triton: moments are decoded, updated and encoded."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats.blockwise import inverse_of
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels import triton_adam, triton_operations, triton_tail
from actjax.kernels.adam_4bit import triton_moments as moments
from actjax.kernels.adam_4bit.limits import refuses
from actjax.kernels.adam_4bit.reference import Second
from actjax.kernels.layers import Layer, Scaled, result_like, rows, split_scaled, value_of
from actjax.kernels.tail import Tail
from actjax.kernels.triton_call import Call, block_for, step

__all__ = ["adam_4bit", "launch", "refuses", "refuses_tail"]

refuses_tail = triton_tail.refuses


def adam_4bit(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: Second,
    scales: tuple[jax.Array, ...],
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    **hyper: float,
) -> tuple[Any, SignedFourBit, RankOneFourBit | None]:
    """As `actjax.kernels.adam_4bit.reference.adam_4bit`; a `Layer` is written in its place.

    With a tail its results are in the place of the update.
    """
    results = launch(grad, mu, nu, scales, corrections, tail=tail, **hyper).run()
    shaped = [x.reshape(*grad.shape[:-1], x.shape[-1]) for x in results[:2]]
    new_mu = dataclasses.replace(
        mu, codes=shaped[0], scales=shaped[1], rows=scales[0], columns=scales[1]
    )
    new_nu = None
    if isinstance(nu, RankOneFourBit):
        codes = results[2].reshape(*grad.shape[:-1], results[2].shape[-1])
        new_nu = dataclasses.replace(nu, codes=codes, rows=scales[2], columns=scales[3])
    if tail is None:
        return results[3].reshape(grad.shape), new_mu, new_nu
    return triton_tail.finished(tail, results[3:]), new_mu, new_nu


def launch(
    grad: jax.Array | Scaled,
    mu: SignedFourBit,
    nu: Second,
    scales: tuple[jax.Array, ...],
    corrections: jax.Array,
    *,
    tail: Tail | None = None,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    *stack, d, n = grad.shape
    count, has_codes = math.prod(stack), isinstance(nu, RankOneFourBit)
    whole, factors = split_scaled(grad)
    dummy = jnp.zeros((1, 1), jnp.uint8)
    replaced = [*map(rows, (mu.codes, mu.scales)), rows(nu.codes) if has_codes else dummy]
    # A second moment that has no codes has no new scales, and those of the first are not read.
    # Inverse here: a program would divide for each number.
    new = [inverse_of(value_of(x)) for x in [*scales, *scales][:4]]
    read = [rows(whole), mu.rows, mu.columns, nu.rows, nu.columns, *new]
    most = block_for("actjax_adam_4bit")["NUMBERS"] // mu.group
    tile = min(max(1, most), triton.next_power_of_2(d))
    programs = count * triton.cdiv(d, tile) * triton.cdiv(n, mu.group)
    # Each half of the bytes has its own sums.
    of_tail = triton_tail.operands(tail, rows, 2 * programs)
    results = [*map(result_like, replaced), *of_tail.results]
    if tail is None:
        results[3] = jax.ShapeDtypeStruct((count * d, n), jnp.float32)
    return Call(
        actjax_adam_4bit,
        [
            *(factors or [jnp.zeros(1)]),
            value_of(corrections),
            *read,
            *of_tail.arguments,
        ],
        results,
        lambda _: (programs,),
        {
            "COUNT": count,
            "ROWS": d,
            "FEATURES": n,
            "GROUP": mu.group,
            "TILE": tile,
            "SCALED": bool(factors),
            "STEP": tuple(map(step, read)),
            "MOMENTS": tuple((isinstance(x, Layer), step(x)) for x in replaced),
            "HYPER": (b1, 1 - b1, b2, 1 - b2, eps, eps_root),
            "STOCHASTIC": (mu.stochastic, has_codes and nu.stochastic),
            "SECOND": "codes" if has_codes else "means",
            "TAIL": of_tail.constants,
        },
        replaced=replaced,
    )


@triton.jit
def actjax_adam_4bit(
    layer, factor, corrections, grad, mu_row, mu_column, nu_row, nu_column,
    mu_row_inverse, mu_column_inverse, nu_row_inverse, nu_column_inverse, m0, m1, m2, m3, m4, m5,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    held0, held1, held2, held3, held4, held5, held6, held7, held8,
    mu, mu_scale, nu, out0, out1, out2, out3, sum0, sum1,
    COUNT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, STEP: tl.constexpr, MOMENTS: tl.constexpr,
    HYPER: tl.constexpr, STOCHASTIC: tl.constexpr, SECOND: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Some rows of one group of columns."""
    GROUPS: tl.constexpr = (FEATURES + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (ROWS + TILE - 1) // TILE
    group, step = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    matrix = step // STEPS
    row = (step % STEPS * TILE + tl.arange(0, TILE))[:, None]
    live = row < ROWS if ROWS % TILE else None
    if COUNT * ROWS * FEATURES >= 2**31:
        row, matrix = row.to(tl.int64), matrix.to(tl.int64)
    row += matrix * ROWS
    at = tl.load(layer).to(tl.int64)
    mu += at * MOMENTS[0][1]
    mu_scale += at * MOMENTS[1][1]
    nu += at * MOMENTS[2][1]
    byte = (row * GROUPS + group) * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    of_group = row * GROUPS + group
    old = tl.load((mu if MOMENTS[0][0] else held0) + byte, live).to(tl.int32)
    scale = tl.load((mu_scale if MOMENTS[1][0] else held1) + of_group, live)
    second = 0
    if SECOND == "codes":
        second = tl.load((nu if MOMENTS[2][0] else held2) + byte, live).to(tl.int32)
    rows = (
        tl.load(mu_row + at * STEP[1] + row, live),
        tl.load(nu_row + at * STEP[3] + row, live),
        tl.load(mu_row_inverse + at * STEP[5] + row, live),
        tl.load(nu_row_inverse + at * STEP[7] + row, live),
    )
    first_column = matrix * FEATURES
    columns = (
        mu_column + at * STEP[2] + first_column,
        nu_column + at * STEP[4] + first_column,
        mu_column_inverse + at * STEP[6] + first_column,
        nu_column_inverse + at * STEP[8] + first_column,
    )
    operands = (
        (m0, m1, m2, m3, m4, m5), (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9),
        (out0, out1, out2, out3), (sum0, sum1),
    )  # fmt: skip
    grad += at * STEP[0]
    low, low_offset, low_second = _updated(
        grad, factor, corrections, old, scale, second, rows, columns, operands, at, row,
        live, group, 0, FEATURES, GROUP, SCALED, HYPER, STOCHASTIC, SECOND, TAIL,
    )  # fmt: skip
    high, high_offset, high_second = _updated(
        grad, factor, corrections, old, scale, second, rows, columns, operands, at, row,
        live, group, 1, FEATURES, GROUP, SCALED, HYPER, STOCHASTIC, SECOND, TAIL,
    )  # fmt: skip
    if SECOND == "codes":
        tl.store(nu + byte, (low_second | high_second << 4).to(tl.uint8), live)
    scale = tl.maximum(
        moments.largest(tl.abs(low), 1), moments.largest(tl.abs(high), 1),
        propagate_nan=tl.PropagateNan.ALL,
    )[:, None] * 0.25  # fmt: skip
    tl.store(mu_scale + of_group, scale, live)
    inverse = moments.inverse_of(scale) * 0.0625
    low = _signed_code(low, inverse, low_offset)
    tl.store(mu + byte, (low | _signed_code(high, inverse, high_offset) << 4).to(tl.uint8), live)


@triton.jit
def _updated(
    grad, factor, corrections, first, scale, second, rows, columns, operands, at, row, live,
    group, HALF: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
    HYPER: tl.constexpr, STOCHASTIC: tl.constexpr, SECOND: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Writes the update of a half of the bytes, and returns what its codes are made of.

    Returns:
      Four times the first moment over the scales of rows and columns, what is added before its
      index is rounded, and the index of the second moment.
    """
    column = group * GROUP + HALF * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    exists = column < FEATURES if FEATURES % GROUP else None
    mask = exists if live is None else live if exists is None else live & exists
    place = row * FEATURES + column
    g = triton_adam.gradient(grad, factor, place, mask, SCALED)
    first = moments.first_moment(
        first, scale, rows[0], tl.load(columns[0] + column, exists), g, HALF,
        HYPER[0], HYPER[1],
    )  # fmt: skip
    second = moments.second_moment(
        second, rows[1], tl.load(columns[1] + column, exists), g, HALF, HYPER[2], HYPER[3], SECOND
    )
    update = triton_adam.update_of(first, second, corrections, HYPER[4], HYPER[5])
    if TAIL is None:
        tl.store(operands[2][0] + place, update, mask)
    else:
        triton_operations.run(
            update, operands[0], operands[1], operands[2], operands[3], at, row, column, place,
            mask, 2 * tl.program_id(0) + HALF, TAIL,
        )  # fmt: skip
    inverse = tl.load(columns[2] + column, exists)
    scaled = first * tl.maximum(rows[2], inverse, propagate_nan=tl.PropagateNan.ALL)
    index = 0
    if SECOND == "codes":
        inverse = tl.load(columns[3] + column, exists)
        size = second * tl.maximum(rows[3], inverse, propagate_nan=tl.PropagateNan.ALL) * 4.0
        offset = moments.fraction_of_hash(second) if STOCHASTIC[1] else 0.5
        index = (size + offset).to(tl.int32) - 1
        index = tl.minimum(tl.maximum(index, 0), 15)
    if exists is not None:
        scaled = tl.where(exists, scaled, 0.0)
        index = tl.where(exists, index, 0)
    return scaled, moments.fraction_of_hash(first) if STOCHASTIC[0] else 0.5, index


@triton.jit
def _signed_code(scaled, inverse, offset):
    """The codes of first moments, as `four_bit.signed_index`."""
    size = tl.abs(scaled) * inverse
    index = (tl.minimum(size * 10.0, size * 5.0 + 2.0) + offset).to(tl.int32)
    index = tl.minimum(index, 7)
    return tl.where(scaled < 0, -index, index) & 15
