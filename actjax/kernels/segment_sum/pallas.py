"""`scaled_segment_sum` in one pass over tokens, with columns of the sum in registers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels import tiles

MOST_SEGMENTS = {2: 512, 4: 128}
"""Largest number of segments whose sums fit the registers, by the bytes of a number."""
_PROGRAMS = 264
"""Programs that keep a large GPU busy: tokens are cut into runs until there are as many."""


def scaled_segment_sum(
    index: jax.Array,
    scale: jax.Array,
    values: jax.Array,
    *,
    segments: int,
    interpret: bool = False,
) -> jax.Array:
    """As `actjax.kernels.segment_sum.api.scaled_segment_sum`."""
    width, tokens = values.shape[-1], math.prod(values.shape[:-1])
    padded = max(16, pl.next_power_of_2(segments))
    columns = min(64 if padded >= 128 else 128, max(16, pl.next_power_of_2(width)))
    tile = 64 if padded * values.dtype.itemsize <= 512 else 32
    blocks = pl.cdiv(width, columns)
    # Each run writes a sum that is read again: at most a quarter of the bytes of the values.
    few = max(1, tokens * values.dtype.itemsize // (32 * padded))
    runs = min(pl.cdiv(_PROGRAMS, blocks), pl.cdiv(tokens, tile), few)
    steps = pl.cdiv(pl.cdiv(tokens, tile), runs)
    runs = pl.cdiv(pl.cdiv(tokens, tile), steps)
    kernel = functools.partial(
        _kernel,
        tokens=tokens,
        width=width,
        padded=padded,
        columns=columns,
        tile=tile,
        steps=steps,
        precision=tiles.dot_precision(values.dtype, interpret),
    )
    partial_sums = pl.pallas_call(
        kernel,
        grid=(blocks, runs),
        out_shape=jax.ShapeDtypeStruct((runs, segments, width), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if padded * columns * values.dtype.itemsize > 16384 else 4, num_stages=3
        ),
        interpret=interpret,
        name="actjax_scaled_segment_sum",
    )(index.reshape(tokens), scale.reshape(tokens).astype(values.dtype), values.reshape(tokens, -1))
    return jnp.sum(partial_sums, axis=0)


def _kernel(
    index_ref: Any,
    scale_ref: Any,
    values_ref: Any,
    sums_ref: Any,
    *,
    tokens: int,
    width: int,
    padded: int,
    columns: int,
    tile: int,
    steps: int,
    precision: Any,
) -> None:
    column = pl.program_id(0) * columns + jnp.arange(columns)
    run = pl.program_id(1)
    segment = jnp.arange(padded)

    def add(i: Any, sums: jax.Array) -> jax.Array:
        row = (run * steps + i) * tile + jnp.arange(tile)
        there = row < tokens
        index = plgpu.load(index_ref.at[row], mask=there, other=0).astype(jnp.int32)
        scale = plgpu.load(scale_ref.at[row], mask=there, other=0)
        mask = there[:, None] & (column < width)[None, :]
        place = values_ref.at[
            jnp.broadcast_to(row[:, None], mask.shape),
            jnp.broadcast_to(column[None, :], mask.shape),
        ]
        values = plgpu.load(place, mask=mask, other=0)
        zero = jnp.zeros((), scale.dtype)
        selection = jnp.where(segment[:, None] == index[None, :], scale[None, :], zero)
        return sums + tiles.dot(selection, values, precision=precision)

    sums = jax.lax.fori_loop(0, steps, add, jnp.zeros((padded, columns), jnp.float32))
    mask = (segment < sums_ref.shape[1])[:, None] & (column < width)[None, :]
    place = sums_ref.at[
        jnp.full(mask.shape, run),
        jnp.broadcast_to(segment[:, None], mask.shape),
        jnp.broadcast_to(column[None, :], mask.shape),
    ]
    plgpu.store(place, sums, mask=mask)
