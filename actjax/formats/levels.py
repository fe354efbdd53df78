"""Levels for normally distributed numbers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.precision import over


def nearest_level(part: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of the "normal" levels that are nearest to `part / scale`, uint8."""
    position = over(part, scale)
    levels, half = normal_levels(bits), 2 ** (bits - 1)
    bounds = tuple((levels[1:] + levels[:-1])[half:] / 2)
    # The levels are symmetric about zero. The place among those of one sign is found bit by bit.
    size = jnp.abs(position)
    steps: list[jax.Array] = []
    for _ in range(bits - 1):
        steps.append(size > _middle(bounds, steps))
    place = sum((bit.astype(jnp.int32) << i for i, bit in enumerate(reversed(steps))), 0)
    return jnp.where(position > 0, half + place, half - 1 - place).astype(jnp.uint8)


def level_values(codes: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Returns the "normal" levels of codes for a scale of 1."""
    half = 2 ** (bits - 1)
    positive = codes >= half
    place = jnp.where(positive, codes, 2 * half - 1 - codes).astype(jnp.uint8)
    # Selected by the bits of the place: a CPU takes many times longer for a lookup.
    steps = [((place >> i) & 1).astype(bool) for i in reversed(range(bits - 1))]
    size = _leaf(tuple(normal_levels(bits)[half:]), steps)
    return jnp.where(positive, size, -size).astype(dtype)


def _middle(bounds: tuple[float, ...], bits: list[jax.Array]) -> Any:
    """Returns the bound in the middle of those that the bits known so far leave, an odd number."""
    middle = len(bounds) // 2
    if not bits:
        return bounds[middle]
    above, below = bounds[middle + 1 :], bounds[:middle]
    return jnp.where(bits[0], _middle(above, bits[1:]), _middle(below, bits[1:]))


def _leaf(values: tuple[float, ...], bits: list[jax.Array]) -> Any:
    """Returns the value that the bits choose, most significant first."""
    if not bits:
        return values[0]
    half = len(values) // 2
    return jnp.where(bits[0], _leaf(values[half:], bits[1:]), _leaf(values[:half], bits[1:]))


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
    """Returns the `2^bits` levels of least mean square error for standard normal numbers.

    Lloyd, "Least squares quantization in PCM" (1982): each level is the mean of the numbers that
    are rounded to it.
    """
    count = 2**bits
    levels = np.sqrt(2) * np.linspace(-1.5, 1.5, count)
    for _ in range(2000):
        bounds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-(bounds**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([(1 + math.erf(b / math.sqrt(2))) / 2 for b in bounds])
        levels = -np.diff(density) / np.diff(below)
    # Without what is left of rounding errors, levels are symmetric about zero.
    return (levels - levels[::-1]) / 2
