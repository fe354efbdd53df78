"""`swiglu_backward` on codes of rotated groups, in Triton."""

import math

import jax
import triton
import triton.language as tl

from actjax.formats.code import QuantizedCode, group_count
from actjax.kernels import limits, rotated, rotated_tiles
from actjax.kernels.layers import rows
from actjax.kernels.triton_call import Call, step


def refuses(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del with_value, features
    if gate.format.group != up.format.group:
        groups = f"{gate.format.group} and {up.format.group}"
        return f"takes groups of one size for `gate` and `up`, got {groups}"
    if rotated.sequences(gate) != rotated.sequences(up):
        return "takes `gate` and `up` that are both balanced, or neither"
    for code in (gate, up):
        reason = rotated.refuses(code.format) or limits.refuses_array(code.dtype, dy.shape)
        if reason is None and code.channels is not None:
            reason = "takes no outlier channels"
        if reason is not None:
            return reason
    return None


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.swiglu_backward.api.swiglu_backward`."""
    call = launch(gate, up, dy, with_value=with_value, features=features)
    value, dgate, dup = call.run()
    value = value.reshape(dy.shape) if with_value else None
    return value, dgate.reshape(dy.shape), dup.reshape(dy.shape)


def launch(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> Call:
    """Returns the launch of the program for arguments that it does not refuse.

    Its first result is a number if the value is not wanted.
    """
    tokens, width, group = math.prod(dy.shape[:-1]), dy.shape[-1], gate.format.group
    groups, length = group_count(width, group), tokens // rotated.sequences(gate)
    (gate_arrays, gate_code), (up_arrays, up_code) = map(rotated.operand, (gate, up))
    results = [jax.ShapeDtypeStruct((tokens, width), gate.dtype)] * 3
    if not with_value:
        results[0] = jax.ShapeDtypeStruct((1, 1), gate.dtype)
    return Call(
        actjax_swiglu_backward,
        [*gate_arrays, *up_arrays, rotated.matrix_to_decode(gate.format), rows(dy)],
        results,
        lambda block: (
            tokens // length * triton.cdiv(length, block["TILE"] * block["STEPS"]) * groups,
        ),
        {
            "LENGTH": length,
            "FEATURES": width,
            "GROUPS": groups,
            "GROUP": group,
            "GATE": gate_code,
            "UP": up_code,
            "WITH_VALUE": with_value,
            "EXIST": width if features is None else features,
            "DY_STEP": step(dy),
        },
    )


@triton.jit
def actjax_swiglu_backward(
    layer, gate0, gate1, gate_scale, gate_offset, gate_mean, gate_spread, up0, up1, up_scale,
    up_offset, up_mean, up_spread, matrix, dy, held0, held1, held2, value, dgate, dup,
    LENGTH: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, WITH_VALUE: tl.constexpr, EXIST: tl.constexpr,
    DY_STEP: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of a sequence, of one group."""
    group, sequence, first = rotated_tiles.place_of_program(LENGTH, GROUPS, TILE, STEPS)
    start = sequence.to(tl.int64) * LENGTH
    gate_code = rotated_tiles.code_at(
        (gate0, gate1, gate_scale, gate_offset, gate_mean, gate_spread), tl.load(layer), start,
        sequence, FEATURES, GROUPS, GROUP, GATE,
    )  # fmt: skip
    up_code = rotated_tiles.code_at(
        (up0, up1, up_scale, up_offset, up_mean, up_spread), tl.load(layer), start, sequence,
        FEATURES, GROUPS, GROUP, UP,
    )  # fmt: skip
    dy += tl.load(layer).to(tl.int64) * DY_STEP
    # Columns are taken in halves: registers do not hold both factors of all.
    HALF: tl.constexpr = GROUP // 2
    half = tl.arange(0, HALF)[None, :]
    rows = matrix + tl.arange(0, GROUP)[:, None] * GROUP + half
    rotations = tl.load(rows), tl.load(rows + HALF)
    gate = rotated_tiles.loaded(gate_code, first, group, LENGTH, GROUPS, GROUP, GATE, TILE, STEPS)
    up = rotated_tiles.loaded(up_code, first, group, LENGTH, GROUPS, GROUP, UP, TILE, STEPS)
    for i in range(STEPS):
        token = first + i * TILE + tl.arange(0, TILE)
        live = token < LENGTH if LENGTH % (TILE * STEPS) else None
        for j in tl.static_range(2):
            lane = half + j * HALF
            column = group * GROUP + lane
            exists = column < FEATURES if FEATURES % GROUP else None
            mask = rotated_tiles.mask_of(live, exists)
            place = (start * FEATURES) + (token[:, None] * FEATURES + column)
            cotangent = tl.load(dy + place, mask).to(tl.float32)
            g = rotated_tiles.decoded(
                gate, gate_code, rotations[j], group, lane, FEATURES, GROUP, GATE
            )
            u = rotated_tiles.decoded(up, up_code, rotations[j], group, lane, FEATURES, GROUP, UP)
            # Rounded as in memory, so that gradients are those at the decoded activation.
            g = g.to(dgate.dtype.element_ty).to(tl.float32)
            u = u.to(dgate.dtype.element_ty).to(tl.float32)
            if EXIST < FEATURES:
                g, u = tl.where(column < EXIST, g, 0.0), tl.where(column < EXIST, u, 0.0)
            sigmoid = rotated_tiles.sigmoid(g)
            silu = g * sigmoid
            if WITH_VALUE:
                tl.store(value + place, (silu * u).to(value.dtype.element_ty), mask)
            tl.store(dup + place, (cotangent * silu).to(dup.dtype.element_ty), mask)
            slope = tl.fma(silu, 1.0 - sigmoid, sigmoid)
            tl.store(dgate + place, (cotangent * u * slope).to(dgate.dtype.element_ty), mask)
        # The last tile loads the first one again, which is in the cache.
        after = first + (i + 1) % STEPS * TILE
        gate = rotated_tiles.loaded(
            gate_code, after, group, LENGTH, GROUPS, GROUP, GATE, TILE, STEPS
        )
        up = rotated_tiles.loaded(up_code, after, group, LENGTH, GROUPS, GROUP, UP, TILE, STEPS)
