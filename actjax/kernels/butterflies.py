"""Rotation of groups that a kernel holds in registers, as `actjax.kernels.rotation` defines it.

Sylvester's matrix of a block of `2^n` numbers is a product of `n` factors. Each replaces pairs of
numbers, a power of two apart, by their sum and their difference: the fast Walsh-Hadamard transform
(Fino and Algazi, 1976). Most pairs are in two slices of a group, at the same place, so that a
thread holds both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.kernels import format as fmt
from actjax.kernels.rotation import block_size, signs_of
from actjax.kernels.tiles import Part, load

_LANES = 32
"""Numbers of a slice of a whole block, if its bytes allow."""
_MOST_SLICES = 32
"""Slices whose numbers fit the registers."""


def slices_of(size: int, least: int) -> int:
    """Returns the number of slices to read a group in, so that it can be rotated.

    A slice lies within a block, and has a power of two of numbers. In a group of an odd size, a
    block is a number, and any slices do.

    Args:
      size: features of the group.
      least: least number of slices of a block, a power of two.
    """
    block = block_size(size)
    if block == 1:
        return least
    return max(least, min(16, block // _LANES)) if block == size else size // block * least


def refuses(features: int, group: int, least: int) -> str | None:
    """Returns why a kernel cannot rotate the groups of a token; None if it can.

    Args:
      features: d.
      group: features of a whole group, a power of two from 16.
      least: as for `slices_of`.
    """
    size = features % group
    block = block_size(size)
    if block <= 1 or (block >= least and slices_of(size, least) <= _MOST_SLICES):
        return None
    return (
        f"rotates last groups of an odd size or of up to {_MOST_SLICES // least} blocks, powers of"
        f" two from {least}, got a last group of {size} features"
    )


def signs_row(features: int, group: int) -> jax.Array:
    """Returns the signs of a whole group, then those of a smaller last one, float32 [1, n]."""
    rows = [signs_of(segment.size) for segment in fmt.segments(features, group)]
    return jnp.asarray(np.concatenate(rows)[None], jnp.float32)


def rotate(part: Part, values: list[jax.Array], signs: Any, group: int) -> list[jax.Array]:
    """Returns the slices of groups, rotated.

    Args:
      part: groups in the slices of `slices_of`.
      values: numbers of each slice, float32.
      signs: reference to the result of `signs_row`.
      group: features of a whole group.
    """
    signed = [v * _signs(part, signs, group, n) for n, v in enumerate(values)]
    unit = _unit(part)
    return [v * unit for v in _transformed(part, signed)]


def rotate_back(part: Part, values: list[jax.Array], signs: Any, group: int) -> list[jax.Array]:
    """Returns the argument of `rotate`; its inverse."""
    unit, values = _unit(part), _transformed(part, values)
    return [v * (unit * _signs(part, signs, group, n)) for n, v in enumerate(values)]


def _unit(part: Part) -> np.float32:
    return np.float32(1) / np.sqrt(np.float32(block_size(part.size)))


def _signs(part: Part, signs: Any, group: int, number: int) -> jax.Array:
    """Returns the signs of a slice, [1, 1, lanes]."""
    begin = group if part.first else 0
    mask = None if part.width == part.lane.shape[-1] else part.place(number) < part.size
    return load(signs, jnp.zeros((1, 1, 1), jnp.int32), begin + part.place(number), mask)


def _transformed(part: Part, values: list[jax.Array]) -> list[jax.Array]:
    """Returns the products of blocks with Sylvester's matrices."""
    block = block_size(part.size)
    if block == 1:
        return values
    values = list(values)
    apart = 1
    while apart < block // part.width:
        for i in range(len(values)):
            if i & apart == 0:
                a, b = values[i], values[i + apart]
                values[i], values[i + apart] = a + b, a - b
        apart *= 2
    apart = 1
    while apart < part.width:
        values = [_pairs_of_lanes(value, apart, part.interpret) for value in values]
        apart *= 2
    return values


def _pairs_of_lanes(x: jax.Array, apart: int, interpret: bool) -> jax.Array:
    """Returns the sum and the difference of each pair of lanes that are `apart`."""
    pairs = x.reshape(x.size // (2 * apart), 2, apart)
    other = pairs[:, ::-1] if interpret else _exchanged(pairs)
    second = jax.lax.broadcasted_iota(jnp.int32, (1, 2, 1), 1) == 1
    return (other + jnp.where(second, -pairs, pairs)).reshape(x.shape)


def _exchanged(pairs: jax.Array) -> jax.Array:
    """Returns the other number of each pair [n, 2, lanes], float32.

    Triton exchanges numbers between threads only by reductions. A sum of integers is exact, so that
    it gives the bits of the other number. XLA, which may compute a number once for the sum and once
    for the difference, with other roundings, would find other bits.
    """
    bits = jax.lax.bitcast_convert_type(pairs, jnp.int32)
    other = jnp.sum(bits, axis=1, keepdims=True) - bits
    return jax.lax.bitcast_convert_type(other, jnp.float32)
