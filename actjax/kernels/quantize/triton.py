"""`quantize` of rotated groups, in Triton."""

import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.triton_call import Call


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    return rotated.refuses_to_encode(inputs, format)


def quantize(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, into: fmt.QuantizedCode | None = None
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`; `into` as for `Computation.compute`."""
    results = launch(inputs, format=format, into=into).run()
    return rotated.code_of(results, inputs, format)


def launch(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, into: fmt.QuantizedCode | None = None
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse."""
    x, mean, spread = rotated.inputs_of(inputs)
    groups = fmt.group_count(x.shape[-1], format.group)
    length = len(x) // len(mean)
    results = rotated.results_of(inputs, format, into)
    return Call(
        actjax_quantize,
        [x, mean, spread, rotated.matrix_to_encode(format)],
        results,
        lambda block: (len(mean) * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,),
        {
            "LENGTH": length,
            "FEATURES": x.shape[-1],
            "GROUPS": groups,
            "GROUP": format.group,
            "CODE": rotated.encoding(format, inputs.mean is not None, results),
        },
    )


@triton.jit
def actjax_quantize(
    layer, x, mean, spread, matrix, held0, held1, held2, held3, plane0, plane1, scale, offset,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    x += start * FEATURES
    results = rotated_tiles.results_at(
        (plane0, plane1, scale, offset), tl.load(layer), start, GROUPS, GROUP, CODE
    )
    rotation = rotated_tiles.square(matrix, GROUP)
    column = (group * GROUP + tl.arange(0, GROUP))[None, :]
    exists = column < FEATURES if FEATURES % GROUP else None
    centre, inverse = rotated_tiles.statistics_at(
        mean, spread, sequence, column, exists, FEATURES, CODE
    )
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        fill = None if mask is None else 0.0
        stored = tl.load(x + token[:, None] * FEATURES + column, mask, fill)
        rotated_tiles.write_code(
            stored, centre, inverse, results, rotation, token, live, group, exists,
            GROUPS, GROUP, CODE,
        )  # fmt: skip
