"""Tiles of rotated groups that are rounded to the nearest level, in programs in Triton.

A program has a tile of tokens of one group. What bounds such a program on a GPU are instructions
and the wait for them, not memory, so that it has few of them, few registers, and few exchanges
between threads:

- The rotation is a product with Hadamard's matrix, which the matrix units compute. Its columns, or
  rows, are in the order of the half bytes of a plane, so that a thread has both halves of a byte.
- The code of a number is a polynomial of it, rounded (`actjax.formats.levels`; with uniform levels
  a linear one): a sum that is cut off at 0 and 1 is one instruction, and adding 1.5 · 2^23 leaves
  the rounded number in the lowest bits.
- Levels come from permutations of bytes, since a table in memory needs an exchange for each number.
- Programs run over several tiles, keep the matrix, and load a tile while they compute another.

It is read by Triton, whose functions take arrays as tiles, and whose loops over tuples are static.
"""

import triton
import triton.language as tl


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
    # Places in a sequence of more than 2^31 numbers; groups have up to 128 of them.
    if LENGTH * GROUPS * 128 >= 2**31:
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
def square(matrix, GROUP: tl.constexpr):
    """The matrix of a rotation, [GROUP, GROUP]."""
    lane = tl.arange(0, GROUP)
    return tl.load(matrix + lane[:, None] * GROUP + lane[None, :])


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
    x, centre, inverse, results, matrix, token, live, group, exists,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Writes the code of a tile [tokens, GROUP]. `CODE` is from `rotated.encoding`."""
    value = x.to(tl.float32)
    if CODE[0]:
        if x.dtype == tl.float32:
            value = (value - centre) * inverse
        else:
            value = tl.fma(value, inverse, -centre * inverse)
        if exists is not None:
            value = tl.where(exists, value, 0.0)
    WIDTHS: tl.constexpr = CODE[2]
    TERMS: tl.constexpr = CODE[3]
    low, high, unit, least = encoded(value.to(tl.bfloat16), matrix, GROUP, CODE[1], TERMS, CODE[4])
    store_planes(low, high, results, token, live, group, GROUPS, WIDTHS)
    store_scale(results[2] + token * GROUPS + group, unit, live)
    if TERMS is None:
        store_scale(results[3] + token * GROUPS + group, least, live)


@triton.jit
def encoded(
    x, matrix, GROUP: tl.constexpr, BITS: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The codes of a tile [tokens, GROUP], int32 in halves, scales and offsets, float32 [tokens].

    `x` is in bfloat16, and only the lowest `BITS` bits of a code are its own. Without `TERMS`,
    levels are uniform, and scales and offsets are rounded to bfloat16 if they are not `WIDE`.
    """
    # The cast is for the interpreter, whose products of bfloat16 are wrong.
    x = tl.dot(x.to(matrix.dtype), matrix)
    # Both are in one thread.
    low, high = tl.split(tl.reshape(x, (x.shape[0], GROUP // 2, 2)))
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


@triton.jit
def code_at(
    arrays, layer, start, sequence, FEATURES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Where a code is, from a token of a layer on: planes, scales, offsets, and statistics.

    `CODE` is from `rotated.operand`, like the arrays.
    """
    WIDTHS: tl.constexpr = CODE[0]
    STEP: tl.constexpr = CODE[3]
    layer = layer.to(tl.int64)
    plane0 = arrays[0] + layer * STEP[0] + start * (GROUPS * GROUP * WIDTHS[0] // 8)
    plane1 = arrays[1] + layer * STEP[1] + start * (GROUPS * GROUP * WIDTHS[-1] // 8)
    scale = arrays[2] + layer * STEP[2] + start * GROUPS
    offset = arrays[3] + layer * STEP[3] + start * GROUPS
    mean = arrays[4] + layer * STEP[4] + sequence * FEATURES
    return plane0, plane1, scale, offset, mean, arrays[5] + layer * STEP[5] + sequence * FEATURES


@triton.jit
def loaded(
    code, first, group, LENGTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The bytes, scales and offsets of a tile of a code that begins at the token `first`.

    Programs load the next tile before they compute the current one. A code with one plane repeats
    it, and a code without offsets repeats its scales, because Triton carries tuples of one form
    through a loop.
    """
    token = first + tl.arange(0, TILE)
    live = token < LENGTH if LENGTH % (TILE * STEPS) else None
    WIDTHS: tl.constexpr = CODE[0]
    first = _load_plane(code[0], token, live, group, GROUPS, GROUP, WIDTHS[0])
    second = first
    if len(WIDTHS) > 1:
        second = _load_plane(code[1], token, live, group, GROUPS, GROUP, WIDTHS[1])
    scale = load_scale(code[2] + token * GROUPS + group, live)
    offset = scale
    if CODE[2] is not None:
        offset = load_scale(code[3] + token * GROUPS + group, live)
    return first, second, scale, offset


@triton.jit
def _load_plane(
    plane, token, live, group, GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr
):
    """Bytes of a plane, [tokens, GROUP // 2], or, of 8 bits a number, [tokens, GROUP]."""
    SIZE: tl.constexpr = GROUP * WIDTH // 8
    row = plane + token[:, None] * (GROUPS * SIZE) + group * SIZE
    mask = None if live is None else live[:, None]
    if WIDTH == 8:
        lane = tl.arange(0, GROUP)
        return tl.load(row + (lane % 2 * (GROUP // 2) + lane // 2)[None, :], mask)
    else:
        return tl.load(row + (tl.arange(0, GROUP // 2) % SIZE)[None, :], mask)


@triton.jit
def decoded(
    tile, code, matrix, group, lane, FEATURES: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr
):
    """The numbers of some columns of a tile of `loaded`, float32 [tokens, columns].

    `lane` has the places of these columns in the group, [1, columns]; the matrix has them only.
    """
    levels = _levels_of(tile, GROUP, CODE)
    # The cast is for the interpreter, whose products of 16-bit floats are wrong.
    x = tl.dot(levels.to(matrix.dtype), matrix)
    x *= (tile[2] * GROUP**-0.5)[:, None]
    if CODE[2] is not None:
        x += tl.where(lane == 0, (tile[3] * (CODE[2] * GROUP**0.5))[:, None], 0.0)
    if CODE[1]:
        # From the cache for each tile: they would take as many registers as all else.
        column = group * GROUP + lane
        exists = column < FEATURES if FEATURES % GROUP else None
        return tl.fma(x, load_scale(code[5] + column, exists), load_scale(code[4] + column, exists))
    else:
        return x


@triton.jit
def _levels_of(tile, GROUP: tl.constexpr, CODE: tl.constexpr):
    """The levels of a tile of `loaded`, float16 [tokens, GROUP], in the order of half bytes.

    First those of the low and of the high four bits of the first byte: both are in one thread.
    """
    WIDTHS: tl.constexpr = CODE[0]
    LOOKUP: tl.constexpr = CODE[4]
    if WIDTHS[0] == 8:
        return _as_float16(tile[0].to(tl.int32))
    else:
        if LOOKUP is not None and WIDTHS[0] == 4:
            low, high = levels_of_bytes(tile[0], LOOKUP)
        else:
            low, high = _halves(tile[0].to(tl.int32), GROUP, WIDTHS[0])
            if len(WIDTHS) > 1:
                low_above, high_above = _halves(tile[1].to(tl.int32), GROUP, WIDTHS[1])
                low, high = low | low_above << WIDTHS[0], high | high_above << WIDTHS[0]
            if LOOKUP is not None:
                low, high = levels_of_bytes((low | high << 4).to(tl.uint8), LOOKUP)
            else:
                low, high = _as_float16(low), _as_float16(high)
        return tl.reshape(tl.join(low, high), (low.shape[0], GROUP))


@triton.jit
def _halves(bits, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The numbers of the low and of the high four bits of bytes."""
    if WIDTH < 4:
        SIZE: tl.constexpr = GROUP * WIDTH // 8
        bits = bits >> (tl.arange(0, GROUP // 2) // SIZE * WIDTH)[None, :]
    return bits & (2**WIDTH - 1), (bits >> 4) & (2**WIDTH - 1)


@triton.jit
def _as_float16(code):
    """Whole numbers from 0 to 255 in float16, from the bits of 1024 and more."""
    return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def levels_of_bytes(code, LOOKUP: tl.constexpr):
    """The levels of the low and of the high four bits of bytes, float16.

    `LOOKUP` is from `rotated.lookup_of_levels`. Triton gives a load from a table another layout,
    with one row for each thread of a warp, so every code would move through shared memory.
    """
    return tl.inline_asm_elementwise(
        LOOKUP, "=r,=r,=r,=r,r", [code], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


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
