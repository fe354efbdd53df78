"""`dequantize` of rotated groups, in Triton."""

import math

import jax
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import limits, rotated, rotated_tiles
from actjax.kernels.triton_call import Call


def refuses(code: QuantizedCode) -> str | None:
    """Returns why the program cannot take a code; None if it can."""
    if code.channels is not None:
        return "takes no outlier channels"
    shape = (*code.planes[0].shape[:-1], code.features)
    return rotated.refuses(code.format) or limits.refuses_array(code.dtype, shape)


def dequantize(code: QuantizedCode) -> jax.Array:
    """As `actjax.kernels.dequantize.api.dequantize`."""
    (x,) = launch(code).run()
    return x.reshape(*code.planes[0].shape[:-1], code.features)


def launch(code: QuantizedCode) -> Call:
    """Returns the launch of the program for a code that it does not refuse."""
    tokens = math.prod(code.planes[0].shape[:-1])
    groups = group_count(code.features, code.format.group)
    arrays, constants = rotated.operand(code)
    length = tokens // rotated.sequences(code)
    return Call(
        actjax_dequantize,
        [*arrays, rotated.matrix_to_decode(code.format)],
        [jax.ShapeDtypeStruct((tokens, code.features), code.dtype)],
        lambda block: (
            tokens // length * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,
        ),
        {
            "LENGTH": length,
            "FEATURES": code.features,
            "GROUPS": groups,
            "GROUP": code.format.group,
            "X": constants,
        },
    )


@triton.jit
def actjax_dequantize(
    layer, plane0, plane1, scale, offset, mean, spread, matrix, held, x,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    X: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    code = rotated_tiles.code_at(
        (plane0, plane1, scale, offset, mean, spread), tl.load(layer), start, sequence, FEATURES,
        GROUPS, GROUP, X,
    )  # fmt: skip
    rotation = rotated_tiles.square(matrix, GROUP)
    lane = tl.arange(0, GROUP)[None, :]
    column = group * GROUP + lane
    exists = column < FEATURES if FEATURES % GROUP else None
    x += start * FEATURES
    tile = rotated_tiles.loaded(code, first, group, LENGTH, GROUPS, GROUP, X, TILE, STEPS)
    for i in range(STEPS):
        value = rotated_tiles.decoded(tile, code, rotation, group, lane, FEATURES, GROUP, X)
        # The last tile loads the first one again, which is in the cache.
        after = first + (i + 1) % STEPS * TILE
        tile = rotated_tiles.loaded(code, after, group, LENGTH, GROUPS, GROUP, X, TILE, STEPS)
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        tl.store(x + token[:, None] * FEATURES + column, value.to(x.dtype.element_ty), mask)
