"""Tests of actjax/formats/noise.py: random numbers for rounding, drawn from a counter."""

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


# Uniform.


def assert_equally_frequent(counts):
    """Asserts by the chi-square statistic, whose variance is twice its degrees of freedom."""
    expected, freedom = counts.mean(), counts.size - 1
    chi_square = np.sum((counts - expected) ** 2) / expected
    assert abs(chi_square - freedom) <= 5 * np.sqrt(2 * freedom)


@of_seeds
def test_numbers_and_pairs_of_them_are_equally_frequent(seed):
    count, within = 2**18, (-0.5, 0.5)
    # Each operation is a bijection, so no word repeats.
    assert len(np.unique(words(count, seed))) == count
    low, high = numbers(count, seed)
    for half in (low, high):
        assert_equally_frequent(np.histogram(half, 256, within)[0])
        # Variances of a uniform number and of its square.
        assert abs(half.mean()) <= 5 * np.sqrt(1 / 12 / count)
        assert abs(np.mean(half**2) - 1 / 12) <= 5 * np.sqrt(1 / 180 / count)
    for a, b in ((low[::2], low[1::2]), (high[::2], high[1::2]), (low, high)):
        assert_equally_frequent(np.histogram2d(a, b, 16, [within] * 2)[0])


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
def test_neighbors_and_halves_of_a_word_are_uncorrelated(seed):
    low, high = numbers(2**17, seed)
    for lag in (1, 2, 3, 4, 7, 16, 64, 100, 1000, 4096, 2**16):
        for a, b in ((low, low), (high, high), (low, high), (high, low)):
            assert_uncorrelated(a[lag:], b[:-lag])
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


def test_a_number_depends_only_on_its_position():
    seed = SEEDS[3]

    def expected(tokens, groups, size):
        half = -(-size // 2)
        counters = np.arange(tokens * groups * half, dtype=np.uint32).reshape(tokens, groups, half)
        return np.concatenate(halves(random_words(counters, *seed)), -1)[..., :size]

    shapes = [(5, 3, 16), (5, 3, 7), (5, 3, 1), (2, 1, 16)]
    run = jax.jit(lambda seed: [noise.uniform(seed, *shape) for shape in shapes])
    for shape, got in zip(shapes, run(seed), strict=True):
        np.testing.assert_array_equal(got, expected(*shape))
    assert len(np.unique(expected(6, 4, 16))) > 0.95 * 6 * 4 * 16
