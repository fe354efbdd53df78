"""The "normal" levels of numbers that a kernel holds in registers, by a binary search.

Registers cannot be indexed, so each step selects the next bound among all that may follow. The
levels are symmetric about zero, so magnitudes are searched: half as many bounds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.levels import normal_levels


def nearest_code(position: jax.Array, bits: int) -> jax.Array:
    """Returns the codes of the levels that are nearest to numbers, int32."""
    number = jnp.zeros(position.shape, jnp.int32)
    for above in _steps(jnp.abs(position), bits):
        number = number * 2 + above.astype(jnp.int32)
    # From the middle up, or from the code below the middle down.
    half = 2 ** (bits - 1)
    return jnp.where(position > 0, half + number, half - 1 - number)


def nearest_value(position: jax.Array, bits: int) -> jax.Array:
    """Returns the levels that are nearest to numbers, float32."""
    value = _chosen(_magnitudes(bits), _steps(jnp.abs(position), bits))
    return jnp.where(position > 0, value, -value)


def value_of(code: jax.Array, bits: int) -> jax.Array:
    """Returns the levels of codes, float32."""
    half = 2 ** (bits - 1)
    number = jnp.where(code < half, half - 1 - code, code - half)
    steps = [(number & (1 << bit)) != 0 for bit in reversed(range(bits - 1))]
    value = _chosen(_magnitudes(bits), steps)
    return jnp.where(code < half, -value, value)


def _magnitudes(bits: int) -> np.ndarray:
    return normal_levels(bits)[2 ** (bits - 1) :].astype(np.float32)


def _steps(size: jax.Array, bits: int) -> list[jax.Array]:
    """Returns the bits of the index of the nearest magnitude, the highest first."""
    levels = normal_levels(bits)[2 ** (bits - 1) :]
    bounds = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
    steps: list[jax.Array] = []
    for depth in range(bits - 1):
        apart = 2 ** (bits - 1 - depth)
        steps.append(size > _chosen(bounds[apart // 2 - 1 :: apart], steps))
    return steps


def _chosen(entries: np.ndarray, steps: list[jax.Array]) -> jax.Array | np.float32:
    """Returns the entry whose index has these bits, the highest first."""
    chosen: list[jax.Array | np.float32] = list(entries)
    for step in reversed(steps):
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [jnp.where(step, high, low) for low, high in pairs]
    return chosen[0]
