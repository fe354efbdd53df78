"""`quantize` for TPUs, by Mosaic. XLA's form moves 30 times the least bytes for 5461 features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from actjax._math.precision import over
from actjax.formats import code as fmt
from actjax.formats import levels as normal
from actjax.kernels import lanes
from actjax.kernels.lanes import LANES, Group


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    if inputs.channels is not None:
        return "takes no channels on TPUs"
    return lanes.refuses(format, inputs.x.dtype, inputs.x.shape)


def quantize(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, interpret: bool
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    x = inputs.x
    rows, length, features = x.shape
    groups, tokens = fmt.group_count(features, LANES), min(lanes.TOKENS, length)
    width, half = lanes.padded(features), lanes.padded(groups * LANES // 2)
    by_row = pl.BlockSpec((1, 1, width), lambda b, i: (b, 0, 0))
    plane, stored = pl.pallas_call(
        functools.partial(_kernel, features),
        grid=(rows, -(-length // tokens)),
        in_specs=[
            pl.BlockSpec((1, tokens, width), lambda b, i: (b, i, 0)),
            pl.BlockSpec((LANES, LANES), lambda b, i: (0, 0)),
            by_row,
            by_row,
        ],
        out_specs=[
            pl.BlockSpec((1, tokens, half), lambda b, i: (b, i, 0)),
            pl.BlockSpec((1, tokens, LANES), lambda b, i: (b, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, length, groups * LANES // 2), jnp.uint8),
            jax.ShapeDtypeStruct((rows, length, groups), jnp.bfloat16),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="actjax_quantize",
    )(
        x,
        lanes.matrix(),
        lanes.of_sequences(inputs.mean, rows, features, 0),
        1 / lanes.of_sequences(inputs.spread, rows, features, 1),
    )
    return fmt.QuantizedCode(
        planes=(plane,),
        scale=stored.view(jnp.uint16),
        features=features,
        dtype=jnp.dtype(x.dtype),
        format=format,
    )


def _kernel(features, x, matrix, mean, inverse, plane, scales) -> None:
    lane = lanes.lanes_like(x.shape[1])
    stored, pending = jnp.zeros(lane.shape, jnp.float32), jnp.zeros(lane.shape, jnp.int32)
    for group in lanes.groups_of(features):
        values = x[0, :, group.at].astype(jnp.float32) - mean[0, :, group.at]
        # Lanes beyond the row hold anything.
        values = jnp.where(lane < group.exist, values * inverse[0, :, group.at], 0)
        values = values.astype(jnp.bfloat16).astype(jnp.float32)
        codes, scale = _encoded(lanes.product(values, matrix[...]))
        stored = jnp.where(lane == group.index, scale, stored)
        codes = _packed(codes, lane, group)
        pending = jnp.where(lane < LANES // 2, pending, codes) if group.is_second else codes
        plane[0, :, group.bytes_at] = pending.astype(plane.dtype)
    scales[0] = stored.astype(scales.dtype)


def _encoded(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes, int32 [tokens, 128], and scales, [tokens, 1], of rotated values."""
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    relative = over(values, largest)
    mean_square = jnp.sum(relative * relative, axis=1, keepdims=True) * np.float32(1 / LANES)
    scale = jnp.sqrt(mean_square) * largest
    return normal.code_of(over(values, scale), 4).astype(jnp.int32), scale


def _packed(codes: jax.Array, lane: jax.Array, group: Group) -> jax.Array:
    """Returns the bytes of a group in its half of the lanes: code j, and code j + 64 above it."""
    bytes_ = jnp.where(lane < LANES // 2, codes | pltpu.roll(codes, LANES // 2, 1) << 4, 0)
    return pltpu.roll(bytes_, LANES // 2, 1) if group.is_second else bytes_
