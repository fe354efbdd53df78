"""Rotated groups that are rounded to the nearest level, in programs in Triton.

A program has a tile of tokens of one group. What bounds such a program on a GPU are instructions,
not memory, so that it has few of them:

- The rotation is a product with Hadamard's matrix, which the matrix units compute. It is taken in
  halves: the first gives the low four bits of the bytes of a plane, the second the high four, and
  no number moves between threads.
- The code of a number is a polynomial of it, rounded (`actjax.formats.levels`; with uniform levels
  a linear one): a sum that is cut off at 0 and 1 is one instruction, and adding 1.5 · 2^23 leaves
  the rounded number in the lowest bits.
- Programs run over several tiles, and keep the matrix and the statistics of their channels.

It is read by Triton, whose functions take arrays as tiles, and whose loops over tuples are static.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.formats.levels import index_terms, normal_levels
from actjax.formats.packing import PLANES
from actjax.formats.rotation import hadamard, signs_of
from actjax.kernels.layers import rows
from actjax.kernels.triton_call import step

GROUPS = (32, 64, 128, 256)
"""Sizes of a group that are taken: the matrix units multiply at least 16 numbers."""


def refuses(format: fmt.Format) -> str | None:
    """Returns why the programs cannot take codes of a format; None if they can."""
    if not format.rotate or format.rounding != "nearest":
        return "takes rotated groups, rounded to the nearest level"
    if format.group not in GROUPS:
        return f"takes groups of {GROUPS} features, got group={format.group}"
    return None


@functools.cache
def matrix_of(group: int) -> np.ndarray:
    """Returns the matrix that rotates a group, [group, group], of plus and minus one.

    Divided by the root of `group` it is orthogonal.
    """
    return signs_of(group)[:, None] * hadamard(group)


def encoding(format: fmt.Format, balanced: bool, results: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the constants of `write_code` and `results_at`.

    Args:
      format: how numbers are stored.
      balanced: whether there are statistics.
      results: from `results_of`.
    """
    terms = index_terms(format.bits) if format.levels == "normal" else None
    is_wide = format.scale_dtype == "float32"
    return balanced, format.bits, PLANES[format.bits], terms, is_wide, (*map(step, results),)


def inputs_of(inputs: fmt.QuantizeInputs) -> list[Any]:
    """Returns the arrays of `quantize` for a program: tokens [T, d], means, and spreads."""
    statistics = inputs.mean, inputs.spread
    if inputs.mean is None:
        statistics = [jnp.zeros((1, 1), jnp.uint16)] * 2
    return [rows(inputs.x), *map(rows, statistics)]


