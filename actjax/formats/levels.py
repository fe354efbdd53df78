"""Levels for normally distributed numbers, found and looked up bit by bit.

Registers of a kernel cannot be indexed, and a CPU takes many times longer for a lookup: each bit
selects among the levels that may follow. The levels are symmetric about zero, so magnitudes are
searched: half as many.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def nearest_code(position: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of the "normal" levels that are nearest to numbers, int32."""
    place = jnp.zeros(position.shape, jnp.int32)
    for above in _steps(position, bits):
        place = place * 2 + above.astype(jnp.int32)
    # From the middle up, or from the code below the middle down.
    half = 2 ** (bits - 1)
    return jnp.where(position > 0, half + place, half - 1 - place)


def nearest_value(position: jax.Array, bits: int) -> jax.Array:
    """Returns the "normal" levels that are nearest to numbers."""
    size = _selected(_magnitudes(bits, position.dtype), _steps(position, bits))
    return jnp.where(position > 0, size, -size)


def value_of(codes: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Returns the "normal" levels of codes for a scale of 1."""
    half = 2 ** (bits - 1)
    # The compiler for GPUs spills registers of `2 * half - 1 - codes`, which has the same low bits.
    place = jnp.where(codes < half, half - 1 - codes, codes - half)
    steps = [(place & (1 << bit)) != 0 for bit in reversed(range(bits - 1))]
    size = _selected(_magnitudes(bits, dtype), steps)
    return jnp.where(codes < half, -size, size)


def _magnitudes(bits: int, dtype: Any) -> np.ndarray:
    return normal_levels(bits)[2 ** (bits - 1) :].astype(dtype)


def _steps(position: jax.Array, bits: int) -> list[jax.Array]:
    """Returns the bits of the index of the nearest magnitude, the highest first."""
    levels, size = normal_levels(bits)[2 ** (bits - 1) :], jnp.abs(position)
    bounds = ((levels[1:] + levels[:-1]) / 2).astype(position.dtype)
    steps: list[jax.Array] = []
    for depth in range(bits - 1):
        apart = 2 ** (bits - 1 - depth)
        steps.append(size > _selected(bounds[apart // 2 - 1 :: apart], steps))
    return steps


def _selected(values: np.ndarray, steps: list[jax.Array]) -> Any:
    """Returns the value whose index has these bits, the highest first."""
    if not steps:
        return values[0]
    half = len(values) // 2
    above, below = _selected(values[half:], steps[1:]), _selected(values[:half], steps[1:])
    return jnp.where(steps[0], above, below)


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
