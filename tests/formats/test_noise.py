"""Tests of actjax/formats/noise.py: random numbers for rounding, drawn from a counter."""

import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import f64

from actjax.formats import noise
from actjax.formats.noise import halves, random_words

SEEDS = np.array(
    [[0, 0], [1, 0], [0, 1], [0x12345678, 0x9ABCDEF0], [2**32 - 1, 2**32 - 1]], np.uint32
)
"""Seeds with few and with many set bits: the generator does not rely on random seeds."""

of_seeds = pytest.mark.parametrize("seed", SEEDS, ids=str)

uniform = functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))(noise.uniform)


def words(count, seed):
    """Returns what a kernel draws for counters from 0 on."""
    return random_words(np.arange(count, dtype=np.uint32), *seed)


def numbers(count, seed):
    """Returns two independent rows of numbers."""
    return f64(halves(words(count, seed)))


# Avalanche: one bit changes half of all bits.


@pytest.mark.parametrize("argument", [0, 1, 2], ids=["counter", "first word", "second word"])
def test_each_bit_flips_each_bit_half_the_time(argument):
    count = 10_000
    args = list(np.random.default_rng(0).integers(0, 2**32, (3, count), np.uint32))
    before = random_words(*args)
    for bit in range(32):
        changed = args.copy()
        changed[argument] = args[argument] ^ np.uint32(2**bit)
        flips = (before ^ random_words(*changed))[:, None] >> np.arange(32, dtype=np.uint32) & 1
        # Five standard errors: one of 3072 fair coins is farther off with a probability of 0.2%.
        assert np.all(abs(flips.mean(0) - 0.5) <= 5 * 0.5 / np.sqrt(count))


@of_seeds
def test_counters_of_a_seed_give_different_words(seed):
    # Each operation is a bijection, so no word repeats.
    assert len(np.unique(words(2**18, seed))) == 2**18


# Uniform.


@of_seeds
def test_all_numbers_are_equally_frequent(seed):
    count, bins = 2**18, 256
    for half in numbers(count, seed):
        expected = count / bins
        seen = np.histogram(half, bins, (-0.5, 0.5))[0]
        # Chi-square with 255 degrees of freedom, whose variance is twice that.
        chi_square = np.sum((seen - expected) ** 2) / expected
        assert abs(chi_square - (bins - 1)) <= 5 * np.sqrt(2 * (bins - 1))


@of_seeds
def test_pairs_of_neighbours_and_of_halves_are_equally_frequent(seed):
    count, bins = 2**18, 16
    low, high = numbers(count, seed)
    for a, b in ((low[::2], low[1::2]), (high[::2], high[1::2]), (low, high)):
        seen = np.histogram2d(a, b, bins, [(-0.5, 0.5)] * 2)[0]
        expected = len(a) / bins**2
        chi_square = np.sum((seen - expected) ** 2) / expected
        assert abs(chi_square - (bins**2 - 1)) <= 5 * np.sqrt(2 * (bins**2 - 1))


@of_seeds
def test_moments_are_those_of_uniform_numbers(seed):
    count = 2**18
    for half in numbers(count, seed):
        # Variances of a uniform number and of its square.
        assert abs(half.mean()) <= 5 * np.sqrt(1 / 12 / count)
        assert abs(np.mean(half**2) - 1 / 12) <= 5 * np.sqrt(1 / 180 / count)


def test_halves_are_the_middles_of_their_intervals():
    # All values of 16 bits: they are symmetric about zero, so the mean is exactly zero.
    every = np.arange(2**16, dtype=np.uint32)
    want = (np.arange(2**16) + 0.5) / 2**16 - 0.5
    low, high = halves(every | every[::-1] << np.uint32(16))
    assert low.dtype == high.dtype == np.float32
    np.testing.assert_array_equal(low, want)
    np.testing.assert_array_equal(high, want[::-1])
    assert f64(low).sum() == 0
    assert abs(low).max() < 0.5


# Independent.


def assert_uncorrelated(a, b):
    """Asserts a correlation within five standard errors of zero."""
    assert abs(np.mean(a * b)) <= 5 / 12 / np.sqrt(len(a))


@of_seeds
def test_neighbours_are_uncorrelated(seed):
    low, high = numbers(2**17, seed)
    for lag in (1, 2, 3, 4, 7, 16, 64, 100, 1000, 4096, 2**16):
        for a, b in ((low, low), (high, high), (low, high), (high, low)):
            assert_uncorrelated(a[lag:], b[:-lag])


@of_seeds
def test_halves_of_a_word_are_uncorrelated(seed):
    low, high = numbers(2**18, seed)
    assert_uncorrelated(low, high)
    # Their magnitudes are independent too.
    squares = (low**2 - 1 / 12) * (high**2 - 1 / 12)
    assert abs(squares.mean()) <= 5 / 180 / np.sqrt(len(low))


@of_seeds
@pytest.mark.parametrize("word", [0, 1])
def test_seeds_that_differ_in_one_bit_are_uncorrelated(seed, word):
    low, high = numbers(2**15, seed)
    for bit in range(32):
        other = seed.copy()
        other[word] ^= np.uint32(2**bit)
        for a, b in zip((low, high), numbers(2**15, other), strict=True):
            assert_uncorrelated(a, b)


def test_seeds_of_keys_differ():
    keys = jax.random.split(jax.random.key(0), 100)
    seeds = np.asarray(jax.vmap(noise.seed_of)(keys))
    assert seeds.dtype == np.uint32
    assert len(np.unique(seeds)) == 200


# Numbers of groups of features.


@pytest.mark.parametrize("size", [16, 7, 1])
def test_a_number_depends_only_on_its_position(size):
    seed, tokens, groups, first, of_token = SEEDS[3], 5, 3, 11, 50
    got = uniform(seed, tokens, groups, size, first, of_token)
    assert got.shape == (tokens, groups, size)
    half = -(-size // 2)
    for token in range(tokens):
        for group in range(groups):
            begin = token * of_token + first + group * half
            counters = np.arange(begin, begin + half, dtype=np.uint32)
            want = np.concatenate(halves(random_words(counters, *seed)))[:size]
            np.testing.assert_array_equal(got[token, group], want)


def test_numbers_are_the_same_however_tokens_and_groups_are_split():
    seed, of_token = SEEDS[3], 4 * 8
    whole = uniform(seed, 6, 4, 16, 0, of_token)
    np.testing.assert_array_equal(uniform(seed, 2, 4, 16, 0, of_token), whole[:2])
    # Later tokens and groups start with later words.
    np.testing.assert_array_equal(uniform(seed, 4, 4, 16, 2 * of_token, of_token), whole[2:])
    np.testing.assert_array_equal(uniform(seed, 6, 3, 16, 8, of_token), whole[:, 1:])
    assert len(np.unique(whole)) > 0.95 * whole.size