def results_of(
    inputs: fmt.QuantizeInputs, format: fmt.Format, into: fmt.QuantizedCode | None
) -> list[Any]:
    """Returns the results of a program that writes a code: two planes, scales and offsets.

    The second plane, or the offsets, are a number where a code has none.

    Args:
      inputs: what is encoded.
      format: how.
      into: as for `Computation.compute`.
    """
    tokens, features = math.prod(inputs.x.shape[:-1]), inputs.x.shape[-1]
    groups = fmt.group_count(features, format.group)
    scale_dtype = jnp.float32 if format.scale_dtype == "float32" else jnp.uint16
    sizes = [groups * format.group * width // 8 for width in PLANES[format.bits]]
    shapes = [*((size, jnp.uint8) for size in sizes), *[(groups, scale_dtype)] * 2]
    results: list[Any] = [jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in shapes]
    if into is not None:
        held = (*into.planes, into.scale, into.offset)
        results = [y if z is None else rows(z) for y, z in zip(results, held, strict=True)]
    if len(results) < 4:
        results.insert(1, jax.ShapeDtypeStruct((1, 1), jnp.uint8))
    if format.levels == "normal":
        results[3] = jax.ShapeDtypeStruct((1, 1), scale_dtype)
    return results


def code_of(
    results: Sequence[Any], inputs: fmt.QuantizeInputs, format: fmt.Format
) -> fmt.QuantizedCode:
    """Returns the code that a program has written into `results_of`, without statistics."""
    lead = inputs.x.shape[:-1]
    *planes, scale, offset = results
    return fmt.QuantizedCode(
        planes=tuple(y.reshape(*lead, y.shape[-1]) for y in planes[: len(PLANES[format.bits])]),
        scale=scale.reshape(*lead, scale.shape[-1]),
        features=inputs.x.shape[-1],
        dtype=jnp.dtype(inputs.x.dtype),
        format=format,
        offset=offset.reshape(*lead, offset.shape[-1]) if format.levels == "uniform" else None,
    )


def matrix_to_encode(format: fmt.Format) -> jax.Array:
    """Returns the matrix of `encoded`."""
    return jnp.asarray(matrix_of(format.group), jnp.bfloat16)


def tables_to_decode(format: fmt.Format) -> tuple[jax.Array, jax.Array]:
    """Returns the matrix of `decoded`, and the level of each code."""
    matrix = jnp.asarray(matrix_of(format.group).T, jnp.float16)
    if format.levels == "normal":
        return matrix, jnp.asarray(normal_levels(format.bits))
    return matrix, jnp.arange(2**format.bits, dtype=jnp.float16)


@triton.jit
def place_of_program(
    LENGTH: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr
):
    """The group of a program, its sequence, and the first of its tokens in the sequence.

    Sequences have `LENGTH` tokens. Programs next to each other take groups next to each other.
    """
    PROGRAMS: tl.constexpr = (LENGTH + TILE * STEPS - 1) // (TILE * STEPS)
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    first = program % PROGRAMS * (TILE * STEPS)
    # Places in a sequence of more than 2^31 numbers; groups have up to 256 of them.
    if LENGTH * GROUPS * 256 >= 2**31:
        first = first.to(tl.int64)
    return group, program // PROGRAMS, first


@triton.jit
def mask_of(live, exists):
    """Which numbers of a tile exist, from its tokens and its columns; None for all."""
    mask = exists
    if live is not None:
        mask = live[:, None] if exists is None else live[:, None] & exists
    return mask


@triton.jit
def statistics_at(
    mean, spread, sequence, column, exists, FEATURES: tl.constexpr, CODE: tl.constexpr
):
    """Means and inverse spreads of some columns; zero and one where numbers are not balanced."""
    if CODE[0]:
        place = sequence * FEATURES + column
        return load_scale(mean + place, exists), 1.0 / load_scale(spread + place, exists)
    else:
        return 0.0, 1.0


@triton.jit
def halves_to_encode(matrix, GROUP: tl.constexpr):
    """The halves of the matrix of `write_code`, [GROUP, GROUP // 2]."""
    lane, half = tl.arange(0, GROUP), tl.arange(0, GROUP // 2)
    place = matrix + lane[:, None] * GROUP + half[None, :]
    return tl.load(place), tl.load(place + GROUP // 2)


@triton.jit
def results_at(
    results, layer, start, GROUPS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr
):
    """The results of a code from a token of a layer on: two planes, scales and offsets."""
    WIDTHS: tl.constexpr = CODE[2]
    STEP: tl.constexpr = CODE[5]
    layer = layer.to(tl.int64)
    plane0 = results[0] + layer * STEP[0] + start * (GROUPS * GROUP * WIDTHS[0] // 8)
    plane1 = results[1] + layer * STEP[1]
    if len(WIDTHS) > 1:
        plane1 += start * (GROUPS * GROUP * WIDTHS[-1] // 8)
    scale = results[2] + layer * STEP[2] + start * GROUPS
    return plane0, plane1, scale, results[3] + layer * STEP[3] + start * GROUPS


@triton.jit
def write_code(
    x, centre, inverse, results, low_matrix, high_matrix, token, live, group, exists,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Writes the code of a tile [tokens, GROUP]. `CODE` is from `encoding`."""
    value = x.to(tl.float32)
    if CODE[0]:
        if x.dtype == tl.float32:
            value = (value - centre) * inverse
        else:
            value = tl.fma(value, inverse, -centre * inverse)
        if exists is not None:
            value = tl.where(exists, value, 0.0)
    low, high, unit, least = encoded(
        value.to(tl.bfloat16), low_matrix, high_matrix, GROUP, CODE[1], CODE[3], CODE[4]
    )
    store_planes(low, high, results, token, live, group, GROUPS, CODE[2])
    store_scale(results[2] + token * GROUPS + group, unit, live)
    if CODE[3] is None:
        store_scale(results[3] + token * GROUPS + group, least, live)


@triton.jit
def encoded(
    x, low_matrix, high_matrix, GROUP: tl.constexpr, BITS: tl.constexpr, TERMS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The codes of a tile [tokens, GROUP], int32 in halves, scales and offsets, float32 [tokens].

    `x` is in bfloat16, and only the lowest `BITS` bits of a code are its own. Without `TERMS`,
    levels are uniform, and scales and offsets are rounded to bfloat16 if they are not `WIDE`.
    """
    # The cast is for the interpreter, whose products of bfloat16 are wrong.
    x = x.to(low_matrix.dtype)
    low, high = tl.dot(x, low_matrix), tl.dot(x, high_matrix)
    if TERMS is None:
        TOP: tl.constexpr = 2**BITS - 1
        UNIT: tl.constexpr = GROUP**-0.5
        # GPUs drop a NaN from a maximum, but a rotation has it everywhere.
        least = tl.min(tl.minimum(low, high), 1) * UNIT
        largest = tl.max(tl.maximum(low, high), 1) * UNIT
        offset = _rounded(least, False, WIDE)
        scale = _rounded((largest - offset) / TOP, True, WIDE)
        inverse = tl.where(scale > 0, 1.0 / (TOP * scale), 0.0)
        start = (-offset * inverse)[:, None]
        inverse = (inverse * UNIT)[:, None]
        low = tl.fma(low, inverse, start)
        high = tl.fma(high, inverse, start)
    else:
        squares = tl.sum(tl.fma(low, low, high * high), 1)
        # Sums that overflow or lose digits, which ordinary numbers never have.
        extreme = (squares < 1e-30) | (squares > 1e36)
        factor = tl.where(extreme, tl.where(squares < 1.0, 2.0**64, 2.0**-64), 1.0)
        if tl.max(extreme.to(tl.int32), 0) > 0:
            low, high = low * factor[:, None], high * factor[:, None]
            squares = tl.sum(tl.fma(low, low, high * high), 1)
        inverse = tl.where(squares > 0, GROUP**0.5 * tl.rsqrt(squares), 0.0)[:, None]
        scale = tl.sqrt(squares) * (1.0 / GROUP) / factor
        offset = scale
        low, high = _place(low * inverse, TERMS), _place(high * inverse, TERMS)
    return _codes(low, BITS), _codes(high, BITS), scale, offset


@triton.jit
def _place(x, TERMS: tl.constexpr):
    """The place among the codes, from 0 to 1, of numbers over the root mean square of a group."""
    square = x * x
    slope = tl.fma(tl.fma(square, TERMS[2], TERMS[1]), square, TERMS[0])
    return tl.fma(x, slope, 0.5)


@triton.jit
def _codes(place, BITS: tl.constexpr):
    """The codes of places, in the lowest bits."""
    place = tl.minimum(tl.maximum(place, 0.0), 1.0)
    return tl.fma(place, 2.0**BITS - 1, 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _rounded(x, UP: tl.constexpr, WIDE: tl.constexpr):
    """Scales as stored, rounded up, or offsets, rounded down: `actjax.formats.scales`."""
    if WIDE:
        return x
    nearest = x.to(tl.bfloat16).to(tl.float32)
    size = tl.abs(x)
    if UP:
        moved = (x + size * 2.0**-8).to(tl.bfloat16).to(tl.float32)
        return tl.where(nearest - x < size * -(2.0**-20), moved, nearest)
    else:
        moved = (x - size * 2.0**-8).to(tl.bfloat16).to(tl.float32)
        return tl.where(nearest > x, moved, nearest)


@triton.jit
def store_planes(low, high, planes, token, live, group, GROUPS: tl.constexpr, WIDTHS: tl.constexpr):
    """Writes the bits of codes to each of their planes, [tokens, GROUPS * bytes of a group]."""
    _store_plane(low, high, planes[0], token, live, group, GROUPS, WIDTHS[0])
    if len(WIDTHS) > 1:
        low, high = low >> WIDTHS[0], high >> WIDTHS[0]
        _store_plane(low, high, planes[1], token, live, group, GROUPS, WIDTHS[1])


@triton.jit
def _store_plane(low, high, plane, token, live, group, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    HALF: tl.constexpr = low.shape[1]
    SIZE: tl.constexpr = HALF * WIDTH // 4
    row = plane + token[:, None] * (GROUPS * SIZE) + group * SIZE
    mask = None if live is None else live[:, None]
    if WIDTH == 8:
        column = tl.arange(0, HALF)[None, :]
        tl.store(row + column, low.to(tl.uint8), mask)
        tl.store(row + HALF + column, high.to(tl.uint8), mask)
    else:
        bits = (low & (2**WIDTH - 1)) | (high & (2**WIDTH - 1)) << 4
        if WIDTH < 4:
            # Parts of a half share bytes.
            bits = bits << (tl.arange(0, HALF) // SIZE * WIDTH)[None, :]
            bits = tl.sum(tl.reshape(bits, (low.shape[0], HALF // SIZE, SIZE)), 1)
        tl.store(row + tl.arange(0, SIZE)[None, :], bits.to(tl.uint8), mask)


def sequences(code: fmt.QuantizedCode) -> int:
    """Returns the number of sequences that have their own statistics; 1 without any."""
    return 1 if code.mean is None else code.mean.size // code.features


def operand(code: fmt.QuantizedCode) -> tuple[list[Any], tuple[Any, ...]]:
    """Returns the arrays of a code for `code_at`, and its constants."""
    planes, none = [rows(x) for x in code.planes], jnp.zeros((1, 1), jnp.uint16)
    others = (code.scale, code.offset, code.mean, code.spread)
    arrays = [*planes, none][:2] + [none if x is None else rows(x) for x in others]
    # Offsets of all rotated numbers are one number, where the matrix has a column of ones.
    first = None if code.offset is None else float(signs_of(code.format.group)[0])
    return arrays, (PLANES[code.format.bits], code.mean is not None, first, (*map(step, arrays),))


@triton.jit
def code_at(
    arrays, layer, start, sequence, group, FEATURES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """What `decoded` reads of a code, from a token on: planes, scales, offsets, and statistics.

    `CODE` is from `operand`, like the arrays.
    """
    WIDTHS: tl.constexpr = CODE[0]
    STEP: tl.constexpr = CODE[3]
    layer = layer.to(tl.int64)
    plane0 = arrays[0] + layer * STEP[0] + start * (GROUPS * GROUP * WIDTHS[0] // 8)
    plane1 = arrays[1] + layer * STEP[1] + start * (GROUPS * GROUP * WIDTHS[-1] // 8)
    scale = arrays[2] + layer * STEP[2] + start * GROUPS
    offset = arrays[3] + layer * STEP[3] + start * GROUPS
    mean, spread = 0.0, 0.0
    if CODE[1]:
        column = group * GROUP + tl.arange(0, GROUP)[None, :]
        exists = column < FEATURES if FEATURES % GROUP else None
        place = sequence * FEATURES + column
        mean = load_scale(arrays[4] + layer * STEP[4] + place, exists)
        spread = load_scale(arrays[5] + layer * STEP[5] + place, exists)
    return plane0, plane1, scale, offset, mean, spread


@triton.jit
def halves_to_decode(matrix, GROUP: tl.constexpr):
    """The halves of the matrix of `decoded`, [GROUP // 2, GROUP]."""
    half, lane = tl.arange(0, GROUP // 2), tl.arange(0, GROUP)
    place = matrix + half[:, None] * GROUP + lane[None, :]
    return tl.load(place), tl.load(place + GROUP * GROUP // 2)


@triton.jit
def decoded(
    code, levels, low_matrix, high_matrix, token, live, group, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """The numbers of a tile of a code, float32 [tokens, GROUP]."""
    WIDTHS: tl.constexpr = CODE[0]
    low, high = _load_plane(code[0], token, live, group, GROUPS, GROUP, WIDTHS[0])
    if len(WIDTHS) > 1:
        low_above, high_above = _load_plane(code[1], token, live, group, GROUPS, GROUP, WIDTHS[1])
        low, high = low | low_above << WIDTHS[0], high | high_above << WIDTHS[0]
    # Registers cannot be indexed, but the cache answers such loads.
    x = tl.dot(tl.load(levels + low).to(low_matrix.dtype), low_matrix)
    x = tl.dot(tl.load(levels + high).to(high_matrix.dtype), high_matrix, x)
    x *= (load_scale(code[2] + token * GROUPS + group, live) * GROUP**-0.5)[:, None]
    if CODE[2] is not None:
        offset = load_scale(code[3] + token * GROUPS + group, live) * (CODE[2] * GROUP**0.5)
        x += tl.where((tl.arange(0, GROUP) == 0)[None, :], offset[:, None], 0.0)
    return tl.fma(x, code[5], code[4]) if CODE[1] else x


@triton.jit
def _load_plane(
    plane, token, live, group, GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr
):
    HALF: tl.constexpr = GROUP // 2
    SIZE: tl.constexpr = HALF * WIDTH // 4
    lane = tl.arange(0, HALF)
    row = plane + token[:, None] * (GROUPS * SIZE) + group * SIZE
    mask = None if live is None else live[:, None]
    if WIDTH == 8:
        low = tl.load(row + lane[None, :], mask).to(tl.int32)
        high = tl.load(row + HALF + lane[None, :], mask).to(tl.int32)
        return low, high
    else:
        bits = tl.load(row + (lane % SIZE)[None, :], mask).to(tl.int32)
        if WIDTH < 4:
            bits = bits >> (lane // SIZE * WIDTH)[None, :]
        return bits & (2**WIDTH - 1), (bits >> 4) & (2**WIDTH - 1)


@triton.jit
def sigmoid(x):
    """The logistic function."""
    # The square of an inverse root is two instructions, an inverse more than twice as many.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def load_scale(place, mask):
    """Stored scales or statistics, float32: as such, or as the bits of bfloat16."""
    stored = tl.load(place, mask)
    if stored.dtype == tl.uint16:
        return stored.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return stored


@triton.jit
def store_scale(place, scale, mask):
    """Writes scales as `load_scale` reads them."""
    if place.dtype.element_ty == tl.uint16:
        tl.store(place, scale.to(tl.bfloat16).to(tl.uint16, bitcast=True), mask)
    else:
        tl.store(place, scale, mask)
