"""`swiglu_backward` in one pass: inputs are decoded in registers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from actjax.formats.code import QuantizedCode
from actjax.kernels import limits, operands, tiles
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import rows
from actjax.kernels.swiglu_backward.reference import value_and_grads


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
    formats = [gate.format, up.format]
    reasons = (limits.refuses(formats, code.dtype, dy.shape) for code in (gate, up))
    return next((reason for reason in reasons if reason is not None), None)


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.swiglu_backward.api.swiglu_backward`."""
    width, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    gate_arrays, bind_gate = operands.operands(gate)
    up_arrays, bind_up = operands.operands(up)
    # A rotation holds all slices of a group, of both codes: half as many numbers fit the registers.
    rotated = gate.format.rotate or up.format.rotate
    numbers = 1024 if rotated else 2048
    grid = tiles.grid_of(tokens, width, gate.format.group, numbers, interpret=interpret)

    def kernel(*refs: Any) -> None:
        coded_gate = bind_gate(*refs[: len(gate_arrays)])
        coded_up = bind_up(*refs[len(gate_arrays) : len(gate_arrays) + len(up_arrays)])
        dy_ref, *outputs = refs[len(gate_arrays) + len(up_arrays) :]

        def body(cut: Any) -> None:
            part = cut(limits.slice_count([gate.format, up.format], cut(1).size))
            decoded = zip(coded_gate.decode(part), coded_up.decode(part), strict=True)
            for number, (g, u) in enumerate(decoded):
                place = part.token, part.feature(number)
                mask = part.exists(number)
                if features is not None:
                    g, u = (jnp.where(place[1] < features, x, 0) for x in (g, u))
                cotangent = tiles.load(dy_ref, *place, mask).astype(jnp.float32)
                results = value_and_grads(g, u, cotangent)
                wanted = results if with_value else results[1:]
                for ref, result in zip(outputs, wanted, strict=True):
                    tiles.store(ref, *place, result, mask)

        grid.run(body)

    shape = jax.ShapeDtypeStruct((tokens, width), gate.dtype)
    results = pallas_call(
        kernel,
        grid=grid.programs,
        out_shape=(shape,) * (2 + with_value),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_swiglu_backward",
    )(*gate_arrays, *up_arrays, rows(dy))
    *value, dgate, dup = (x.reshape(dy.shape) for x in results)
    return value[0] if value else None, dgate, dup
