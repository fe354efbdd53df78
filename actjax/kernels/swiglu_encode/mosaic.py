"""`swiglu_encode` for TPUs, by Mosaic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from actjax.formats import code as fmt
from actjax.kernels import lanes
from actjax.kernels.quantize import mosaic as quantize

_SIZE = 2 * 2**20
"""Bytes of a block: three such blocks and two codes are in the memory of a core."""


def refuses(gate: Any, up: Any, *, formats: Any, features: int | None) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del features
    reasons = (quantize.refuses(x, format=f) for x, f in zip((gate, up), formats, strict=True))
    return next(filter(None, reasons), None)


def swiglu_encode(
    gate: fmt.QuantizeInputs,
    up: fmt.QuantizeInputs,
    *,
    formats: tuple[fmt.Format, fmt.Format],
    features: int | None,
    interpret: bool,
) -> tuple[jax.Array, fmt.QuantizedCode, fmt.QuantizedCode]:
    """As `actjax.kernels.swiglu_encode.api.swiglu_encode`."""
    blocks = quantize.Blocks.of(gate.x, size=_SIZE)
    exist = blocks.features if features is None else features
    value, *codes = pl.pallas_call(
        functools.partial(_kernel, blocks.features, exist),
        grid=blocks.grid,
        in_specs=[*blocks.inputs, *blocks.inputs, blocks.matrix],
        out_specs=[blocks.activation, *blocks.code, *blocks.code],
        out_shape=[
            jax.ShapeDtypeStruct(gate.x.shape, gate.x.dtype),
            *blocks.code_shapes,
            *blocks.code_shapes,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="actjax_swiglu_encode",
    )(*quantize.arrays_of(gate), *quantize.arrays_of(up), lanes.matrix())
    return (
        value,
        quantize.code_of(codes[:2], gate, formats[0]),
        quantize.code_of(codes[2:], up, formats[1]),
    )


def _kernel(
    features, exist, gate, gate_mean, gate_inverse, up, up_mean, up_inverse, matrix,
    value, gate_plane, gate_scales, up_plane, up_scales,
) -> None:  # fmt: skip
    def read(group: lanes.Group) -> jax.Array:
        # Written where `up` is read.
        g, u = (x[0, :, group.at].astype(jnp.float32) for x in (gate, up))
        y = g * jax.nn.sigmoid(g) * u
        lane = group.index * lanes.LANES + lanes.lanes_like(y.shape[0])
        value[0, :, group.at] = jnp.where(lane < exist, y, 0).astype(value.dtype)
        return u

    quantize.encode(
        features, lambda group: gate[0, :, group.at], gate_mean, gate_inverse, matrix,
        gate_plane, gate_scales,
    )  # fmt: skip
    quantize.encode(features, read, up_mean, up_inverse, matrix, up_plane, up_scales)
