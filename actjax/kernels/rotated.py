"""Codes of rotated groups that are rounded to the nearest level, for programs in Triton.

Arrays, results and constants that launches pass to functions of `actjax.kernels.rotated_tiles`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats import code as fmt
from actjax.formats.levels import index_terms, normal_levels
from actjax.formats.packing import PLANES
from actjax.formats.rotation import hadamard, signs_of
from actjax.kernels import limits
from actjax.kernels.layers import rows
from actjax.kernels.triton_call import step

GROUPS = (32, 64, 128)
"""Sizes of a group that are taken. The matrix units multiply at least 16 numbers, and the shared
memory of an RTX 4090 does not hold the matrix of 256."""


def refuses(format: fmt.Format) -> str | None:
    """Returns why the programs cannot take codes of a format; None if they can."""
    if not format.rotate or format.rounding != "nearest":
        return "takes rotated groups, rounded to the nearest level"
    if format.group not in GROUPS:
        return f"takes groups of {GROUPS} features, got group={format.group}"
    return None


def refuses_to_encode(inputs: fmt.QuantizeInputs, format: fmt.Format) -> str | None:
    """Returns why the programs cannot encode an activation; None if they can."""
    if inputs.channels is not None:
        return "takes no outlier channels"
    return refuses(format) or limits.refuses_array(inputs.x.dtype, inputs.x.shape)


@functools.cache
def matrix_of(group: int) -> np.ndarray:
    """Returns the matrix that rotates a group, [group, group], of plus and minus one.

    Divided by the root of `group` it is orthogonal.
    """
    return signs_of(group)[:, None] * hadamard(group)


def encoding(format: fmt.Format, balanced: bool, results: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the constants of `write_code` and `results_at`.

    Args:
      format: how numbers are stored.
      balanced: whether there are statistics.
      results: from `results_of`.
    """
    terms = index_terms(format.bits) if format.levels == "normal" else None
    is_wide = format.scale_dtype == "float32"
    return balanced, format.bits, PLANES[format.bits], terms, is_wide, (*map(step, results),)


def inputs_of(inputs: fmt.QuantizeInputs) -> list[Any]:
    """Returns the arrays of `quantize` for a program: tokens [T, d], means, and spreads."""
    statistics = inputs.mean, inputs.spread
    if inputs.mean is None:
        statistics = [jnp.zeros((1, 1), jnp.uint16)] * 2
    return [rows(inputs.x), *map(rows, statistics)]


