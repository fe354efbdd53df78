"""The definition of `adam_4bit`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import largest_of_blocks, largest_of_steps
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit

TILE = 256
"""Columns of which `maxima` takes the maximum."""


def maxima(
    grad: jax.Array, mu: SignedFourBit, nu: RankOneFourBit, *, b1: float, b2: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `actjax.kernels.adam_4bit.api.MAXIMA`."""
    # Apart from the second pass: otherwise XLA for CPUs writes the new moments to memory.
    grad, mu, nu = jax.lax.optimization_barrier((grad, mu, nu))
    g = grad.astype(jnp.float32)
    first, second = _first(g, mu, b1), _second(g, nu, b2)
    return (
        *(largest_of_blocks(first, TILE), largest_of_steps(first)),
        *(largest_of_blocks(second, TILE), largest_of_steps(second)),
    )


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    mu_rows: jax.Array,
    mu_columns: jax.Array,
    nu_rows: jax.Array,
    nu_columns: jax.Array,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> tuple[jax.Array, SignedFourBit, RankOneFourBit]:
    """As `actjax.kernels.adam_4bit.api.adam_4bit`, with the largest values of new moments."""
    g = grad.astype(jnp.float32)
    first, second = _first(g, mu, b1), _second(g, nu, b2)
    root = jnp.sqrt(second / corrections[1] + eps_root)
    update = (first / corrections[0]) / (root + eps)
    new_mu = mu.encode_with(mu_rows, mu_columns, first)
    return update, new_mu, nu.encode_with(nu_rows, nu_columns, second)


def _first(g: jax.Array, mu: SignedFourBit, b1: float) -> jax.Array:
    return b1 * mu.decode().astype(jnp.float32) + (1 - b1) * g


def _second(g: jax.Array, nu: RankOneFourBit, b2: float) -> jax.Array:
    return b2 * nu.decode().astype(jnp.float32) + (1 - b2) * (g * g)
