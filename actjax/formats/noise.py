"""Uniform random numbers that a kernel draws in registers, from a seed and their position.

They come from a counter-based generator, as in Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (2011): the numbers do not depend on the order in which they are drawn. The function is
shorter than those of the paper, since encoding has time for about ten integer operations per
number: a product mixes the counter with the seed, then follows the finalizer of MurmurHash3
(Appleby, 2011). This is enough for rounding, but not for cryptography.
"""

import jax
import jax.numpy as jnp
import numpy as np


def seed_of(key: jax.Array) -> jax.Array:
    """Returns the seed that belongs to a `jax.random` key, uint32 [2]."""
    return jax.random.bits(key, (2,), jnp.uint32)


def random_words(counter: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns 32 random bits for each counter, uint32.

    Args:
      counter: uint32 of any shape.
      first: a word of the seed, uint32.
      second: the other word.
    """
    # NumPy scalars, since a kernel cannot capture constants that are JAX arrays.
    x = (counter ^ first) * np.uint32(0x9E3779B1)
    # x ^ (x >> 16) after `x ^= second`; a GPU takes three terms at once.
    x = (x ^ (x >> np.uint32(16)) ^ (second ^ (second >> np.uint32(16)))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two uniform numbers in (-1/2, 1/2) for each word, float32.

    Each has 16 bits and is the middle of its interval, so that the mean is zero.
    """
    low, high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    return _centered(low), _centered(high)


def _centered(sixteen_bits: jax.Array) -> jax.Array:
    # GPUs convert signed integers to floats faster than unsigned ones.
    number = sixteen_bits.astype(jnp.int32).astype(jnp.float32)
    return number * np.float32(2**-16) + np.float32(2**-17 - 0.5)


def uniform(seed: jax.Array, tokens: int, groups: int, size: int) -> jax.Array:
    """Returns uniform numbers in (-1/2, 1/2) for groups of features, [tokens, groups, size].

    The two halves of a group share words: features `j` and `j + ceil(size / 2)`.

    Args:
      seed: uint32 [2].
      tokens: T.
      groups: number of groups.
      size: features of a group.
    """
    half = -(-size // 2)
    shape = (tokens, groups, half)
    token, group, place = (jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in range(3))
    counter = (token * np.uint32(groups) + group) * np.uint32(half) + place
    low, high = halves(random_words(counter, seed[0], seed[1]))
    return jnp.concatenate([low, high], axis=-1)[..., :size]
