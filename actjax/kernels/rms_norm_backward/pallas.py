"""`rms_norm_backward` in one pass: rows are decoded in registers, and stay there."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.formats.code import QuantizedCode
from actjax.kernels import limits, operands, tiles
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import rows, value_of

_LARGEST = 16384
"""Features of a row that registers can hold."""
_PROGRAMS = 528
"""Largest number of programs, which a large GPU runs at once; each processes a run of rows.

Each program writes a gradient of the scale."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of an array, and how a program reads them.

    Attributes:
      tokens: T.
      features: d.
      size: features of a group.
      slices: number of slices of a group.
      count: rows of a program.
      interpret: whether XLA runs the program, not Triton.
    """

    tokens: int
    features: int
    size: int
    slices: int
    count: int
    interpret: bool

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return pl.cdiv(self.features, self.size)

    def part(self, token: Any, tokens: int | None = None) -> tiles.Part:
        """Returns the part of one row."""
        padded = pl.next_power_of_2(self.groups)
        group = jax.lax.broadcasted_iota(jnp.int32, (1, padded, 1), 1)
        groups = self.groups if padded > self.groups else None
        return tiles.Part(
            token, tokens, group, groups, self.size, self.features, self.slices, self.interpret
        )


def refuses(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    **options: Any,
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del scale, addend, options
    features = dy.shape[-1]
    if features > _LARGEST:
        return f"holds whole rows, of up to {_LARGEST} features, got {features}"
    return limits.refuses_operand(x, dy.shape)


def rms_norm_backward(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    *,
    eps: float,
    with_value: bool,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.rms_norm_backward.api.rms_norm_backward`."""
    features, tokens = dy.shape[-1], math.prod(dy.shape[:-1])
    arrays, bind = operands.operands(x)
    group, formats = limits.group_of(x), [x.format] if isinstance(x, QuantizedCode) else []
    slices = limits.slice_count(formats, group)
    count = pl.cdiv(tokens, _PROGRAMS)
    layout = _Rows(tokens, features, group, slices, count, interpret)
    programs = pl.cdiv(tokens, layout.count)

    addends = [] if addend is None else [rows(addend)]

    def kernel(*refs: Any) -> None:
        read, others = bind(*refs[: len(arrays)]), refs[len(arrays) :]
        addend_ref = others[2] if addends else None
        _run(layout, read, (*others[:2], *others[2 + len(addends) :]), addend_ref, eps)

    shape = jax.ShapeDtypeStruct((tokens, features), x.dtype)
    sums = jax.ShapeDtypeStruct((programs, features), jnp.float32)
    *value, dx, dscale = pallas_call(
        kernel,
        grid=(programs,),
        out_shape=(*[shape] * with_value, shape, sums),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(features), num_stages=1),
        interpret=interpret,
        name="actjax_rms_norm_backward",
    )(*arrays, value_of(scale)[None], rows(dy), *addends)
    dscale = jnp.sum(dscale, axis=0).astype(scale.dtype)
    return value[0].reshape(dy.shape) if value else None, dx.reshape(dy.shape), dscale


def _run(rows: _Rows, read: Any, refs: Sequence[Any], addend_ref: Any, eps: float) -> None:
    """Computes the rows of a program, and the sum of their gradients of the scale."""
    scale_ref, dy_ref, *value_refs, dx_ref, dscale_ref = refs
    first = pl.program_id(0) * rows.count
    row = rows.part(jnp.zeros((1, 1, 1), jnp.int32))
    numbers = range(rows.slices)
    factors = [tiles.load_row(scale_ref, row, n).astype(jnp.float32) for n in numbers]

    def one_row(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        token = jnp.full((1, 1, 1), first + i, jnp.int32)
        part = rows.part(token, rows.tokens if rows.tokens % rows.count else None)
        units, cotangents, dxs = _row_gradients(part, read, dy_ref, factors, eps, rows.features)
        for n in numbers:
            place, mask = (token, part.feature(n)), part.exists(n)
            for value_ref in value_refs:
                tiles.store(value_ref, *place, units[n] * factors[n], mask)
            dx = dxs[n].astype(dx_ref.dtype)
            if addend_ref is not None:
                dx += tiles.load(addend_ref, *place, mask).astype(dx.dtype)
            tiles.store(dx_ref, *place, dx, mask)
        return tuple(s + dy * u for s, dy, u in zip(sums, cotangents, units, strict=True))

    shape = (1, *row.group.shape[1:2], row.lane.shape[-1])
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in numbers)
    sums = jax.lax.fori_loop(0, rows.count, one_row, zeros)
    program = jnp.full((1, 1, 1), pl.program_id(0), jnp.int32)
    for n, total in enumerate(sums):
        tiles.store(dscale_ref, program, row.feature(n), total, row.exists(n))


def _row_gradients(
    part: tiles.Part, read: Any, dy_ref: Any, factors: list[jax.Array], eps: float, features: int
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns the normalized values, `dy` and `dx` of a row, as a list of slices each."""
    masks = [part.exists(n) for n in range(part.slices)]
    # Numbers that do not exist decode to arbitrary values.
    values = _where_exists(read.decode(part), masks)
    cotangents = [
        tiles.load(dy_ref, part.token, part.feature(n), mask).astype(jnp.float32)
        for n, mask in enumerate(masks)
    ]
    mean = _total([v * v for v in values]) * np.float32(1 / features)
    inverse = jax.lax.rsqrt(mean + np.float32(eps))
    # In a row that does not exist this is NaN if `eps` is zero.
    units = _where_exists([v * inverse for v in values], masks)
    dunits = [dy * factor for dy, factor in zip(cotangents, factors, strict=True)]
    along = _total([d * u for d, u in zip(dunits, units, strict=True)])
    along = along * np.float32(1 / features)
    dxs = [inverse * (d - u * along) for d, u in zip(dunits, units, strict=True)]
    return units, cotangents, dxs


def _where_exists(values: list[jax.Array], masks: list[jax.Array | None]) -> list[jax.Array]:
    pairs = zip(values, masks, strict=True)
    return [value if mask is None else jnp.where(mask, value, 0.0) for value, mask in pairs]


def _warps(features: int) -> int:
    """Returns the warps of a program, so that a thread has about sixteen numbers of a row."""
    return min(16, max(4, pl.next_power_of_2(features) // 512))


def _total(values: list[jax.Array]) -> jax.Array:
    """Returns the sum over a row, [1, 1, 1]."""
    along_lanes = jnp.sum(functools.reduce(jnp.add, values), axis=2, keepdims=True)
    return jnp.sum(along_lanes, axis=1, keepdims=True)
