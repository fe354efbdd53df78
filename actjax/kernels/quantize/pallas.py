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
from actjax.formats import levels as normal
from actjax.formats import scales as group_scales
from actjax.formats.packing import PLANES
from actjax.formats.rotation import signs_row
from actjax.kernels import butterflies, limits, operands, tiles
from actjax.kernels.layer_call import pallas_call
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
    arrays = {"x": operands.rows(inputs.x)}
    if inputs.seed is not None:
        arrays["seed"] = inputs.seed
    if inputs.mean is not None:
        # As numbers, since a division for each token would cost more than larger loads.
        arrays["mean"] = operands.rows(tiles.as_float(inputs.mean))
        arrays["inverse"] = operands.rows(1 / tiles.as_float(inputs.spread))
    if inputs.channels is not None:
        arrays["position"] = operands.positions(inputs.channels, features)
    if format.rotate:
        arrays["signs"] = signs_row(features, format.group)
    return arrays


def _places(into: fmt.QuantizedCode | None) -> dict[str, Any]:
    """Returns the `Layer`s that results are written into, by name."""
    if into is None:
        return {}
    arrays = {f"plane{i}": x for i, x in enumerate(into.planes)}
    arrays |= {name: getattr(into, name) for name in ("scale", "offset", "outliers")}
    return {name: operands.rows(x) for name, x in arrays.items() if x is not None}


def _outputs(inputs: fmt.QuantizeInputs, format: fmt.Format) -> dict[str, Any]:
    """Returns the shapes of the arrays that the kernel writes, by name."""
    tokens, features = math.prod(inputs.x.shape[:-1]), inputs.x.shape[-1]
    shapes = {
        f"plane{i}": jax.ShapeDtypeStruct((tokens, -(-features * width // 8)), jnp.uint8)
        for i, width in enumerate(PLANES[format.bits])
    }
    shapes["scale"] = jax.ShapeDtypeStruct(
        (tokens, fmt.group_count(features, format.group)),
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
            values = [_value(refs, part, i, keep_whole=first) for i in range(part.slices)]
            if format.rotate:
                values = butterflies.rotate_slices(part, values, refs["signs"], format.group)
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
    size, per_byte = cut(1).size, 8 // width
    if format.rotate and size % 2 == 0:
        return cut(limits.slice_count([format], size))
    if size % 8 != 0:
        return cut(per_byte)
    return cut(max(2, per_byte if aligned else 8))


def _value(refs: dict[str, Any], part: Part, number: int, *, keep_whole: bool) -> jax.Array:
    """Returns the numbers of a slice, float32; zero where they are outliers or do not exist."""
    mask = part.exists(number)
    stored = load(refs["x"], part.token, part.feature(number), mask)
    value = stored.astype(jnp.float32)
    if "mean" in refs:
        tokens = refs["x"].shape[0]
        mean, inverse = (
            tiles.load_sequence(refs[name], part, number, tokens) for name in ("mean", "inverse")
        )
        value = (value - mean) * inverse
    if "position" not in refs:
        return value
    position = tiles.load_row(refs["position"], part, number, -1)
    if keep_whole:
        is_outlier = tiles.both(mask, position >= 0)
        # Out of bounds where masked: the interpreter writes masked entries back.
        place = jnp.where(position >= 0, position, refs["outliers"].shape[-1])
        store(refs["outliers"], part.token, place, stored, is_outlier)
    return jnp.where(position >= 0, np.float32(0), value)


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
    deviation = jnp.sqrt(_total([u * u for u in units]) * np.float32(1 / part.size))
    levels = [normal.nearest_value(over(u, deviation), format.bits) for u in units]
    squares = [_where_exists(part, i, level * level, 0) for i, level in enumerate(levels)]
    fitted = _total([u * level for u, level in zip(units, levels, strict=True)]) / _total(squares)
    return None, _rounded(fitted * largest, 0, format)


def _where_exists(part: Part, number: int, value: jax.Array, fill: float) -> jax.Array:
    mask = part.exists(number)
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
            bits = jax.lax.bitcast_convert_type(value, jnp.uint32) >> np.uint32(16)
            value = bits.astype(jnp.uint16)
        store(refs[name], part.token, part.first + part.group, value, part.groups_exist())


def _round(
    value: jax.Array, offset: Any, scale: Any, shift: jax.Array | None, format: fmt.Format
) -> jax.Array:
    """Returns the codes of numbers, int32."""
    if format.levels == "normal":
        return normal.nearest_code(over(value, scale), format.bits)
    top, position = 2**format.bits - 1, over(value - offset, scale)
    # Without a shift it is already within the levels, up to the rounding of the last line.
    if shift is not None:
        position = jnp.minimum(jnp.maximum(position + shift, np.float32(0)), np.float32(top))
    return jax.lax.bitcast_convert_type(position + _INTEGERS, jnp.int32) & top


def _store_plane(ref: Any, part: Part, width: int, codes: list[jax.Array]) -> None:
    """Writes `width` bits of each code; the slices of a byte are above each other."""
    if width == 8:
        for number, code in enumerate(codes):
            store(ref, part.token, part.feature(number), code, part.exists(number))
        return
    start = part.start * width // 8 + part.group * (part.size * width // 8)
    count = len(codes) * width // 8
    for first in range(count):
        column = start + first * part.width + part.lane
        # Numbers that do not exist were loaded as zero and have a code, which must not be stored.
        above = [
            (_code_where_exists(part, i, codes[i]) & (2**width - 1)) << (i // count * width)
            for i in range(first, len(codes), count)
        ]
        store(ref, part.token, column, functools.reduce(operator.or_, above), part.exists(first))


def _code_where_exists(part: Part, number: int, code: jax.Array) -> jax.Array:
    if min(part.width, part.size - number * part.width) == part.width:
        return code
    return jnp.where(part.place(number) < part.size, code, 0)
