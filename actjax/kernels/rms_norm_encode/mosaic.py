"""`rms_norm_encode` for TPUs, by Mosaic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from actjax.formats import code as fmt
from actjax.kernels import lanes
from actjax.kernels.quantize import mosaic as quantize


def refuses(inputs: Any, scale: Any, *, format: fmt.Format, eps: float) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del scale, eps
    return quantize.refuses(inputs, format=format)


def rms_norm_encode(
    inputs: fmt.QuantizeInputs,
    scale: jax.Array,
    *,
    format: fmt.Format,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, fmt.QuantizedCode]:
    """As `actjax.kernels.rms_norm_encode.api.rms_norm_encode`."""
    # The value is in the memory of a core too.
    blocks = quantize.Blocks.of(inputs.x, size=2 * 2**20)
    value, *code = pl.pallas_call(
        functools.partial(_kernel, blocks.features, eps),
        grid=blocks.grid,
        in_specs=[
            *blocks.inputs,
            pl.BlockSpec((1, lanes.padded(blocks.features)), lambda b, i: (0, 0)),
            blocks.matrix,
        ],
        out_specs=[blocks.activation, *blocks.code],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
            *blocks.code_shapes,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="actjax_rms_norm_encode",
    )(*quantize.arrays_of(inputs), scale.astype(jnp.float32)[None], lanes.matrix())
    return value, quantize.code_of(code, inputs, format)


def _kernel(features, eps, x, mean, inverse, scale, matrix, value, plane, scales) -> None:
    lane = lanes.lanes_like(x.shape[1])
    squares = jnp.zeros(lane.shape, jnp.float32)
    for group in lanes.groups_of(features):
        numbers = jnp.where(lane < group.exist, x[0, :, group.at].astype(jnp.float32), 0)
        squares += numbers * numbers
    root = jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / features + eps)

    def read(group: lanes.Group) -> jax.Array:
        numbers = x[0, :, group.at].astype(jnp.float32)
        value[0, :, group.at] = (numbers * root * scale[:, group.at]).astype(value.dtype)
        return numbers

    quantize.encode(features, read, mean, inverse, matrix, plane, scales)
