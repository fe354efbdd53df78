"""`quantize` with rotation and normal levels, written by hand in Triton.

What limits the Pallas program are instructions, and most of them compare and select, at half the
rate of a multiplication. This one differs in three ways:

- A group of 16 B numbers is B tiles of 16 columns. The matrix units multiply each tile by the
  Hadamard matrix of 16, and sums and differences of whole tiles do the other `log2 B` steps of the
  fast transform: no number moves between threads. The matrix units round to 11 bits, so a number is
  cut in two: that keeps all bits of a 16-bit number, and 22 of a balanced or a float32 one.
- The nearest level is a polynomial of the magnitude, which passes through `i - 1/2` at the bound
  below level `i`, rounded to an integer. A level is a polynomial of its index.
- The scale of a group is divided once for a token, and not for each number.

The last group of an odd size, such as 85 of 5,461 features, has its own branch of the same program.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.formats.levels import normal_levels
from actjax.formats.packing import PLANES
from actjax.formats.rotation import signs_row
from actjax.kernels import limits
from actjax.kernels.triton_call import Call, choices

COLUMNS = 16
"""Columns of a tile, the least that the matrix units take."""
GROUPS = (64, 128, 256)
"""Sizes of a group that are taken: 4, 8 or 16 tiles."""
CHOICES = choices((16, 2), (32, 2), (32, 4), (64, 8))


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    if not format.rotate or format.levels != "normal" or inputs.channels is not None:
        return "takes rotated groups with normal levels"
    narrowest = 8 // PLANES[format.bits][-1]
    if format.group not in GROUPS or format.group // COLUMNS < narrowest:
        return f"takes groups of {GROUPS}, got group={format.group} of {format.bits} bits"
    features = inputs.x.shape[-1]
    tail = features % format.group
    if features < format.group or (tail and tail % 2 == 0):
        return f"takes whole groups, and a last one of an odd size, got {features} features"
    return limits.refuses([format], inputs.x.dtype, inputs.x.shape)


def quantize(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    *planes, scales = launch(inputs, format=format).run()
    x, lead = inputs.x, inputs.x.shape[:-1]
    return fmt.QuantizedCode(
        planes=tuple(plane.reshape(*lead, -1) for plane in planes[: len(PLANES[format.bits])]),
        scale=scales.reshape(*lead, -1),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
    )


def launch(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> Call:
    """Returns the launch of the program for arguments that it does not refuse.

    It writes two planes, the second of them a byte that is not used if a code has one plane, and
    scales.
    """
    x = inputs.x
    features, group, planes = x.shape[-1], format.group, PLANES[format.bits]
    rows = math.prod(x.shape[:-1])
    groups, tail = divmod(features, group)
    signs = signs_row(features, group)
    # The signs of a whole group again for each.
    factor = jnp.concatenate([jnp.tile(signs[:, :group], groups), signs[:, group:]], axis=1)
    means = jnp.zeros((1, 1), jnp.float32)
    if inputs.mean is not None:
        means, spreads = (
            y.view(format.scale_dtype).astype(jnp.float32).reshape(-1, features)
            for y in (inputs.mean, inputs.spread)
        )
        factor = factor / spreads
    scale_dtype = jnp.float32 if format.scale_dtype == "float32" else jnp.uint16
    scales = jax.ShapeDtypeStruct((rows, groups + (tail > 0)), scale_dtype)
    index, level = polynomials(format.bits)
    return Call(
        actjax_quantize_rotated,
        [x.reshape(rows, features), means, factor],
        [*_plane_shapes(rows, features, planes), scales],
        lambda meta: (triton.cdiv(rows, meta["TILE"]) * (groups + (tail > 0)),),
        {
            "ROWS": rows,
            "FEATURES": features,
            "GROUPS": groups,
            "TAIL": tail,
            "TILES": group // COLUMNS,
            "BITS": format.bits,
            "WIDTH": planes,
            "SEQUENCE": rows // factor.shape[0],
            "BALANCED": inputs.mean is not None,
            "WIDE": format.scale_dtype == "float32",
            "TOP": float(normal_levels(format.bits)[-1]),
            "INDEX": index,
            "LEVEL": level,
        },
        CHOICES,
    )


def _plane_shapes(rows: int, features: int, widths: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of two planes; the second is a byte if there is one width."""
    sizes = [(rows, -(-features * width // 8)) for width in widths] + [(1, 1)]
    return [jax.ShapeDtypeStruct(size, jnp.uint8) for size in sizes[:2]]


@functools.cache
def polynomials(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the coefficients of two polynomials, lowest power first.

    The first, of a magnitude between 0 and the largest level, rounds to the index of the nearest
    level. The second, of that index less half of their number, is that level.
    """
    levels = normal_levels(bits)[2 ** (bits - 1) :]
    bounds = (levels[1:] + levels[:-1]) / 2
    # A point at zero too, since the first must not round to -1 there.
    places = np.concatenate([[0.0], bounds])
    values = np.concatenate([[-0.49], np.arange(len(bounds)) + 0.5])
    index = np.linalg.solve(np.vander(places, increasing=True), values)
    index_less_half = np.arange(len(levels)) - len(levels) // 2
    level = np.linalg.solve(np.vander(index_less_half, increasing=True), levels)
    return tuple(map(float, index)), tuple(map(float, level))


@triton.jit
def actjax_quantize_rotated(
    x, mean, factor, plane0, plane1, scale,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, TAIL: tl.constexpr,
    TILES: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, SEQUENCE: tl.constexpr,
    BALANCED: tl.constexpr, WIDE: tl.constexpr, TOP: tl.constexpr, INDEX: tl.constexpr,
    LEVEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One group of a tile of tokens. Programs next to each other take groups next to each other."""
    planes = (plane0, plane1)
    ALL: tl.constexpr = GROUPS + (TAIL > 0)
    group = tl.program_id(0) % ALL
    row = (tl.program_id(0) // ALL).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = row < ROWS
    start = group * (TILES * 16)
    if group < GROUPS:
        # The tiles below each other: one load, and one operand of the matrix units.
        place = tl.arange(0, TILES * TILE)
        token = (tl.program_id(0) // ALL).to(tl.int64) * TILE + place % TILE
        column = (start + place // TILE * 16)[:, None] + tl.arange(0, 16)[None, :]
        values = _read(
            x, mean, factor, token, column, (token < ROWS)[:, None], FEATURES, SEQUENCE, BALANCED
        )
        units, ratio, stored = _fit(
            _rotate(values, TILES), None, TILES * 16, TILES * 16, BITS, WIDE, TOP, INDEX, LEVEL
        )
        codes = ()
        for b in tl.static_range(TILES):
            codes += (_code(units[b], ratio, BITS, TOP, INDEX),)
        for number in tl.static_range(len(WIDTH)):
            packed = _joined(_packed_tiles(codes, WIDTH[number], WIDTH[0] if number else 0))
            byte = start * WIDTH[number] // 8 + tl.arange(0, TILES * 2 * WIDTH[number])
            place = row[:, None] * ((FEATURES * WIDTH[number] + 7) // 8) + byte[None, :]
            tl.store(planes[number] + place, packed.to(tl.uint8), live[:, None])
        _store_scale(scale + row * ALL + group, stored, live, WIDE)
    elif TAIL > 0:
        for number in tl.static_range(len(WIDTH)):
            _tail(
                x, mean, factor, planes[number], scale + row * ALL + group, row, live, start,
                FEATURES, TAIL, BITS, WIDTH[number], WIDTH[0] if number else 0, SEQUENCE, BALANCED,
                WIDE, TOP, INDEX, LEVEL,
            )  # fmt: skip


@triton.jit
def _tail(
    x, mean, factor, plane, scale, row, live, start,
    FEATURES: tl.constexpr, TAIL: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, SEQUENCE: tl.constexpr, BALANCED: tl.constexpr, WIDE: tl.constexpr,
    TOP: tl.constexpr, INDEX: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """A plane of the last group, in as many slices as a byte has codes, and its scale."""
    SLICE: tl.constexpr = (TAIL * WIDTH + 7) // 8
    lane = tl.arange(0, triton.next_power_of_2(SLICE))
    values, exist = (), ()
    for i in tl.static_range(8 // WIDTH):
        place = i * SLICE + lane
        exists = (lane < SLICE) & (place < TAIL)
        values += (
            _read(x, mean, factor, row, (start + place)[None, :], live[:, None] & exists[None, :],
                  FEATURES, SEQUENCE, BALANCED),
        )  # fmt: skip
        exist += (exists,)
    units, ratio, stored = _fit(values, exist, TAIL, 1, BITS, WIDE, TOP, INDEX, LEVEL)
    codes = ()
    for i in tl.static_range(8 // WIDTH):
        code = _code(units[i], ratio, BITS, TOP, INDEX)
        codes += (tl.where(exist[i][None, :], code, 0),)
    packed = _packed_tiles(codes, WIDTH, SHIFT)[0]
    wide: tl.constexpr = (FEATURES * WIDTH + 7) // 8
    place = row[:, None] * wide + (start * WIDTH // 8 + lane)[None, :]
    tl.store(plane + place, packed.to(tl.uint8), live[:, None] & (lane < SLICE)[None, :])
    _store_scale(scale, stored, live, WIDE)


@triton.jit
def _read(
    x, mean, factor, row, column, live, FEATURES: tl.constexpr, SEQUENCE: tl.constexpr,
    BALANCED: tl.constexpr,
):  # fmt: skip
    """Numbers of each token, balanced and with the signs of the rotation, float32."""
    value = tl.load(x + row[:, None] * FEATURES + column, live, 0).to(tl.float32)
    if not BALANCED:
        return value * tl.load(factor + column, column < FEATURES, 0)
    place = (row // SEQUENCE)[:, None] * FEATURES + column
    return (value - tl.load(mean + place, live, 0)) * tl.load(factor + place, live, 0)


@triton.jit
def _rotate(values, TILES: tl.constexpr):
    """Tiles times Sylvester's matrix, which is not yet divided by the root of its size.

    They come below each other, [TILES n, 16], and leave as a tuple of [n, 16].
    """
    common = tl.arange(0, 16)[:, None] & tl.arange(0, 16)[None, :]
    common ^= common >> 2
    common ^= common >> 1
    matrix = 1.0 - 2.0 * (common & 1).to(tl.float32)
    # The upper 11 bits and the rest.
    upper = (values.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    product = tl.dot(upper, matrix, input_precision="tf32")
    product = tl.dot(values - upper, matrix, product, input_precision="tf32")
    parts = (product,)
    for step in tl.static_range(4):
        if (1 << step) < TILES:
            halves = ()
            for b in tl.static_range(1 << step):
                upper_half, lower_half = _halves(parts[b])
                halves += (upper_half + lower_half, upper_half - lower_half)
            parts = halves
    return parts


@triton.jit
def _halves(x):
    """The first and the last rows."""
    half: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(x, (2, half, x.shape[1])), (1, 2, 0)))


@triton.jit
def _fit(
    values, exist, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    TOP: tl.constexpr, INDEX: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """Fits a scale to a group, as `actjax.formats.scales.fit`.

    The numbers to store are the given ones over `sqrt(BLOCK)`. Returns the given ones times a power
    of two; the factor from these to multiples of the scale; and the scale as stored, float32.
    """
    # Tiles are summed up, and then their columns: that is one exchange between threads, not many.
    most = tl.abs(values[0])
    for b in tl.static_range(len(values) - 1):
        most = tl.maximum(most, tl.abs(values[b + 1]))
    # A power of two by which no square overflows. Unlike a quotient it is exact.
    exponent = 254 - (tl.max(most, 1).to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 247)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    squares, units = tl.zeros_like(most), ()
    for b in tl.static_range(len(values)):
        units += (values[b] * power[:, None],)
        squares += units[b] * units[b]
    deviation = tl.sqrt_rn(tl.sum(squares, 1) * (1.0 / SIZE))
    inverse = tl.where(deviation == 0, 1.0, tl.div_rn(1.0, deviation))
    products, squares = tl.zeros_like(most), tl.zeros_like(most)
    for b in tl.static_range(len(values)):
        level = _level(tl.abs(units[b]) * inverse[:, None], BITS, TOP, INDEX, LEVEL)
        if exist is not None:
            level = tl.where(exist[b][None, :], level, 0.0)
        products += tl.abs(units[b]) * level
        squares += level * level
    fitted = tl.div_rn(tl.sum(products, 1), tl.sum(squares, 1))
    # The ratio of a number to store to its unit.
    part = tl.div_rn(1.0 / BLOCK**0.5, power)
    stored = fitted * part
    if not WIDE:
        # Rounded to the upper half of its bits, and ties to even. The NaN of a GPU has all bits
        # set, and would overflow to zero.
        bits = stored.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        stored = tl.where(stored == stored, bits.to(tl.float32, bitcast=True), stored)
    return units, tl.where(stored == 0, part, tl.div_rn(part, stored)), stored


@triton.jit
def _level(size, BITS: tl.constexpr, TOP: tl.constexpr, INDEX: tl.constexpr, LEVEL: tl.constexpr):
    """The nearest level to a magnitude."""
    if BITS == 1:
        return tl.full(size.shape, TOP, tl.float32)
    return _polynomial(_number(size, TOP, INDEX) - (12582912.0 + 2 ** (BITS - 2)), LEVEL)


@triton.jit
def _code(unit, ratio, BITS: tl.constexpr, TOP: tl.constexpr, INDEX: tl.constexpr):
    """The code of the nearest level."""
    half = tl.where(unit > 0, 2 ** (BITS - 1), 2 ** (BITS - 1) - 1)
    if BITS == 1:
        return half
    number = _number(tl.abs(unit) * ratio[:, None], TOP, INDEX).to(tl.int32, bitcast=True)
    # From the middle up, or from the code below the middle down.
    return (number & (2 ** (BITS - 1) - 1)) ^ half


@triton.jit
def _number(size, TOP: tl.constexpr, INDEX: tl.constexpr):
    """The index of the nearest level to a magnitude, plus 1.5 2^23: it is in the last bits."""
    return _polynomial(tl.minimum(size, TOP), INDEX) + 12582912.0


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr):
    LAST: tl.constexpr = len(COEFFICIENTS) - 1
    value = tl.zeros_like(x) + COEFFICIENTS[LAST]
    for i in tl.static_range(LAST):
        value = value * x + COEFFICIENTS[LAST - 1 - i]
    return value


@triton.jit
def _store_scale(place, scale, live, WIDE: tl.constexpr):
    if WIDE:
        tl.store(place, scale, live)
    else:
        tl.store(place, (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16), live)


@triton.jit
def _packed_tiles(codes, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Tiles of bytes, from tiles of codes: the codes of a byte are in tiles far apart."""
    COUNT: tl.constexpr = len(codes) * WIDTH // 8
    packed = ()
    for first in tl.static_range(COUNT):
        byte = (codes[first] >> SHIFT) & (2**WIDTH - 1)
        for i in tl.static_range(8 // WIDTH - 1):
            code = (codes[first + (i + 1) * COUNT] >> SHIFT) & (2**WIDTH - 1)
            byte |= code << ((i + 1) * WIDTH)
        packed += (byte,)
    return packed


@triton.jit
def _joined(parts):
    """Tiles [n, 16] next to each other, [n, 16 B]."""
    COUNT: tl.constexpr = len(parts)
    if COUNT == 1:
        return parts[0]
    elif COUNT == 2:
        return _flat(tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1)))
    elif COUNT == 4:
        halves = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return _flat(tl.permute(halves, (0, 2, 3, 1)))
    else:
        low = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        high = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return _flat(tl.permute(tl.join(low, high), (0, 2, 3, 4, 1)))


@triton.jit
def _flat(x):
    return tl.reshape(x, (x.shape[0], x.numel // x.shape[0]))
