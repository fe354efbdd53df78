"""Rounding of float32 sums to bfloat16 weights, by their bits.

A bfloat16 number is a float32 number whose lower 16 bits are zero. Without their signs, the bits of
floats are integers in the order of the values. Adding to these integers and cutting lower bits off
therefore rounds to a neighbor everywhere: at powers of two, where the spacing changes, among
subnormals, and from zero. Only the step from the largest finite number to infinity is excluded.

Every result is cut by a mask before it is converted. XLA may drop a conversion to bfloat16 and back
("excess precision"), which changes nothing in a number that bfloat16 represents.

Sums are those of the device: XLA for CPUs replaces subnormal sums, below 1.2e-38, with zero.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.noise import random_words

_SIGN = np.uint32(0x8000_0000)
_UPPER_16 = np.uint32(0xFFFF_0000)
_LARGEST = np.uint32(0x7F7F_0000).view(np.float32)
"""The largest finite bfloat16."""


def words_by_position(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Returns 32 random bits for each element of an array, uint32.

    They depend on the seed and on the position in the whole array, in row-major order, and so not
    on how the array is sharded. Each element has its own word: to share a word between two elements
    costs more than to compute it, as the elements would be far apart or interleaved.

    Args:
      shape: of the array.
      seed: uint32 [2].
    """
    counter = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        counter += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return random_words(counter, seed[0], seed[1])


def round_stochastically(x: jax.Array, words: jax.Array) -> jax.Array:
    """Returns a neighbor in bfloat16 of each number: the nearer, the more often.

    16 random bits are added to the lower 16 bits, which are then cut off. The upper neighbor comes
    with a probability of exactly the distance from the lower one, in spacings: the mean over the
    random bits is `x`. A number that bfloat16 represents stays, and so do infinities. A finite
    number stays finite. A zero has no sign.

    Args:
      x: sums in float32.
      words: random bits, uint32, in the shape of `x`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Others become their upper halves: infinity, a finite number beyond the largest, and NaN, which
    # is quiet in a sum.
    bits = jnp.where(jnp.abs(x) < _LARGEST, bits + (words >> 16), bits) & _UPPER_16
    bits = jnp.where(bits == _SIGN, 0, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns an update, float32, with which `old + update`, rounded to nearest, is `new`.

    `new` is a neighbor in bfloat16 of `old + u`, a sum in float32. Exceptions: differences below
    1.2e-38, if the device replaces subnormal numbers with zero, so that weights below 3e-36 may
    stay; and differences above 3.4e38, which float32 does not represent.

    Args:
      new: bfloat16.
      old: bfloat16.
    """
    # If |new| >= |old| / 2, then the difference, at most 3 |new|, and the sum with it are off by at
    # most half a last place each, 2^-24 of their size: together by less than 2^-21 |new|. Numbers
    # up to 2^-9 |new| from `new` are rounded to it.
    #
    # Otherwise the difference is exact, and so is the sum with it:
    # - The sum s = old + u is exact (Sterbenz's lemma), because |s| <= |old| / 2.
    # - Let 2^k be the power of two with 2^k <= |new - old| < 2^(k + 1), and 2^e that of `old`, so
    #   that `old` is a multiple of 2^(e - 7), and k is e - 1, e or e + 1. The number at distance
    #   2^k from `old`, on the side of `new`, is a bfloat16. No rounding passes it: either `new` is
    #   this number, and the difference 2^k, or |u| >= 2^k.
    # - Then u is a multiple of 2^(k - 23), and therefore s, its neighbor `new`, and `new - old`,
    #   which is below 2^(k + 1) and so has at most 24 bits.
    #
    # The comparison is for infinities: one minus itself would be NaN.
    return jnp.where(new == old, 0, new.astype(jnp.float32) - old.astype(jnp.float32))
