"""`rms_norm_backward` of a code, in Triton: sums of each group, then the gradients.

A program that has whole rows would decode them twice, too, but would wait for each of their groups
in turn, and have too few neighbors on its core to hide that.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import rotated, rotated_tiles
from actjax.kernels.layers import rows, value_of
from actjax.kernels.triton_call import Call, block_for, step


def launches(
    x: QuantizedCode,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    *,
    eps: float,
    with_value: bool,
) -> tuple[Call, Call]:
    """Returns the launch of the sums, and that of the gradients, which lacks the sums.

    The first result of the second is a number if the value is not wanted.
    """
    features, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    groups, sequences = group_count(features, x.format.group), rotated.sequences(x)
    length = tokens // sequences
    arrays, code = rotated.operand(x)
    common = {
        "LENGTH": length,
        "FEATURES": features,
        "GROUPS": groups,
        "GROUP": x.format.group,
        "CODE": code,
    }

    def programs(name: str) -> tuple[int, ...]:
        block = block_for(name)
        return sequences * triton.cdiv(length, block["TILE"] * block["STEPS"])

    read = [*arrays, rotated.matrix_to_decode(x.format), value_of(scale), rows(dy)]
    sums = Call(
        actjax_rms_norm_sums,
        read,
        [jax.ShapeDtypeStruct((tokens, groups), jnp.float32)] * 2,
        lambda _: (programs("actjax_rms_norm_sums") * groups,),
        {**common, "STEP_OF_LAYERS": step(rows(dy))},
    )
    added = rows(dy if addend is None else addend)
    shape = jax.ShapeDtypeStruct((tokens, features), x.dtype)
    parts = programs("actjax_rms_norm_gradient")
    gradients = Call(
        actjax_rms_norm_gradient,
        [*read, added],
        [
            shape if with_value else jax.ShapeDtypeStruct((1, 1), x.dtype),
            shape,
            jax.ShapeDtypeStruct((parts, features), jnp.float32),
        ],
        lambda _: (parts * groups,),
        {
            **common,
            "WIDTH": triton.next_power_of_2(groups),
            "EPS": eps,
            "WITH_VALUE": with_value,
            "WITH_ADDEND": addend is not None,
            "STEPS_OF_LAYERS": (step(rows(dy)), step(added)),
        },
    )
    return sums, gradients


@triton.jit
def actjax_rms_norm_sums(
    layer, x0, x1, x_scale, x_offset, x_mean, x_spread, matrix, scale, dy, held0, held1,
    squares, along,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, STEP_OF_LAYERS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums over a group of `x x` and `dy scale x`, for some tiles of tokens."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start, at = sequence.to(tl.int64) * LENGTH, tl.load(layer).to(tl.int64)
    code = rotated_tiles.code_at(
        (x0, x1, x_scale, x_offset, x_mean, x_spread), at, start, sequence, FEATURES, GROUPS, GROUP,
        CODE,
    )  # fmt: skip
    rotation = rotated_tiles.square(matrix, GROUP)
    lane = tl.arange(0, GROUP)[None, :]
    column = group * GROUP + lane
    exists = column < FEATURES if FEATURES % GROUP else None
    fill = None if exists is None else 0.0
    dy += at * STEP_OF_LAYERS + start * FEATURES
    tile = rotated_tiles.loaded(code, first, group, LENGTH, GROUPS, GROUP, CODE, TILE, STEPS)
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        mask = rotated_tiles.mask_of(live, exists)
        place = dy + (token[:, None] * FEATURES + column)
        d = tl.load(place, mask, None if mask is None else 0.0).to(tl.float32)
        x = rotated_tiles.decoded(tile, code, rotation, group, lane, FEATURES, GROUP, CODE)
        # The last tile loads the first one again, which is in the cache.
        after = first + (i + 1) % STEPS * TILE
        tile = rotated_tiles.loaded(code, after, group, LENGTH, GROUPS, GROUP, CODE, TILE, STEPS)
        # Rounded as in memory, so that gradients are those at the decoded activation.
        x = x.to(dy.dtype.element_ty).to(tl.float32)
        if exists is not None:
            x = tl.where(exists, x, 0.0)
        d *= tl.load(scale + column, exists, fill).to(tl.float32)
        of_token = (start + token) * GROUPS + group
        tl.store(squares + of_token, tl.sum(x * x, 1), live)
        tl.store(along + of_token, tl.sum(d * x, 1), live)


@triton.jit
def actjax_rms_norm_gradient(
    layer, x0, x1, x_scale, x_offset, x_mean, x_spread, matrix, scale, dy, addend, squares, along,
    held0, held1, held2, value, dx, dscale,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, WITH_VALUE: tl.constexpr,
    WITH_ADDEND: tl.constexpr, STEPS_OF_LAYERS: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The gradients of a group, for some tiles of tokens."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start, at = sequence.to(tl.int64) * LENGTH, tl.load(layer).to(tl.int64)
    code = rotated_tiles.code_at(
        (x0, x1, x_scale, x_offset, x_mean, x_spread), at, start, sequence, FEATURES, GROUPS, GROUP,
        CODE,
    )  # fmt: skip
    # Columns are taken in halves: registers do not hold all that both take.
    HALF: tl.constexpr = GROUP // 2
    half = tl.arange(0, HALF)[None, :]
    rotations = matrix + tl.arange(0, GROUP)[:, None] * GROUP + half
    rotations = tl.load(rotations), tl.load(rotations + HALF)
    dy += at * STEPS_OF_LAYERS[0] + start * FEATURES
    addend += at * STEPS_OF_LAYERS[1] + start * FEATURES
    value += start * FEATURES
    dx += start * FEATURES
    part = tl.arange(0, WIDTH)[None, :]
    # Sums of two rows, which are in one thread where the matrix units have made them.
    low = tl.zeros((TILE // 16, 8, HALF), tl.float32)
    high = low
    tile = rotated_tiles.loaded(code, first, group, LENGTH, GROUPS, GROUP, CODE, TILE, STEPS)
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        places = (start + token)[:, None] * GROUPS + part
        mask = rotated_tiles.mask_of(live, part < GROUPS if WIDTH > GROUPS else None)
        fill = None if mask is None else 0.0
        square = tl.sum(tl.load(squares + places, mask, fill), 1)[:, None] * (1.0 / FEATURES)
        inverse = tl.rsqrt(square + EPS)
        projection = tl.sum(tl.load(along + places, mask, fill), 1)[:, None]
        projection *= inverse * (1.0 / FEATURES)
        for j in tl.static_range(2):
            lane = half + j * HALF
            column = group * GROUP + lane
            exists = column < FEATURES if FEATURES % GROUP else None
            mask = rotated_tiles.mask_of(live, exists)
            place = token[:, None] * FEATURES + column
            d = tl.load(dy + place, mask, None if mask is None else 0.0).to(tl.float32)
            x = rotated_tiles.decoded(tile, code, rotations[j], group, lane, FEATURES, GROUP, CODE)
            unit = inverse * x.to(dx.dtype.element_ty).to(tl.float32)
            factor = tl.load(scale + column, exists).to(tl.float32)
            if WITH_VALUE:
                tl.store(value + place, (unit * factor).to(value.dtype.element_ty), mask)
            of_scale = d * unit
            if live is not None:
                # Tokens beyond the last have no defined `unit`.
                of_scale = tl.where(live[:, None], of_scale, 0.0)
            of_scale = tl.sum(tl.reshape(of_scale, (TILE // 16, 2, 8, HALF)), 1)
            if j == 0:
                low += of_scale
            else:
                high += of_scale
            d = (inverse * (d * factor - unit * projection)).to(dx.dtype.element_ty)
            if WITH_ADDEND:
                d += tl.load(addend + place, mask).to(d.dtype)
            tl.store(dx + place, d, mask)
        # The last tile loads the first one again, which is in the cache.
        after = first + (i + 1) % STEPS * TILE
        tile = rotated_tiles.loaded(code, after, group, LENGTH, GROUPS, GROUP, CODE, TILE, STEPS)
    dscale += tl.program_id(0) // GROUPS * FEATURES
    for j in tl.static_range(2):
        column = group * GROUP + j * HALF + tl.arange(0, HALF)
        exists = column < FEATURES if FEATURES % GROUP else None
        sums = tl.reshape(low if j == 0 else high, (TILE // 2, HALF))
        tl.store(dscale + column, tl.sum(sums, 0), exists)
