"""`rope_decode` of rotated groups, in Triton."""

import math

import jax
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.dequantize import triton as dequantize
from actjax.kernels.layers import value_of
from actjax.kernels.triton_call import Call


def refuses(code: QuantizedCode, cos: jax.Array, sin: jax.Array) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del sin
    if code.format.group % (2 * cos.shape[-1]):
        return f"takes heads within groups of {code.format.group}, got {2 * cos.shape[-1]} numbers"
    return dequantize.refuses(code)


def rope_decode(code: QuantizedCode, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `actjax.kernels.rope_decode.api.rope_decode`."""
    (x,) = launch(code, cos, sin).run()
    return x.reshape(*code.planes[0].shape[:-1], code.features)


def launch(code: QuantizedCode, cos: jax.Array, sin: jax.Array) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    tokens, group = math.prod(code.planes[0].shape[:-1]), code.format.group
    groups = group_count(code.features, group)
    arrays, constants = rotated.operand(code)
    length, half = tokens // rotated.sequences(code), cos.shape[-1]
    return Call(
        actjax_rope_decode,
        [
            *arrays,
            rotated.matrix_to_decode(code.format),
            value_of(cos),
            value_of(sin),
        ],
        [jax.ShapeDtypeStruct((tokens, code.features), code.dtype)],
        lambda block: (
            tokens // length * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,
        ),
        {
            "LENGTH": length,
            "POSITIONS": cos.shape[0],
            "FEATURES": code.features,
            "GROUPS": groups,
            "GROUP": group,
            "HALF": half,
            "X": constants,
        },
    )


@triton.jit
def actjax_rope_decode(
    layer, plane0, plane1, scale, offset, mean, spread, matrix, cos, sin, held, x,
    LENGTH: tl.constexpr, POSITIONS: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, X: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group: its pairs are two tiles."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start, at = sequence.to(tl.int64) * LENGTH, tl.load(layer)
    code = rotated_tiles.code_at(
        (plane0, plane1, scale, offset, mean, spread), at, start, sequence, FEATURES, GROUPS, GROUP,
        X,
    )  # fmt: skip
    # The matrix decides which numbers a product gives: no number moves to its partner.
    pair = tl.arange(0, GROUP // 2)[None, :]
    lane = pair // HALF * (2 * HALF) + pair % HALF
    rows = matrix + tl.arange(0, GROUP)[:, None] * GROUP + lane
    rotation1, rotation2 = tl.load(rows), tl.load(rows + HALF)
    column = group * GROUP + lane
    exists = column < FEATURES if FEATURES % GROUP else None
    x += start * FEATURES
    tile = rotated_tiles.loaded(code, first, group, LENGTH, GROUPS, GROUP, X, TILE, STEPS)
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        x1 = rotated_tiles.decoded(tile, code, rotation1, group, lane, FEATURES, GROUP, X)
        x2 = rotated_tiles.decoded(tile, code, rotation2, group, lane + HALF, FEATURES, GROUP, X)
        # The last tile loads the first one again, which is in the cache.
        after = first + (i + 1) % STEPS * TILE
        tile = rotated_tiles.loaded(code, after, group, LENGTH, GROUPS, GROUP, X, TILE, STEPS)
        # The decoded numbers are rounded, as they are where they are written.
        x1 = x1.to(x.dtype.element_ty).to(tl.float32)
        x2 = x2.to(x.dtype.element_ty).to(tl.float32)
        mask = rotated_tiles.mask_of(live, exists)
        angle = (token % POSITIONS)[:, None] * HALF + pair % HALF
        c, s = tl.load(cos + angle, mask).to(tl.float32), tl.load(sin + angle, mask).to(tl.float32)
        place = x + token[:, None] * FEATURES + column
        tl.store(place, (x1 * c - x2 * s).to(x.dtype.element_ty), mask)
        tl.store(place + HALF, (x2 * c + x1 * s).to(x.dtype.element_ty), mask)
