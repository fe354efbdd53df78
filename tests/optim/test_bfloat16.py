"""Rounding to bfloat16 by bits, compared with float64 over all exponents."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

from actjax.optim.rounding.bfloat16 import difference, round_stochastically, words_by_position

COUNT = 512
LARGEST = float(jnp.finfo("bfloat16").max)
SMALLEST_NORMAL = np.float32(2.0**-126)
EDGES = np.array(
    # Zeros, subnormals, powers of two and their neighbors, the largest, infinities and NaN.
    [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0xBF7F, 0xBF80,
     0x7F7E, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1], np.uint16
)  # fmt: skip


def bfloat16_bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint16)


def weights_of(rng, count: int = COUNT) -> np.ndarray:
    """Returns bfloat16 weights of all exponents, and the edges."""
    bits = rng.integers(0, 2**16, count).astype(np.uint16)
    bits[: len(EDGES)] = EDGES
    return bits.view(jnp.bfloat16)


def updates_of(rng, weights: np.ndarray) -> np.ndarray:
    """Returns float32 updates: of all exponents, near the weight, near its negative, and zero."""
    any_bits = rng.integers(0, 2**32, weights.size).astype(np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = weights.astype(np.float32)
        scaled = wide * np.exp2(rng.integers(-30, 20, weights.size)).astype(np.float32)
        cancelling = -wide * (1 + rng.normal(size=weights.size).astype(np.float32) / 64)
    kinds = [any_bits, scaled, cancelling, np.zeros_like(wide)]
    return np.choose(rng.integers(0, 4, weights.size), kinds).astype(np.float32)


def neighbors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bfloat16 below and above finite numbers in magnitude, as float64."""
    scale = np.exp2(np.maximum(np.frexp(np.abs(x).astype(np.float64))[1] - 8, -133))
    low = np.floor(np.abs(x) / scale) * scale
    high = np.minimum(np.ceil(np.abs(x) / scale) * scale, LARGEST)
    return low, high


@jax.jit
def rounded(weights, updates, words):
    """Returns a sum, rounded in the same program, and the new weights of an optax loop."""
    total = weights.astype(jnp.float32) + updates
    new = round_stochastically(total, words)
    # If the compiler dropped the conversion to bfloat16, this would be another number.
    again = new.astype(jnp.float32)
    return total, new, again, optax.apply_updates(weights, difference(new, weights))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_sum_becomes_a_finite_neighbour_and_an_optax_loop_gets_exactly_that(seed):
    rng = np.random.default_rng(seed)
    weights = weights_of(rng)
    words = rng.integers(0, 2**32, COUNT).astype(np.uint32)
    arrays = map(np.asarray, rounded(weights, updates_of(rng, weights), words))
    total, new, again, applied = arrays
    finite = np.isfinite(total)
    np.testing.assert_array_equal(again.view(np.uint32), bfloat16_bits(new).astype(np.uint32) << 16)
    size = np.abs(again[finite].astype(np.float64))
    low, high = neighbors(total[finite].astype(np.float64))
    assert np.all((size == low) | (size == high))
    same_sign = np.signbit(again[finite]) == np.signbit(total[finite])
    assert np.all(same_sign | (size == 0))
    np.testing.assert_array_equal(again[~finite], total[~finite])
    with np.errstate(invalid="ignore"):
        weights, new, applied = (x.astype(np.float64) for x in (weights, new, applied))
        gap = np.abs(new - weights)
    # The exceptions that the docstring of `difference` names.
    excepted = ((gap > 0) & (gap < SMALLEST_NORMAL)) | (gap > np.finfo("float32").max)
    compared = ~excepted | ~np.isfinite(new)
    np.testing.assert_array_equal(applied[compared], new[compared])


def test_the_upper_neighbour_comes_as_often_as_its_share_of_the_distance():
    # All 2^8 values of the upper random bits, at each 1/2^8 of the spacing.
    steps, noise = np.arange(2**8, dtype=np.uint32) << 8, np.arange(2**8, dtype=np.uint32) << 24
    for start in (0x3F80, 0x3F7F, 0xC2FF, 0x0080):
        np.testing.assert_array_equal(is_upper(start, steps[:, None], noise).sum(1), steps >> 8)
    # And the lower random bits.
    steps, noise = np.array([[1], [2], [0xFFFF]], np.uint32), np.array([0, 1, 0xFFFE, 0xFFFF])
    assert is_upper(0x3F80, steps, noise.astype(np.uint32) << 16).tolist() == [
        [False, False, False, True],
        [False, False, True, True],
        [False, True, True, True],
    ]


def test_the_largest_weights_stay_finite():
    steps, words = np.array([[1], [0xFFFF]], np.uint32), np.uint32([0, 0xFFFFFFFF])
    for start in (0x7F7F, 0xFF7F):
        assert not is_upper(start, steps, words).any()


rounded_alone = jax.jit(round_stochastically)


def is_upper(start: int, steps: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns whether numbers between a bfloat16 and the next one become the next one."""
    x = ((np.uint32(start) << 16) + steps).view(np.float32)
    return bfloat16_bits(rounded_alone(*np.broadcast_arrays(x, words))) == start + 1


def test_words_depend_on_the_position_in_the_whole_array():
    words = jax.jit(lambda seed: [words_by_position(s, seed) for s in ((24,), (2, 3, 4), ())])
    flat, cube, scalar = map(np.asarray, words(np.array([3, 5], np.uint32)))
    assert len(np.unique(flat)) == 24
    np.testing.assert_array_equal(cube, flat.reshape(2, 3, 4))
    np.testing.assert_array_equal(scalar, flat[0])
