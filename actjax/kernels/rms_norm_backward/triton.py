"""`rms_norm_backward` in Triton: of an array in one pass, whose rows are read twice."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import limits, rotated, rotated_tiles
from actjax.kernels.layers import rows, value_of
from actjax.kernels.rms_norm_backward import triton_codes
from actjax.kernels.triton_call import Call, block_for, step

_LARGEST_BLOCK = 128
"""Most features of an array that a program reads at once."""


def refuses(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    **options: Any,
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del scale, addend, options
    if not isinstance(x, QuantizedCode):
        return limits.refuses_array(x.dtype, dy.shape)
    if x.channels is not None:
        return "takes no outlier channels"
    return rotated.refuses(x.format) or limits.refuses_array(x.dtype, dy.shape)


def rms_norm_backward(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    *,
    eps: float,
    with_value: bool,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.rms_norm_backward.api.rms_norm_backward`."""
    call = launch(x, scale, dy, addend, eps=eps, with_value=with_value)
    value, dx, dscale = call.run()
    # A sum of each program.
    dscale = jnp.sum(dscale, axis=0).astype(scale.dtype)
    return value.reshape(dy.shape) if with_value else None, dx.reshape(dy.shape), dscale


def launch(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    *,
    eps: float,
    with_value: bool,
) -> Call:
    """Returns the last launch for arguments that are not refused.

    Its first result is a number if the value is not wanted.
    """
    options: dict[str, Any] = {"eps": eps, "with_value": with_value}
    if isinstance(x, QuantizedCode):
        sums, gradients = triton_codes.launches(x, scale, dy, addend, **options)
        return dataclasses.replace(gradients, arguments=[*gradients.arguments, *sums.run()])
    features, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(features))
    tile = block_for("actjax_rms_norm_backward")["TILE"]
    programs = triton.cdiv(tokens, tile)
    shape = jax.ShapeDtypeStruct((tokens, features), x.dtype)
    read = [rows(x), rows(dy), rows(dy if addend is None else addend)]
    return Call(
        actjax_rms_norm_backward,
        [value_of(scale), *read],
        [
            shape if with_value else jax.ShapeDtypeStruct((1, 1), x.dtype),
            shape,
            jax.ShapeDtypeStruct((programs, features), jnp.float32),
        ],
        lambda _: (programs,),
        {
            "TOKENS": tokens,
            "FEATURES": features,
            "GROUPS": group_count(features, block),
            "BLOCK": block,
            "EPS": eps,
            "WITH_VALUE": with_value,
            "WITH_ADDEND": addend is not None,
            "STEPS_OF_LAYERS": tuple(map(step, read)),
            "TILE": tile,
        },
    )


@triton.jit
def actjax_rms_norm_backward(
    layer, scale, x, dy, addend, held0, held1, held2, value, dx, dscale,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, WITH_VALUE: tl.constexpr, WITH_ADDEND: tl.constexpr,
    STEPS_OF_LAYERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some tokens, all of their groups: first their sums, then the gradients."""
    at = tl.load(layer).to(tl.int64)
    x += at * STEPS_OF_LAYERS[0]
    dy += at * STEPS_OF_LAYERS[1]
    addend += at * STEPS_OF_LAYERS[2]
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if TOKENS * FEATURES >= 2**31:
        token = token.to(tl.int64)
    live = token < TOKENS if TOKENS % TILE else None
    lane = tl.arange(0, BLOCK)
    # Added up along rows after the loop, since that is many instructions.
    squares = tl.zeros((TILE, BLOCK), tl.float32)
    along = tl.zeros((TILE, BLOCK), tl.float32)
    for group in range(GROUPS):
        column = (group * BLOCK + lane)[None, :]
        exists = column < FEATURES if FEATURES % BLOCK else None
        mask = rotated_tiles.mask_of(live, exists)
        fill = None if mask is None else 0.0
        place = token[:, None] * FEATURES + column
        number = tl.load(x + place, mask, fill).to(tl.float32)
        d = tl.load(dy + place, mask, fill).to(tl.float32)
        d *= tl.load(scale + column, exists, None if exists is None else 0.0).to(tl.float32)
        squares = tl.fma(number, number, squares)
        along = tl.fma(d, number, along)
    inverse = tl.rsqrt(tl.sum(squares, 1)[:, None] * (1.0 / FEATURES) + EPS)
    along = tl.sum(along, 1)[:, None] * inverse * (1.0 / FEATURES)
    for group in range(GROUPS):
        column = (group * BLOCK + lane)[None, :]
        exists = column < FEATURES if FEATURES % BLOCK else None
        mask = rotated_tiles.mask_of(live, exists)
        fill = None if mask is None else 0.0
        place = token[:, None] * FEATURES + column
        # From the cache.
        unit = inverse * tl.load(x + place, mask, fill).to(tl.float32)
        d = tl.load(dy + place, mask, fill).to(tl.float32)
        factor = tl.load(scale + column, exists).to(tl.float32)
        if WITH_VALUE:
            tl.store(value + place, (unit * factor).to(value.dtype.element_ty), mask)
        column = group * BLOCK + lane
        tl.store(
            dscale + tl.program_id(0) * FEATURES + column,
            tl.sum(d * unit, 0),
            None if FEATURES % BLOCK == 0 else column < FEATURES,
        )
        d = (inverse * (d * factor - unit * along)).to(dx.dtype.element_ty)
        if WITH_ADDEND:
            d += tl.load(addend + place, mask).to(d.dtype)
        tl.store(dx + place, d, mask)
