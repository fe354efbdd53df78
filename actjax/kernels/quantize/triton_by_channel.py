"""`quantize` with scales by channel and channels that stay whole, written by hand in Triton.

A program of a tile of tokens copies the whole channels, which it reads where they are, and the
programs next to it write codes. So none of these asks for the place of a channel in the copy, as
the Pallas program does for each number.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from actjax.kernels import coded, tiles
from actjax.kernels import format as fmt
from actjax.kernels.packing import PLANES
from actjax.kernels.quantize.triton_planes import packed_tiles, plane_shapes
from actjax.kernels.triton_call import Call, choices

CHOICES = choices((32, 2), (64, 4), (128, 4), (128, 8))


def refuses(x: jax.Array, seed: Any, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    if seed is not None or format.rotate or format.levels != "uniform":
        return "rounds to the nearest uniform level by channel, without rotation"
    return coded.refuses([format], x.dtype, x.shape)


def launch(
    x: jax.Array,
    channels: jax.Array | None,
    scale: jax.Array,
    centre: jax.Array | None,
    format: fmt.Format,
) -> Call:
    """Returns the launch. It writes two planes, and the whole channels."""
    features, rows = x.shape[-1], math.prod(x.shape[:-1])
    planes, count = PLANES[format.bits], 0 if channels is None else channels.shape[0]
    index = channels if channels is not None and count else jnp.zeros((1,), jnp.int32)
    whole = jax.ShapeDtypeStruct((rows, count) if count else (1, 1), x.dtype)
    groups, tail = divmod(features, format.group)
    programs = groups + (tail > 0) + (count > 0)
    return Call(
        actjax_quantize_by_channel,
        [x.reshape(rows, features), by_channel(features, channels, scale, centre), index],
        [*plane_shapes(rows, features, planes), whole],
        lambda meta: (triton.cdiv(rows, meta["TILE"]) * programs,),
        {
            "ROWS": rows,
            "FEATURES": features,
            "GROUP": format.group,
            "GROUPS": groups,
            "TAIL": tail,
            "COUNT": count,
            "BITS": format.bits,
            "WIDTH": planes,
        },
        CHOICES,
    )


def by_channel(
    features: int, channels: jax.Array | None, scale: jax.Array, centre: jax.Array | None
) -> jax.Array:
    """Returns what is known of each channel, float32 [4, d].

    One if it is encoded and zero if it stays whole; the middle of its levels; and two factors whose
    product is the inverse of its scale, as `actjax._math.division.over` has them.
    """
    encoded = jnp.ones((features,), jnp.float32)
    if channels is not None:
        encoded = encoded.at[channels].set(0)
    wide = tiles.as_float(scale)
    small = jnp.where(wide < 2.0**-64, np.float32(2.0**64), np.float32(1))
    factor = jnp.where(wide > 2.0**64, np.float32(2.0**-64), small)
    inverse = 1 / jnp.where(wide > 0, wide * factor, 1)
    middle = jnp.zeros_like(wide) if centre is None else tiles.as_float(centre)
    return jnp.stack([encoded, middle, factor, inverse])


@triton.jit
def actjax_quantize_by_channel(
    x, known, channels, plane0, plane1, whole,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TAIL: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A group of a tile of tokens, or its whole channels."""
    planes = (plane0, plane1)
    CODED: tl.constexpr = GROUPS + (TAIL > 0)
    ALL: tl.constexpr = CODED + (COUNT > 0)
    part = tl.program_id(0) % ALL
    row = ((tl.program_id(0) // ALL).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    if part < GROUPS:
        _codes(x, known, planes, row, part * GROUP, ROWS, FEATURES, GROUP, BITS, WIDTH)
    elif part < CODED:
        if TAIL > 0:
            _codes(x, known, planes, row, part * GROUP, ROWS, FEATURES, TAIL, BITS, WIDTH)
    elif COUNT > 0:
        place = tl.arange(0, triton.next_power_of_2(COUNT))[None, :]
        channel = tl.load(channels + place, place < COUNT, 0)
        live = (row < ROWS) & (place < COUNT)
        value = tl.load(x + row * FEATURES + channel, live)
        tl.store(whole + row * COUNT + place, value, live)


@triton.jit
def _codes(
    x, known, planes, row, start, ROWS: tl.constexpr, FEATURES: tl.constexpr, SIZE: tl.constexpr,
    BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The planes of a group."""
    for number in tl.static_range(len(WIDTH)):
        _plane(
            x, known, planes[number], row, start, ROWS, FEATURES, SIZE, BITS, WIDTH[number],
            WIDTH[0] if number else 0,
        )  # fmt: skip


@triton.jit
def _plane(
    x, known, plane, row, start, ROWS: tl.constexpr, FEATURES: tl.constexpr, SIZE: tl.constexpr,
    BITS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A plane of a group, in as many slices as a byte has codes."""
    SLICE: tl.constexpr = (SIZE * WIDTH + 7) // 8
    lane = tl.arange(0, triton.next_power_of_2(SLICE))[None, :]
    codes = ()
    for i in tl.static_range(8 // WIDTH):
        place = i * SLICE + lane
        exists = (lane < SLICE) & (place < SIZE)
        code = _code(x, known, row, start + place, exists, ROWS, FEATURES, BITS)
        codes += (tl.where(exists, code, 0),)
    packed = packed_tiles(codes, WIDTH, SHIFT)[0]
    to = plane + row * ((FEATURES * WIDTH + 7) // 8) + start * WIDTH // 8 + lane
    tl.store(to, packed.to(tl.uint8), (row < ROWS) & (lane < SLICE))


@triton.jit
def _code(
    x, known, row, column, exists, ROWS: tl.constexpr, FEATURES: tl.constexpr, BITS: tl.constexpr
):
    """The codes of numbers, int32."""
    value = tl.load(x + row * FEATURES + column, (row < ROWS) & exists, 0).to(tl.float32)
    encoded = tl.load(known + column, exists, 0)
    middle = tl.load(known + FEATURES + column, exists, 0)
    factor = tl.load(known + 2 * FEATURES + column, exists, 0)
    inverse = tl.load(known + 3 * FEATURES + column, exists, 0)
    value = (tl.where(encoded != 0, value, 0.0) - middle) * factor * inverse
    position = tl.minimum(tl.maximum(value + (2**BITS - 1) / 2, 0.0), 2.0**BITS - 1)
    return (position + 8388608.0).to(tl.int32, bitcast=True) & (2**BITS - 1)
