"""`rms_norm_backward` in one pass, in Triton: rows are decoded in registers, twice."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import limits, rotated, rotated_tiles
from actjax.kernels.layers import rows, value_of
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
    return rotated.refuses(x.format) or limits.refuses([x.format], x.dtype, dy.shape)


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
    """Returns the launch of the program for arguments that it does not refuse.

    Its first result is a number if the value is not wanted.
    """
    features, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    if isinstance(x, QuantizedCode):
        group, sequences = x.format.group, rotated.sequences(x)
        arrays, code = rotated.operand(x)
        tables = rotated.tables_to_decode(x.format)
    else:
        group, sequences, code = min(_LARGEST_BLOCK, triton.next_power_of_2(features)), 1, None
        dummy = jnp.zeros((1, 1), jnp.float32)
        arrays, tables = [rows(x), *[dummy] * 5], (dummy, dummy)
    length = tokens // sequences
    tile = block_for("actjax_rms_norm_backward")["TILE"]
    programs = sequences * triton.cdiv(length, tile)
    shape = jax.ShapeDtypeStruct((tokens, features), x.dtype)
    others = [rows(dy), rows(dy if addend is None else addend)]
    return Call(
        actjax_rms_norm_backward,
        [*arrays, *tables, value_of(scale), *others],
        [
            shape if with_value else jax.ShapeDtypeStruct((1, 1), x.dtype),
            shape,
            jax.ShapeDtypeStruct((programs, features), jnp.float32),
        ],
        lambda _: (programs,),
        {
            "LENGTH": length,
            "FEATURES": features,
            "GROUPS": group_count(features, group),
            "GROUP": group,
            "CODE": code,
            "X_STEP": step(arrays[0]),
            "EPS": eps,
            "WITH_VALUE": with_value,
            "WITH_ADDEND": addend is not None,
            "STEPS_OF_LAYERS": tuple(map(step, others)),
            "TILE": tile,
        },
    )


@triton.jit
def actjax_rms_norm_backward(
    layer, x0, x1, x_scale, x_offset, x_mean, x_spread, matrix, levels, scale, dy, addend,
    held0, held1, held2, value, dx, dscale,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, X_STEP: tl.constexpr, EPS: tl.constexpr, WITH_VALUE: tl.constexpr,
    WITH_ADDEND: tl.constexpr, STEPS_OF_LAYERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some tokens of a sequence, all of their groups: first their sums, then the gradients."""
    _, sequence, first = rotated_tiles.place_of_program(LENGTH, 1, TILE, 1)
    start, at = sequence.to(tl.int64) * LENGTH, tl.load(layer).to(tl.int64)
    dy += at * STEPS_OF_LAYERS[0]
    addend += at * STEPS_OF_LAYERS[1]
    token = first + tl.arange(0, TILE)
    if LENGTH * FEATURES >= 2**31:
        token = token.to(tl.int64)
    live = token < LENGTH if LENGTH % TILE else None
    lane = tl.arange(0, GROUP)
    arrays = (x0, x1, x_scale, x_offset, x_mean, x_spread)
    # Added up along rows after the loop, since that is many instructions.
    squares = tl.zeros((TILE, GROUP), tl.float32)
    along = tl.zeros((TILE, GROUP), tl.float32)
    for group in range(GROUPS):
        column = (group * GROUP + lane)[None, :]
        exists = column < FEATURES if FEATURES % GROUP else None
        mask = rotated_tiles.mask_of(live, exists)
        place = start * FEATURES + (token[:, None] * FEATURES + column)
        x = _read(
            arrays, matrix, levels, at, start, sequence, token, live, group, place, mask, dx,
            FEATURES, GROUPS, GROUP, CODE, X_STEP,
        )  # fmt: skip
        if exists is not None:
            x = tl.where(exists, x, 0.0)
        d = tl.load(dy + place, mask, None if mask is None else 0.0).to(tl.float32)
        d *= tl.load(scale + column, exists, None if exists is None else 0.0).to(tl.float32)
        squares = tl.fma(x, x, squares)
        along = tl.fma(d, x, along)
    inverse = tl.rsqrt(tl.sum(squares, 1)[:, None] * (1.0 / FEATURES) + EPS)
    along = tl.sum(along, 1)[:, None] * inverse * (1.0 / FEATURES)
    for group in range(GROUPS):
        column = (group * GROUP + lane)[None, :]
        exists = column < FEATURES if FEATURES % GROUP else None
        mask = rotated_tiles.mask_of(live, exists)
        place = start * FEATURES + (token[:, None] * FEATURES + column)
        unit = inverse * _read(
            arrays, matrix, levels, at, start, sequence, token, live, group, place, mask, dx,
            FEATURES, GROUPS, GROUP, CODE, X_STEP,
        )  # fmt: skip
        factor = tl.load(scale + column, exists).to(tl.float32)
        d = tl.load(dy + place, mask, None if mask is None else 0.0).to(tl.float32)
        if WITH_VALUE:
            tl.store(value + place, (unit * factor).to(value.dtype.element_ty), mask)
        of_scale = d * unit
        if live is not None:
            # Tokens beyond the last have no defined `unit`.
            of_scale = tl.where(live[:, None], of_scale, 0.0)
        sums = dscale + tl.program_id(0) * FEATURES + group * GROUP + lane
        tl.store(
            sums,
            tl.sum(of_scale, 0),
            None if FEATURES % GROUP == 0 else group * GROUP + lane < FEATURES,
        )
        d = (inverse * (d * factor - unit * along)).to(dx.dtype.element_ty)
        if WITH_ADDEND:
            d += tl.load(addend + place, mask).to(d.dtype)
        tl.store(dx + place, d, mask)


@triton.jit
def _read(
    arrays, matrix, levels, layer, start, sequence, token, live, group, place, mask, like,
    FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr,
    X_STEP: tl.constexpr,
):  # fmt: skip
    """A tile of the input, float32, rounded as in memory."""
    if CODE is None:
        x = tl.load(arrays[0] + layer * X_STEP + place, mask, None if mask is None else 0.0)
        return x.to(tl.float32)
    else:
        code = rotated_tiles.code_at(
            arrays, layer, start, sequence, group, FEATURES, GROUPS, GROUP, CODE
        )
        low_matrix, high_matrix = rotated_tiles.halves_to_decode(matrix, GROUP)
        x = rotated_tiles.decoded(
            code, levels, low_matrix, high_matrix, token, live, group, GROUPS, GROUP, CODE
        )
        return x.to(like.dtype.element_ty).to(tl.float32)
