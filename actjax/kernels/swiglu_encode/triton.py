"""`swiglu_encode` into codes of rotated groups, in Triton."""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.triton_call import Call


def refuses(
    gate: fmt.QuantizeInputs,
    up: fmt.QuantizeInputs,
    *,
    formats: tuple[fmt.Format, fmt.Format],
    features: int | None,
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del features
    if formats[0].group != formats[1].group:
        return f"takes groups of one size, got {formats[0].group} and {formats[1].group}"
    if (gate.mean is None) != (up.mean is None):
        return "takes `gate` and `up` that are both balanced, or neither"
    return next(filter(None, map(rotated.refuses_to_encode, (gate, up), formats)), None)


def swiglu_encode(
    gate: fmt.QuantizeInputs,
    up: fmt.QuantizeInputs,
    *,
    formats: tuple[fmt.Format, fmt.Format],
    features: int | None,
    into: Any = None,
) -> tuple[jax.Array, fmt.QuantizedCode, fmt.QuantizedCode]:
    """As `actjax.kernels.swiglu_encode.api.swiglu_encode`; `into` as for `Computation.compute`."""
    value, *results = launch(gate, up, formats=formats, features=features, into=into).run()
    codes = (
        rotated.code_of(part, inputs, format)
        for part, inputs, format in zip(
            (results[:4], results[4:]), (gate, up), formats, strict=True
        )
    )
    return value.reshape(gate.x.shape), *codes


def launch(
    gate: fmt.QuantizeInputs,
    up: fmt.QuantizeInputs,
    *,
    formats: tuple[fmt.Format, fmt.Format],
    features: int | None,
    into: Any = None,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    gate_arrays, up_arrays = map(rotated.inputs_of, (gate, up))
    width, group = gate.x.shape[-1], formats[0].group
    tokens, sequences = math.prod(gate.x.shape[:-1]), len(gate_arrays[1])
    groups, length = fmt.group_count(width, group), tokens // sequences
    # The value is a new array: what follows reads it.
    _, *places = (None, None, None) if into is None else into
    of_gate = rotated.results_of(gate, formats[0], places[0])
    of_up = rotated.results_of(up, formats[1], places[1])
    return Call(
        actjax_swiglu_encode,
        [*gate_arrays, *up_arrays, rotated.matrix_to_encode(formats[0])],
        [
            jax.ShapeDtypeStruct((tokens, width), gate.x.dtype),
            *of_gate,
            *of_up,
        ],
        lambda block: (sequences * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,),
        {
            "LENGTH": length,
            "FEATURES": width,
            "GROUPS": groups,
            "GROUP": group,
            "EXIST": width if features is None else features,
            "GATE": rotated.encoding(formats[0], gate.mean is not None, of_gate),
            "UP": rotated.encoding(formats[1], up.mean is not None, of_up),
        },
    )


@triton.jit
def actjax_swiglu_encode(
    layer, gate, gate_mean, gate_spread, up, up_mean, up_spread, matrix,
    held0, held1, held2, held3, held4, held5, held6, held7, held8,
    value, gate0, gate1, gate_scale, gate_offset, up0, up1, up_scale, up_offset,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    EXIST: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    gate_code = rotated_tiles.results_at(
        (gate0, gate1, gate_scale, gate_offset), tl.load(layer), start, GROUPS, GROUP, GATE
    )
    up_code = rotated_tiles.results_at(
        (up0, up1, up_scale, up_offset), tl.load(layer), start, GROUPS, GROUP, UP
    )
    rotation = rotated_tiles.square(matrix, GROUP)
    column = (group * GROUP + tl.arange(0, GROUP))[None, :]
    exists = column < FEATURES if FEATURES % GROUP else None
    centre, inverse = rotated_tiles.statistics_at(
        gate_mean, gate_spread, sequence, column, exists, FEATURES, GATE
    )
    # One after the other, since registers do not hold what both take.
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        place = start * FEATURES + (token[:, None] * FEATURES + column)
        g = tl.load(gate + place, mask, None if mask is None else 0.0)
        rotated_tiles.write_code(
            g, centre, inverse, gate_code, rotation, token, live, group, exists,
            GROUPS, GROUP, GATE,
        )  # fmt: skip
    centre, inverse = rotated_tiles.statistics_at(
        up_mean, up_spread, sequence, column, exists, FEATURES, UP
    )
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        place = start * FEATURES + (token[:, None] * FEATURES + column)
        u = tl.load(up + place, mask, None if mask is None else 0.0)
        # From the cache.
        g = tl.load(gate + place, mask, None if mask is None else 0.0).to(tl.float32)
        y = g * rotated_tiles.sigmoid(g) * u.to(tl.float32)
        if EXIST < FEATURES:
            y = tl.where(column < EXIST, y, 0.0)
        tl.store(value + place, y.to(value.dtype.element_ty), mask)
        rotated_tiles.write_code(
            u, centre, inverse, up_code, rotation, token, live, group, exists,
            GROUPS, GROUP, UP,
        )  # fmt: skip
