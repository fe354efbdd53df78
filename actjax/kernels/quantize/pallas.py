"""`quantize` in one pass: a program reads a tile, fits its scales, and writes bytes."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

from actjax._math.precision import over
from actjax.formats import code as fmt
from actjax.formats import scales as group_scales
from actjax.formats.levels import index_terms
from actjax.formats.packing import PLANES
from actjax.formats.rotation import signs_row
from actjax.kernels import butterflies, limits, operands, tiles
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import rows
from actjax.kernels.tiles import Part, load, store

_INTEGERS = np.float32(2**23)
"""Adding it to a smaller number rounds that number to an integer, and ties to an even one."""


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    return limits.refuses([format], inputs.x.dtype, inputs.x.shape)


def quantize(
    inputs: fmt.QuantizeInputs,
    *,
    format: fmt.Format,
    interpret: bool = False,
    into: fmt.QuantizedCode | None = None,
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`; `into` as for `Computation.compute`."""
    features, lead = inputs.x.shape[-1], inputs.x.shape[:-1]
    arguments, outputs = _arguments(inputs, format), _outputs(inputs, format)
    outputs |= _places(into)
    grid = tiles.grid_of(math.prod(lead), features, format.group, interpret=interpret)

    def kernel(*refs: Any) -> None:
        named = dict(zip((*arguments, *outputs), refs, strict=True))
        grid.run(functools.partial(_encode, named, features, format))

    results = pallas_call(
        kernel,
        grid=grid.programs,
        out_shape=tuple(outputs.values()),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_quantize",
    )(*arguments.values())
    named = dict(zip(outputs, results, strict=True))
    named = {name: y.reshape(*lead, y.shape[-1]) for name, y in named.items()}
    return fmt.QuantizedCode(
        planes=tuple(named[f"plane{i}"] for i in range(len(PLANES[format.bits]))),
        scale=named["scale"],
        features=features,
        dtype=jnp.dtype(inputs.x.dtype),
        format=format,
        offset=named.get("offset"),
        outliers=named.get("outliers"),
        channels=inputs.channels,
        seed=inputs.seed if format.rounding == "dither" else None,
    )


def _arguments(inputs: fmt.QuantizeInputs, format: fmt.Format) -> dict[str, jax.Array]:
    """Returns the arrays that the kernel reads, by name."""
    features = inputs.x.shape[-1]
    arrays = {"x": rows(inputs.x)}
    if inputs.seed is not None:
        arrays["seed"] = inputs.seed
    if inputs.mean is not None:
        # As numbers, since a division for each token would cost more than larger loads.
        arrays["mean"] = rows(tiles.as_float(inputs.mean))
        arrays["inverse"] = rows(1 / tiles.as_float(inputs.spread))
    if inputs.channels is not None:
        arrays["position"] = operands.positions(inputs.channels, features)
    if format.rotate:
        arrays["signs"] = signs_row(format.group)
    return arrays


def _places(into: fmt.QuantizedCode | None) -> dict[str, Any]:
    """Returns the `Layer`s that results are written into, by name."""
    if into is None:
        return {}
    arrays = {f"plane{i}": x for i, x in enumerate(into.planes)}
    arrays |= {name: getattr(into, name) for name in ("scale", "offset", "outliers")}
    return {name: rows(x) for name, x in arrays.items() if x is not None}