def results_of(
    inputs: fmt.QuantizeInputs, format: fmt.Format, into: fmt.QuantizedCode | None
) -> list[Any]:
    """Returns the results of a program that writes a code: two planes, scales and offsets.

    The second plane, or the offsets, are a number where a code has none.

    Args:
      inputs: what is encoded.
      format: how.
      into: as for `Computation.compute`.
    """
    tokens, features = math.prod(inputs.x.shape[:-1]), inputs.x.shape[-1]
    groups = fmt.group_count(features, format.group)
    scale_dtype = jnp.float32 if format.scale_dtype == "float32" else jnp.uint16
    sizes = [groups * format.group * width // 8 for width in PLANES[format.bits]]
    shapes = [*((size, jnp.uint8) for size in sizes), *[(groups, scale_dtype)] * 2]
    results: list[Any] = [jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in shapes]
    if into is not None:
        held = (*into.planes, into.scale, into.offset)
        results = [y if z is None else rows(z) for y, z in zip(results, held, strict=True)]
    if len(results) < 4:
        results.insert(1, jax.ShapeDtypeStruct((1, 1), jnp.uint8))
    if format.levels == "normal":
        results[3] = jax.ShapeDtypeStruct((1, 1), scale_dtype)
    return results


def code_of(
    results: Sequence[Any], inputs: fmt.QuantizeInputs, format: fmt.Format
) -> fmt.QuantizedCode:
    """Returns the code that a program has written into `results_of`, without statistics."""
    lead = inputs.x.shape[:-1]
    *planes, scale, offset = results
    return fmt.QuantizedCode(
        planes=tuple(y.reshape(*lead, y.shape[-1]) for y in planes[: len(PLANES[format.bits])]),
        scale=scale.reshape(*lead, scale.shape[-1]),
        features=inputs.x.shape[-1],
        dtype=jnp.dtype(inputs.x.dtype),
        format=format,
        offset=offset.reshape(*lead, offset.shape[-1]) if format.levels == "uniform" else None,
    )


def matrix_to_encode(format: fmt.Format) -> jax.Array:
    """Returns the matrix of `encoded`, whose columns are in the order of `places_of`."""
    return jnp.asarray(matrix_of(format.group)[:, places_of(format.group)], jnp.bfloat16)


def matrix_to_decode(format: fmt.Format) -> jax.Array:
    """Returns the matrix of `decoded`, whose rows are in the order of `places_of`."""
    return jnp.asarray(matrix_of(format.group).T[places_of(format.group)], jnp.float16)


def places_of(group: int) -> np.ndarray:
    """Returns the places of rotated numbers in the order of the half bytes of a plane."""
    return np.arange(group).reshape(2, group // 2).T.reshape(-1)


@functools.cache
def lookup_of_levels(bits: int) -> str:
    """Returns the instructions of `rotated_tiles.levels_of_bytes`, for levels of normal numbers.

    A permutation of bytes is a lookup in a table of eight bytes, by the lowest three bits of four
    codes, as they stand in two bytes. Their fourth bits select among two such results. So it takes
    5 instructions for four bytes, and 8 for each two of them.
    """
    levels = np.resize(normal_levels(bits), 16).view(np.uint8).reshape(16, 2)
    low, high = ([f"0x{word:08x}" for word in byte.copy().view(np.uint32)] for byte in levels.T)
    lines = [
        ".reg .b32 code, sign, a, b, low, high",
        "and.b32 code, $4, 0x77777777",
        "shr.b32 sign, $4, 1",
        "and.b32 sign, sign, 0x44444444",
        "or.b32 sign, sign, 0x32103210",
    ]
    for half in range(2):
        if half:
            lines += ["shr.b32 code, code, 16", "shr.b32 sign, sign, 16"]
        for name, words in (("low", low), ("high", high)):
            lines += [
                f"prmt.b32 a, {words[0]}, {words[1]}, code",
                f"prmt.b32 b, {words[2]}, {words[3]}, code",
                f"prmt.b32 {name}, a, b, sign",
            ]
        # Levels of the low four bits of a byte alternate with those of the high ones.
        lines += [f"prmt.b32 ${half}, low, high, 0x6240"]
        lines += [f"prmt.b32 ${2 + half}, low, high, 0x7351"]
    return "{ " + " ".join(f"{line};" for line in lines) + " }"


def sequences(code: fmt.QuantizedCode) -> int:
    """Returns the number of sequences that have their own statistics; 1 without any."""
    return 1 if code.mean is None else code.mean.size // code.features


def operand(code: fmt.QuantizedCode) -> tuple[list[Any], tuple[Any, ...]]:
    """Returns the arrays of a code for `code_at`, and its constants."""
    planes, none = [rows(x) for x in code.planes], jnp.zeros((1, 1), jnp.uint16)
    others = (code.scale, code.offset, code.mean, code.spread)
    arrays = [*planes, none][:2] + [none if x is None else rows(x) for x in others]
    # Offsets of all rotated numbers are one number, where the matrix has a column of ones.
    first = None if code.offset is None else float(signs_of(code.format.group)[0])
    is_normal = code.format.levels == "normal"
    lookup = lookup_of_levels(code.format.bits) if is_normal else None
    steps = (*map(step, arrays),)
    return arrays, (PLANES[code.format.bits], code.mean is not None, first, steps, lookup)
