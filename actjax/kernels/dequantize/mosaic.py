"""`dequantize` for TPUs, by Mosaic. XLA's form moves 7 times the least bytes for 5461 features."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from actjax.formats import levels as normal
from actjax.formats.code import QuantizedCode
from actjax.kernels import lanes
from actjax.kernels.lanes import LANES, Group


def refuses(code: QuantizedCode) -> str | None:
    """Returns why the program cannot take a code; None if it can."""
    if code.channels is not None or code.offset is not None:
        return "takes no channels or offsets on TPUs"
    return lanes.refuses(code.format, code.dtype, (*code.planes[0].shape[:-1], code.features))


def dequantize(code: QuantizedCode, *, interpret: bool) -> jax.Array:
    """As `actjax.kernels.dequantize.api.dequantize`."""
    (plane,), features = code.planes, code.features
    rows, length = plane.shape[:2]
    tokens = lanes.tokens_of(length, features, code.dtype)
    width, half = lanes.padded(features), plane.shape[-1]
    by_row = pl.BlockSpec((1, 1, width), lambda b, i: (b, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, features),
        grid=(rows, -(-length // tokens)),
        in_specs=[
            pl.BlockSpec((1, tokens, lanes.padded(half)), lambda b, i: (b, i, 0)),
            pl.BlockSpec((1, tokens, LANES), lambda b, i: (b, i, 0)),
            pl.BlockSpec((LANES, LANES), lambda b, i: (0, 0)),
            by_row,
            by_row,
        ],
        out_specs=pl.BlockSpec((1, tokens, width), lambda b, i: (b, i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, length, features), code.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="actjax_dequantize",
    )(
        plane,
        code.scale.view(jnp.bfloat16),
        lanes.matrix().T,
        lanes.of_sequences(code.mean, rows, features, 0),
        lanes.of_sequences(code.spread, rows, features, 1),
    )


def _kernel(features, plane, scales, matrix, mean, spread, x) -> None:
    lane = lanes.lanes_like(plane.shape[1])
    stored = scales[0].astype(jnp.float32)
    for group in lanes.groups_of(features):
        codes = _unpacked(plane[0, :, group.bytes_at].astype(jnp.int32), lane, group)
        values = normal.value_of(codes, 4, jnp.float32) * stored[:, group.index : group.index + 1]
        values = lanes.product(values, matrix[...])
        values = values * spread[0, :, group.at] + mean[0, :, group.at]
        x[0, :, group.at] = values.astype(x.dtype)


def _unpacked(bytes_: jax.Array, lane: jax.Array, group: Group) -> jax.Array:
    """Returns the codes of a group, int32 [tokens, 128]."""
    if group.is_second:
        bytes_ = pltpu.roll(bytes_, LANES // 2, 1)
    return jnp.where(lane < LANES // 2, bytes_ & 15, pltpu.roll((bytes_ >> 4) & 15, LANES // 2, 1))
