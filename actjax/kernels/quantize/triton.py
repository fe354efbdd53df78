"""`quantize` of rotated groups, in Triton."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats import code as fmt
from actjax.formats.packing import PLANES
from actjax.kernels import limits, rotated
from actjax.kernels.layers import rows
from actjax.kernels.triton_call import Call


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    if inputs.channels is not None:
        return "takes no outlier channels"
    return rotated.refuses(format) or limits.refuses([format], inputs.x.dtype, inputs.x.shape)


def quantize(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, into: fmt.QuantizedCode | None = None
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`; `into` as for `Computation.compute`."""
    x, lead = inputs.x, inputs.x.shape[:-1]
    *planes, scale, offset = launch(inputs, format=format, into=into).run()
    return fmt.QuantizedCode(
        planes=tuple(y.reshape(*lead, y.shape[-1]) for y in planes[: len(PLANES[format.bits])]),
        scale=scale.reshape(*lead, scale.shape[-1]),
        features=x.shape[-1],
        dtype=jnp.dtype(x.dtype),
        format=format,
        offset=offset.reshape(*lead, offset.shape[-1]) if format.levels == "uniform" else None,
    )


def launch(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, into: fmt.QuantizedCode | None = None
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse.

    It writes two planes, scales and offsets; the second plane, or the offsets, are a number where a
    code has none.
    """
    x = rows(inputs.x)
    groups = fmt.group_count(x.shape[-1], format.group)
    balanced = inputs.mean is not None
    statistics = (inputs.mean, inputs.spread) if balanced else [jnp.zeros((1, 1), jnp.uint16)] * 2
    mean, spread = map(rows, statistics)
    scale_dtype = jnp.float32 if format.scale_dtype == "float32" else jnp.uint16
    shapes = [
        *((groups * format.group * width // 8, jnp.uint8) for width in PLANES[format.bits]),
        (groups, scale_dtype),
        (groups, scale_dtype),
    ]
    results: list[Any] = [jax.ShapeDtypeStruct((len(x), size), dtype) for size, dtype in shapes]
    if into is not None:
        held = (*into.planes, into.scale, into.offset)
        results = [y if z is None else rows(z) for y, z in zip(results, held, strict=True)]
    if len(results) < 4:
        results.insert(1, jax.ShapeDtypeStruct((1, 1), jnp.uint8))
    if format.levels == "normal":
        results[3] = jax.ShapeDtypeStruct((1, 1), scale_dtype)
    length = len(x) // len(mean)
    return Call(
        actjax_quantize,
        [x, mean, spread, rotated.matrix_to_encode(format)],
        results,
        lambda block: (len(mean) * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,),
        {
            "LENGTH": length,
            "FEATURES": x.shape[-1],
            "GROUPS": groups,
            "BALANCED": balanced,
            "LAYER": 0 if into is None else len(x),
            "WIDE": format.scale_dtype == "float32",
            **rotated.encoding(format),
        },
    )


@triton.jit
def actjax_quantize(
    layer, x, mean, spread, matrix, held0, held1, held2, held3, plane0, plane1, scale, offset,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, BALANCED: tl.constexpr,
    LAYER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, WIDTHS: tl.constexpr,
    TERMS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group. Layers of results have `LAYER` tokens."""
    group, sequence, first = rotated.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    into = start + tl.load(layer).to(tl.int64) * LAYER
    x += start * FEATURES
    plane0 += into * (GROUPS * GROUP * WIDTHS[0] // 8)
    plane1 += into * (GROUPS * GROUP * WIDTHS[-1] // 8) if len(WIDTHS) > 1 else 0
    scale += into * GROUPS
    offset += into * GROUPS
    lane, half = tl.arange(0, GROUP), tl.arange(0, GROUP // 2)
    column = group * GROUP + lane
    exists = (column < FEATURES)[None, :] if FEATURES % GROUP else None
    low_matrix = tl.load(matrix + lane[:, None] * GROUP + half[None, :])
    high_matrix = tl.load(matrix + lane[:, None] * GROUP + GROUP // 2 + half[None, :])
    if BALANCED:
        place = sequence * FEATURES + column[None, :]
        centre = rotated.load_scale(mean + place, exists)
        inverse = 1.0 / rotated.load_scale(spread + place, exists)
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated.mask_of(live, exists)
        fill = None if mask is None else 0.0
        stored = tl.load(x + token[:, None] * FEATURES + column[None, :], mask, fill)
        value = stored.to(tl.float32)
        if BALANCED:
            if stored.dtype == tl.float32:
                value = (value - centre) * inverse
            else:
                value = tl.fma(value, inverse, -centre * inverse)
            if exists is not None:
                value = tl.where(exists, value, 0.0)
        low, high, unit, least = rotated.encoded(
            value.to(tl.bfloat16), low_matrix, high_matrix, GROUP, BITS, TERMS, WIDE
        )
        rotated.store_planes(low, high, (plane0, plane1), token, live, group, GROUPS, WIDTHS)
        rotated.store_scale(scale + token * GROUPS + group, unit, live)
        if TERMS is None:
            rotated.store_scale(offset + token * GROUPS + group, least, live)
