"""The definition of `adam_4bit`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax.kernels.blockwise import largest_of_blocks, largest_of_steps
from actjax.kernels.four_bit import RankOneFourBit, SignedFourBit

TILE = 256
"""Columns of which `maxima` takes the maximum."""


def maxima(grad: jax.Array, nu: RankOneFourBit, *, b2: float) -> tuple[jax.Array, jax.Array]:
    """As `actjax.kernels.adam_4bit.api.maxima`."""
    # Apart from the second pass: otherwise XLA for CPUs writes the new moment to memory.
    grad, nu = jax.lax.optimization_barrier((grad, nu))
    second = _second(grad.astype(jnp.float32), nu, b2)
    return largest_of_blocks(second, TILE), largest_of_steps(second)


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    rows: jax.Array,
    columns: jax.Array,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> tuple[jax.Array, SignedFourBit, RankOneFourBit]:
    """As `actjax.kernels.adam_4bit.api.adam_4bit`, with the largest values of the new `nu`."""
    g = grad.astype(jnp.float32)
    first = b1 * mu.decode().astype(jnp.float32) + (1 - b1) * g
    second = _second(g, nu, b2)
    root = jnp.sqrt(second / corrections[1] + eps_root)
    update = (first / corrections[0]) / (root + eps)
    return update, mu.encode(first), nu.encode_with(rows, columns, second)


def _second(g: jax.Array, nu: RankOneFourBit, b2: float) -> jax.Array:
    return b2 * nu.decode().astype(jnp.float32) + (1 - b2) * (g * g)
