"""Rotation of groups that a kernel holds in registers, as `actjax.formats.rotation` defines it.

Sylvester's matrix of a group of `2^n` numbers is a product of `n` factors. Each replaces pairs of
numbers, a power of two apart, by their sum and their difference: the fast Walsh-Hadamard transform
(Fino and Algazi, 1976). Most pairs are in two slices of a group, at the same place, so that a
thread holds both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.kernels.tiles import Part, load


def rotate_slices(part: Part, values: list[jax.Array], signs: Any) -> list[jax.Array]:
    """Returns the slices of groups, rotated.

    Args:
      part: groups in the slices of `actjax.kernels.limits.slice_count`.
      values: numbers of each slice, float32.
      signs: reference to the result of `actjax.formats.rotation.signs_row`.
    """
    signed = [v * _signs(part, signs, n) for n, v in enumerate(values)]
    unit = _unit(part)
    return [v * unit for v in _transformed(part, signed)]


def rotate_slices_back(part: Part, values: list[jax.Array], signs: Any) -> list[jax.Array]:
    """Returns the argument of `rotate_slices`; its inverse."""
    unit, values = _unit(part), _transformed(part, values)
    return [v * (unit * _signs(part, signs, n)) for n, v in enumerate(values)]


def _unit(part: Part) -> np.float32:
    return np.float32(1) / np.sqrt(np.float32(part.size))


def _signs(part: Part, signs: Any, number: int) -> jax.Array:
    """Returns the signs of a slice, [1, 1, lanes]."""
    return load(signs, jnp.zeros((1, 1, 1), jnp.int32), part.place(number), None)


def _transformed(part: Part, values: list[jax.Array]) -> list[jax.Array]:
    """Returns the products of groups with Sylvester's matrix."""
    values = list(values)
    apart = 1
    while apart < part.slices:
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
