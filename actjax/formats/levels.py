"""Levels for normally distributed numbers, found by a polynomial.

Lloyd, "Least squares quantization in PCM" (1982), places `2^bits` levels so that their mean square
error for normal numbers is least. To search for the nearest one takes a comparison and a selection
for each bit, which is most of the work of encoding. But the index of the nearest level grows so
smoothly that a polynomial of three odd terms gives it, rounded. The levels are then the means of
the numbers that get the same index, so that the error is that of Lloyd's levels. Of more than four
bits, levels that reach the largest numbers of a group are better: those cut off queries and keys.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_COEFFICIENTS = {
    1: (1.0, 0.0, 0.0),
    2: (1.018746, 0.0, 0.0),
    3: (2.026386, -0.115206, 0.004490),
    4: (3.880350, -0.208317, 0.007106),
}
"""By bits: of x, x³ and x⁵. The mean square errors are those of Lloyd's levels to four digits. Each
polynomial grows everywhere."""


def index_terms(bits: int) -> tuple[float, float, float]:
    """Returns a, b and c of the code `round(top · clip(1/2 + x (a + b x² + c x⁴), 0, 1))` of `x`.

    `top` is the highest code, `2^bits - 1`, and `x` a number over the root mean square of its
    group. Ties are rounded to even codes.
    """
    a, b, c = _COEFFICIENTS[bits]
    top = 2**bits - 1
    return a / top, b / top, c / top


def code_of(x: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of numbers over the root mean square of their group, uint8."""
    top, (a, b, c) = 2**bits - 1, index_terms(bits)
    square = x * x
    place = jnp.clip(0.5 + x * (a + square * (b + square * c)), 0, 1)
    return jax.lax.round(place * top, jax.lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint8)


def value_of(codes: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Returns the levels of codes for a root mean square of 1.

    Each bit selects among the levels that may follow: a CPU takes many times longer for a lookup.
    """
    steps = [(codes & (1 << bit)) != 0 for bit in reversed(range(bits))]
    return _selected(normal_levels(bits).astype(dtype), steps)


def _selected(values: np.ndarray, steps: list[jax.Array]) -> Any:
    """Returns the value whose index has these bits, the highest first."""
    if not steps:
        return values[0]
    half = len(values) // 2
    above, below = _selected(values[half:], steps[1:]), _selected(values[:half], steps[1:])
    return jnp.where(steps[0], above, below)


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
    """Returns the level of each code, float16 [2^bits]: the mean of the normal numbers that get it.

    In 16 bits, since the matrix units of GPUs take no more. They are symmetric about zero.
    """
    top, (a, b, c) = 2**bits - 1, index_terms(bits)
    # Where the polynomial is between two codes, by bisection.
    places = (np.arange(top) + 0.5) / top - 0.5
    low, high = np.full(top, -100.0), np.full(top, 100.0)
    for _ in range(100):
        middle = (low + high) / 2
        below = middle * (a + middle**2 * (b + middle**2 * c)) < places
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    bounds = np.concatenate([[-np.inf], low, [np.inf]])
    density = np.exp(-(bounds**2) / 2) / math.sqrt(2 * math.pi)
    share = np.diff([math.erfc(-bound / math.sqrt(2)) / 2 for bound in bounds])
    levels = -np.diff(density) / share
    # The other half has rounding errors, from differences of numbers near one.
    half = len(levels) // 2
    levels = np.concatenate([levels[:half], -levels[:half][::-1]])
    return levels.astype(np.float16)
