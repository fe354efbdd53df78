"""`rope_encode` into codes of rotated groups, in Triton."""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.triton_call import Call


def refuses(
    inputs: fmt.QuantizeInputs, cos: jax.Array, sin: jax.Array, *, format: fmt.Format
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del cos, sin
    return rotated.refuses_to_encode(inputs, format)


def rope_encode(
    inputs: fmt.QuantizeInputs,
    cos: jax.Array,
    sin: jax.Array,
    *,
    format: fmt.Format,
    into: Any = None,
) -> tuple[jax.Array, fmt.QuantizedCode]:
    """As `actjax.kernels.rope_encode.api.rope_encode`; `into` as for `Computation.compute`."""
    value, *results = launch(inputs, cos, sin, format=format, into=into).run()
    return value.reshape(inputs.x.shape), rotated.code_of(results, inputs, format)


def launch(
    inputs: fmt.QuantizeInputs,
    cos: jax.Array,
    sin: jax.Array,
    *,
    format: fmt.Format,
    into: Any = None,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    arrays, width = rotated.inputs_of(inputs), inputs.x.shape[-1]
    tokens, sequences = math.prod(inputs.x.shape[:-1]), len(arrays[1])
    groups, length = fmt.group_count(width, format.group), tokens // sequences
    # The value is a new array: what follows reads it.
    of_code = rotated.results_of(inputs, format, None if into is None else into[1])
    return Call(
        actjax_rope_encode,
        [*arrays, cos, sin, rotated.matrix_to_encode(format)],
        [jax.ShapeDtypeStruct((tokens, width), inputs.x.dtype), *of_code],
        lambda block: (sequences * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,),
        {
            "LENGTH": length,
            "POSITIONS": cos.shape[0],
            "FEATURES": width,
            "GROUPS": groups,
            "GROUP": format.group,
            "HALF": cos.shape[-1],
            "CODE": rotated.encoding(format, inputs.mean is not None, of_code),
        },
    )


@triton.jit
def actjax_rope_encode(
    layer, x, mean, spread, cos, sin, matrix, held0, held1, held2, held3, held4,
    value, plane0, plane1, scale, offset,
    LENGTH: tl.constexpr, POSITIONS: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    x += start * FEATURES
    value += start * FEATURES
    results = rotated_tiles.results_at(
        (plane0, plane1, scale, offset), tl.load(layer), start, GROUPS, GROUP, CODE
    )
    rotation = rotated_tiles.square(matrix, GROUP)
    column = (group * GROUP + tl.arange(0, GROUP))[None, :]
    exists = column < FEATURES if FEATURES % GROUP else None
    is_first, angle = column // HALF % 2 == 0, column % HALF
    other = tl.where(is_first, column + HALF, column - HALF)
    centre, inverse = rotated_tiles.statistics_at(
        mean, spread, sequence, column, exists, FEATURES, CODE
    )
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        fill = None if mask is None else 0.0
        row = token[:, None] * FEATURES
        stored = tl.load(x + row + column, mask, fill)
        # From the cache.
        opposite = tl.load(x + row + other, mask, fill).to(tl.float32)
        opposite = tl.where(is_first, -opposite, opposite)
        at = (token % POSITIONS)[:, None] * HALF + angle
        turned = stored.to(tl.float32) * tl.load(cos + at, mask).to(tl.float32)
        turned = tl.fma(opposite, tl.load(sin + at, mask).to(tl.float32), turned)
        tl.store(value + row + column, turned.to(value.dtype.element_ty), mask)
        rotated_tiles.write_code(
            stored, centre, inverse, results, rotation, token, live, group, exists,
            GROUPS, GROUP, CODE,
        )  # fmt: skip
