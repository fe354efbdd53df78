"""Levels for normally distributed numbers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.division import over


def nearest_level(part: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of the "normal" levels that are nearest to `part / scale`, uint8."""
    position = over(part, scale)
    levels = normal_levels(bits)
    above = (position > bound for bound in (levels[1:] + levels[:-1]) / 2)
    return functools.reduce(jnp.add, (b.astype(jnp.uint8) for b in above))


def level_values(codes: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Returns the "normal" levels of codes for a scale of 1."""
    return jnp.asarray(normal_levels(bits), dtype)[codes]


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


def normal_error(bits: int) -> float:
    """Returns the mean square error of `normal_levels` for standard normal numbers."""
    levels = normal_levels(bits)
    bounds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    shares = np.diff([(1 + math.erf(b / math.sqrt(2))) / 2 for b in bounds])
    # Each level is the mean of its numbers, so the error is the variance that the levels lack.
    return float(1 - np.sum(shares * levels**2))
