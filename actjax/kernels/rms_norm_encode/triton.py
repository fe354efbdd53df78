"""`rms_norm_encode` into codes of rotated groups, in Triton."""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.triton_call import Call


def refuses(
    inputs: fmt.QuantizeInputs, scale: jax.Array, *, format: fmt.Format, eps: float
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del scale, eps
    return rotated.refuses_to_encode(inputs, format)


def rms_norm_encode(
    inputs: fmt.QuantizeInputs,
    scale: jax.Array,
    *,
    format: fmt.Format,
    eps: float,
    into: Any = None,
) -> tuple[jax.Array, fmt.QuantizedCode]:
    """As `rms_norm_encode` of the module `api`; `into` as for `Computation.compute`."""
    value, *results = launch(inputs, scale, format=format, eps=eps, into=into).run()
    return value.reshape(inputs.x.shape), rotated.code_of(results, inputs, format)


def launch(
    inputs: fmt.QuantizeInputs,
    scale: jax.Array,
    *,
    format: fmt.Format,
    eps: float,
    into: Any = None,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    arrays, width = rotated.inputs_of(inputs), inputs.x.shape[-1]
    tokens, sequences = math.prod(inputs.x.shape[:-1]), len(arrays[1])
    length = tokens // sequences
    # The value is a new array: what follows reads it.
    of_code = rotated.results_of(inputs, format, None if into is None else into[1])
    return Call(
        actjax_rms_norm_encode,
        [*arrays, scale, rotated.matrix_to_encode(format)],
        [jax.ShapeDtypeStruct((tokens, width), inputs.x.dtype), *of_code],
        lambda block: (sequences * triton.cdiv(length, block["TILE"]),),
        {
            "LENGTH": length,
            "FEATURES": width,
            "GROUPS": fmt.group_count(width, format.group),
            "GROUP": format.group,
            "EPS": eps,
            "CODE": rotated.encoding(format, inputs.mean is not None, of_code),
        },
    )


@triton.jit
def actjax_rms_norm_encode(
    layer, x, mean, spread, scale, matrix, held0, held1, held2, held3, held4,
    value, plane0, plane1, unit, offset,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    EPS: tl.constexpr, CODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some tokens of a sequence, all of their groups: first their sums, then values and codes."""
    _, sequence, first = rotated_tiles.place_of_program(LENGTH, 1, TILE, 1)
    start = sequence.to(tl.int64) * LENGTH
    x += start * FEATURES
    value += start * FEATURES
    results = rotated_tiles.results_at(
        (plane0, plane1, unit, offset), tl.load(layer), start, GROUPS, GROUP, CODE
    )
    rotation = rotated_tiles.square(matrix, GROUP)
    token = first + tl.arange(0, TILE)
    if LENGTH * FEATURES >= 2**31:
        token = token.to(tl.int64)
    live = token < LENGTH if LENGTH % TILE else None
    lane = tl.arange(0, GROUP)
    # Added up along rows after the loop, since that is many instructions.
    squares = tl.zeros((TILE, GROUP), tl.float32)
    for group in range(GROUPS):
        column = (group * GROUP + lane)[None, :]
        exists = column < FEATURES if FEATURES % GROUP else None
        mask = rotated_tiles.mask_of(live, exists)
        place = token[:, None] * FEATURES + column
        numbers = tl.load(x + place, mask, None if mask is None else 0.0).to(tl.float32)
        squares = tl.fma(numbers, numbers, squares)
    root = tl.rsqrt(tl.sum(squares, 1)[:, None] * (1.0 / FEATURES) + EPS)
    for group in range(GROUPS):
        column = (group * GROUP + lane)[None, :]
        exists = column < FEATURES if FEATURES % GROUP else None
        mask = rotated_tiles.mask_of(live, exists)
        place = token[:, None] * FEATURES + column
        # From the cache.
        stored = tl.load(x + place, mask, None if mask is None else 0.0)
        factor = tl.load(scale + column, exists).to(tl.float32)
        numbers = stored.to(tl.float32) * root * factor
        tl.store(value + place, numbers.to(value.dtype.element_ty), mask)
        centre, inverse = rotated_tiles.statistics_at(
            mean, spread, sequence, column, exists, FEATURES, CODE
        )
        rotated_tiles.write_code(
            stored, centre, inverse, results, rotation, token, live, group, exists,
            GROUPS, GROUP, CODE,
        )  # fmt: skip
