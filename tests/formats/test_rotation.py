"""Tests of actjax/formats/rotation.py: an orthogonal map that spreads outliers."""

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.rotation import block_size, rotate, rotate_back


@jax.jit
def turned(xs):
    """Returns arrays rotated, and rotated back; a list is one program."""
    return jax.tree.map(rotate, xs), jax.tree.map(rotate_back, xs)


SIZES = (1, 7, 8, 12, 64, 96)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def f64(x):
    return np.asarray(x, np.float64)


def largest_power_of_two_in(features):
    return max(2**i for i in range(20) if features % 2**i == 0)


def test_blocks_are_the_largest_power_of_two():
    for features in (*range(1, 130), 2048, 5461, 14336):
        assert block_size(features) == largest_power_of_two_in(features)


def test_the_map_is_orthogonal_block_by_block(x64):
    xs = [np.concatenate([np.eye(n), normal(3, n)]) for n in SIZES]
    for features, x, rotated, returned in zip(SIZES, xs, *turned(xs), strict=True):
        r, size = f64(rotated)[:features], largest_power_of_two_in(features)
        # A single outlier gives a row: its block gets equal shares, other blocks nothing.
        block = np.arange(features) // size
        share = (block[:, None] == block) / np.sqrt(size)
        np.testing.assert_allclose(abs(r), share, rtol=1e-15, atol=0)
        np.testing.assert_allclose(r @ r.T, np.eye(features), rtol=0, atol=1e-14)
        # Linear in each token, and back by the transpose. Sums of 96 terms, each off by 2^-53.
        np.testing.assert_allclose(rotated, x @ r, rtol=0, atol=1e-13)
        np.testing.assert_allclose(returned, x @ r.T, rtol=0, atol=1e-13)


def test_16_and_32_bits_are_summed_in_float32():
    xs = [
        normal(50, features).astype(jnp.dtype(dtype))
        for features in (7, 12, 64)
        for dtype in ("bfloat16", "float32")
    ]
    with jax.enable_x64(True):
        exact = turned([f64(x) for x in xs])
    for turn, turn_exact in zip(turned(xs), exact, strict=True):
        for x, got, want in zip(xs, turn, turn_exact, strict=True):
            assert got.dtype == jnp.float32
            size = largest_power_of_two_in(x.shape[-1])
            # Sums over a block with 2^-24 per term, the root and the quotient.
            sums = abs(f64(x)).reshape(50, -1, size).sum(-1).repeat(size, -1) / np.sqrt(size)
            assert np.all(abs(f64(got) - f64(want)) <= (size + 2) * 2**-24 * sums)


def test_neighbors_are_spread_by_random_signs():
    xs = [
        (1 + slope * np.arange(features) / features).astype("float32")
        for features in (32, 128, 1024)
        for slope in (0, 1)
    ]
    # An odd number of features has blocks of one, so the map only changes signs.
    *rotated, signs = turned([*xs, np.ones(4095, "float32")])[0]
    for x, y in zip(xs, rotated, strict=True):
        # Hoeffding's inequality for random signs: any coordinate exceeds this with a probability
        # below 2 d exp(-t² / 2) = 1/1000. Without signs, one coordinate gets all of a constant.
        t = np.sqrt(2 * np.log(2000 * x.size))
        assert abs(f64(y)).max() <= t * np.linalg.norm(f64(x)) / np.sqrt(x.size)
    np.testing.assert_array_equal(abs(f64(signs)), 1)
    # Five standard deviations of a fair coin.
    assert abs(f64(signs).sum()) <= 5 * np.sqrt(4095)


def test_transformations_of_jax_change_nothing():
    x = normal(4, 3, 12).astype("float32")
    run = jax.jit(lambda x: (turned(x), jax.vmap(turned)(x), jax.lax.map(turned, x)))
    want, *others = run(x)
    for got in others:
        # Blocks of 4 terms below 10 in another order: a few roundings.
        np.testing.assert_allclose(got, want, rtol=0, atol=10 * 4 * 2**-23)