def _outputs(inputs: fmt.QuantizeInputs, format: fmt.Format) -> dict[str, Any]:
    """Returns the shapes of the arrays that the kernel writes, by name."""
    tokens = math.prod(inputs.x.shape[:-1])
    groups = fmt.group_count(inputs.x.shape[-1], format.group)
    shapes = {
        f"plane{i}": jax.ShapeDtypeStruct((tokens, groups * format.group * width // 8), jnp.uint8)
        for i, width in enumerate(PLANES[format.bits])
    }
    shapes["scale"] = jax.ShapeDtypeStruct(
        (tokens, groups),
        jnp.float32 if format.scale_dtype == "float32" else jnp.uint16,
    )
    if format.levels == "uniform":
        shapes["offset"] = shapes["scale"]
    if inputs.channels is not None:
        outliers = (tokens, inputs.channels.shape[0])
        shapes["outliers"] = jax.ShapeDtypeStruct(outliers, inputs.x.dtype)
    return shapes


def _encode(
    refs: dict[str, Any], features: int, format: fmt.Format, cut: Callable[[int], Part]
) -> None:
    """Encodes the groups of a program, plane by plane, each in its own number of slices."""
    offset = scale = part = None
    codes: list[jax.Array] = []
    below = 0
    aligned = features * refs["x"].dtype.itemsize % 16 == 0
    for number, width in enumerate(PLANES[format.bits]):
        sliced = _cut(cut, width, aligned, format)
        if part is None or part.slices != sliced.slices:
            part, first = sliced, number == 0
            values = [_value(refs, part, i, format, keep_whole=first) for i in range(part.slices)]
            if format.rotate:
                values = butterflies.rotate_slices(part, values, refs["signs"])
            if first:
                offset, scale = _fit(part, values, format)
                _store_scales(refs, part, offset, scale, format)
            shift = None
            if "seed" in refs:
                shift = operands.shifts(part, refs["seed"], features, format.group)
            codes = [
                _round(value, offset, scale, None if shift is None else shift(i), format)
                for i, value in enumerate(values)
            ]
        _store_plane(refs[f"plane{number}"], part, width, [code >> below for code in codes])
        below += width


def _cut(cut: Callable[[int], Part], width: int, aligned: bool, format: fmt.Format) -> Part:
    """Returns the part in the slices for a plane: those that share a byte, or a multiple of them.

    There are at least two slices, which share random words. Where rows are not aligned, a thread
    reads one number at a time; more slices then give a thread more of a group, and less to
    exchange. Rotated blocks are cut for all planes at once.
    """
    if format.rotate:
        return cut(limits.slice_count([format], cut(1).size))
    return cut(max(2, 8 // width if aligned else 8))


def _value(
    refs: dict[str, Any], part: Part, number: int, format: fmt.Format, *, keep_whole: bool
) -> jax.Array:
    """Returns the numbers of a slice, as `actjax.formats.scales.prepare` rotates them, float32."""
    exists, held, column = part.exists(number), part.is_held(number), part.feature(number)
    if part.features % part.size:
        # Groups are filled up with the last number.
        column = jnp.minimum(column, part.features - 1)
    stored = load(refs["x"], part.token, column, held)
    value = stored.astype(jnp.float32)
    if "mean" in refs:
        sequence = part.token // (refs["x"].shape[0] // refs["mean"].shape[0])
        mean, inverse = (load(refs[name], sequence, column, held) for name in ("mean", "inverse"))
        value = (value - mean) * inverse
    if "position" in refs:
        row = jnp.zeros((1, 1, 1), jnp.int32)
        position = load(refs["position"], row, column, held, -1)
        if keep_whole:
            is_outlier = position >= 0 if exists is None else (position >= 0) & exists
            # Out of bounds where masked: the interpreter writes masked entries back.
            place = jnp.where(is_outlier, position, refs["outliers"].shape[-1])
            store(refs["outliers"], part.token, place, stored, is_outlier)
        value = jnp.where(position >= 0, np.float32(0), value)
    if format.levels == "uniform" and not format.rotate:
        return value
    if exists is not None:
        value = jnp.where(jnp.broadcast_to(exists, value.shape), value, np.float32(0))
    if format.rotate and format.rounding == "nearest":
        value = value.astype(jnp.bfloat16).astype(jnp.float32)
    return value


def _fit(
    part: Part, values: list[jax.Array], format: fmt.Format
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the offset (or None) and the scale of each group, [tokens, groups, 1], float32.

    As `actjax.formats.scales.fit`.
    """
    if format.levels == "uniform":
        offset = _least([_where_exists(part, i, v, np.inf) for i, v in enumerate(values)])
        high = _largest([_where_exists(part, i, v, -np.inf) for i, v in enumerate(values)])
        offset = _rounded(offset, -1, format)
        return offset, _rounded((high - offset) / np.float32(2**format.bits - 1), 1, format)
    largest = _largest([jnp.abs(v) for v in values])
    units = [over(v, largest) for v in values]
    return None, jnp.sqrt(_total([u * u for u in units]) * np.float32(1 / part.size)) * largest


def _where_exists(part: Part, number: int, value: jax.Array, fill: float) -> jax.Array:
    mask = part.is_held(number)
    if mask is None:
        return value
    return jnp.where(jnp.broadcast_to(mask, value.shape), value, np.float32(fill))


def _largest(values: list[jax.Array]) -> jax.Array:
    return jnp.max(functools.reduce(jnp.maximum, values), axis=2, keepdims=True)


def _least(values: list[jax.Array]) -> jax.Array:
    return jnp.min(functools.reduce(jnp.minimum, values), axis=2, keepdims=True)


def _total(values: list[jax.Array]) -> jax.Array:
    return jnp.sum(functools.reduce(jnp.add, values), axis=2, keepdims=True)


def _rounded(scale: jax.Array, towards: int, format: fmt.Format) -> jax.Array:
    """As `actjax.formats.scales.rounded_scale`, for bfloat16 and float32."""
    if format.scale_dtype == "float32":
        return scale
    rounded = _to_bfloat16(scale)
    if towards == 0:
        return rounded
    moved = _to_bfloat16(scale + np.float32(towards * 2.0**-8) * jnp.abs(scale))
    slack = np.float32(group_scales.SLACK if towards > 0 else 0) * jnp.abs(scale)
    return jnp.where((rounded - scale) * np.float32(towards) < -slack, moved, rounded)


def _to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds to the nearest number with the upper half of the bits, and ties to an even one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = jax.lax.bitcast_convert_type((bits + half) & np.uint32(0xFFFF0000), jnp.float32)
    # The NaN of a GPU has all bits set, so that it would overflow to zero.
    return jnp.where(x == x, rounded, x)


def _store_scales(
    refs: dict[str, Any], part: Part, offset: jax.Array | None, scale: jax.Array, format: fmt.Format
) -> None:
    for name, value in (("offset", offset), ("scale", scale)):
        if value is None:
            continue
        if format.scale_dtype == "bfloat16":
            value = _to_bfloat16(value)
            bits = jax.lax.bitcast_convert_type(value, jnp.uint32) >> np.uint32(16)
            value = bits.astype(jnp.uint16)
        store(refs[name], part.token, part.group, value, part.groups_exist())


def _round(
    value: jax.Array, offset: Any, scale: Any, shift: jax.Array | None, format: fmt.Format
) -> jax.Array:
    """Returns the codes of numbers, int32."""
    top = 2**format.bits - 1
    if format.levels == "normal":
        ratio = over(value, scale)
        square, (a, b, c) = ratio * ratio, map(np.float32, index_terms(format.bits))
        place = np.float32(0.5) + ratio * (a + square * (b + square * c))
        place = jnp.minimum(jnp.maximum(place, np.float32(0)), np.float32(1))
        number = place * np.float32(top) + _INTEGERS
        return jax.lax.bitcast_convert_type(number, jnp.int32) & top
    position = over(value - offset, scale)
    # Without a shift it is already within the levels, up to the rounding of the last line.
    if shift is not None:
        position = jnp.minimum(jnp.maximum(position + shift, np.float32(0)), np.float32(top))
    return jax.lax.bitcast_convert_type(position + _INTEGERS, jnp.int32) & top


def _store_plane(ref: Any, part: Part, width: int, codes: list[jax.Array]) -> None:
    """Writes `width` bits of each code; the slices of a byte are above each other."""
    size = part.size * width // 8
    count = len(codes) * width // 8
    for first in range(count):
        column = part.group * size + first * part.width + part.lane
        above = [
            (codes[i] & (2**width - 1)) << (i // count * width)
            for i in range(first, len(codes), count)
        ]
        store(ref, part.token, column, functools.reduce(operator.or_, above), part.groups_exist())
