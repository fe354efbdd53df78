"""`rms_norm_backward` in one pass: rows are decoded in registers, and stay there."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels import coded, tiles
from actjax.kernels.format import QuantizedCode

LARGEST = 16384
"""Features of a row that registers can hold."""
_PROGRAMS = 528
"""At most so many, each for a run of rows: what a large GPU runs at once.

Of each the gradient of the scale is written."""


def rms_norm_backward(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    *,
    eps: float,
    with_value: bool,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.rms_norm_backward.api.rms_norm_backward`."""
    features, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    arrays, bind = coded.operands(x)
    size = coded.group_of(x)
    groups = features // size
    tile_groups = pl.next_power_of_2(groups)
    rows = pl.cdiv(tokens, _PROGRAMS)
    programs = pl.cdiv(tokens, rows)
    slices = coded.slice_count([x.format.bits] if isinstance(x, QuantizedCode) else [])

    def kernel(*refs: Any) -> None:
        read = bind(*refs[: len(arrays)])
        scale_ref, dy_ref, *value_refs, dx_ref, dscale_ref = refs[len(arrays) :]
        group = jax.lax.broadcasted_iota(jnp.int32, (1, tile_groups, 1), 1)
        first = pl.program_id(0) * rows

        def part_of(token: Any, limit: int | None) -> tiles.Part:
            some = groups if tile_groups > groups else None
            return tiles.Part(token, limit, group, some, size, 0, 0, slices)

        row_part = part_of(jnp.zeros((1, 1, 1), jnp.int32), None)
        factors = [
            tiles.load_row(scale_ref, row_part, i).astype(jnp.float32) for i in range(slices)
        ]

        def one_row(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            token = jnp.full((1, 1, 1), first + i, jnp.int32)
            part = part_of(token, tokens if tokens % rows else None)
            values = read.decode(part)
            masks = [part.exists(n) for n in range(slices)]
            # What does not exist decodes to something.
            values = _where_exists(values, masks)
            cotangents = [
                tiles.load(dy_ref, token, part.feature(n), masks[n]).astype(jnp.float32)
                for n in range(slices)
            ]
            mean = _total([v * v for v in values]) * np.float32(1 / features)
            inverse = jax.lax.rsqrt(mean + np.float32(eps))
            # Of a row that does not exist this is no number where `eps` is zero.
            units = _where_exists([v * inverse for v in values], masks)
            dunits = [dy * factor for dy, factor in zip(cotangents, factors, strict=True)]
            along = _total([d * u for d, u in zip(dunits, units, strict=True)])
            along = along * np.float32(1 / features)
            for n, (unit, dunit) in enumerate(zip(units, dunits, strict=True)):
                place = token, part.feature(n)
                for value_ref in value_refs:
                    tiles.store(value_ref, *place, unit * factors[n], masks[n])
                tiles.store(dx_ref, *place, inverse * (dunit - unit * along), masks[n])
            return tuple(s + dy * u for s, dy, u in zip(sums, cotangents, units, strict=True))

        lanes = row_part.lane.shape[-1]
        zeros = tuple(jnp.zeros((1, tile_groups, lanes), jnp.float32) for _ in range(slices))
        sums = jax.lax.fori_loop(0, rows, one_row, zeros)
        program = jnp.full((1, 1, 1), pl.program_id(0), jnp.int32)
        for n, total in enumerate(sums):
            tiles.store(dscale_ref, program, row_part.feature(n), total, row_part.exists(n))

    shape = jax.ShapeDtypeStruct((tokens, features), x.dtype)
    sums = jax.ShapeDtypeStruct((programs, features), jnp.float32)
    *value, dx, dscale = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=(*[shape] * with_value, shape, sums),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(features), num_stages=1),
        interpret=interpret,
        name="actjax_rms_norm_backward",
    )(*arrays, scale[None], coded.rows(dy))
    dscale = jnp.sum(dscale, axis=0).astype(scale.dtype)
    return value[0].reshape(dy.shape) if value else None, dx.reshape(dy.shape), dscale


def _where_exists(values: list[jax.Array], masks: list[jax.Array | None]) -> list[jax.Array]:
    pairs = zip(values, masks, strict=True)
    return [value if mask is None else jnp.where(mask, value, 0.0) for value, mask in pairs]


def _warps(features: int) -> int:
    """Returns warps for about sixteen numbers of a row a thread."""
    return min(16, max(4, pl.next_power_of_2(features) // 512))


def _total(values: list[jax.Array]) -> jax.Array:
    """Returns the sum over a row, [1, 1, 1]."""
    along_lanes = jnp.sum(functools.reduce(jnp.add, values), axis=2, keepdims=True)
    return jnp.sum(along_lanes, axis=1, keepdims=True)
