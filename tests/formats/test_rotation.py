"""Tests of actjax/formats/rotation.py: an orthogonal map that spreads outliers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.formats.rotation import block_size, rotate, rotate_back


@jax.jit
def forth(xs):
    """Returns rotated arrays; a list is one program."""
    return jax.tree.map(rotate, xs)


@jax.jit
def back(ys):
    return jax.tree.map(rotate_back, ys)


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
    xs = [normal(3, features) for features in SIZES]
    matrices, rotated, returned = forth([np.eye(n) for n in SIZES]), forth(xs), back(xs)
    for features, r, x, y, z in zip(SIZES, matrices, xs, rotated, returned, strict=True):
        r, size = f64(r), largest_power_of_two_in(features)
        # A single outlier gives a row: its block gets equal shares, other blocks nothing.
        block = np.arange(features) // size
        share = (block[:, None] == block) / np.sqrt(size)
        np.testing.assert_allclose(abs(r), share, rtol=1e-15, atol=0)
        np.testing.assert_allclose(r @ r.T, np.eye(features), rtol=0, atol=1e-14)
        # Linear in each token, and back by the transpose. Sums of 96 terms, each off by 2^-53.
        np.testing.assert_allclose(y, x @ r, rtol=0, atol=1e-13)
        np.testing.assert_allclose(z, x @ r.T, rtol=0, atol=1e-13)


def test_lengths_and_inner_products_stay():
    pairs = [normal(2, 3, features).astype("float32") for features in SIZES]
    for (x, y), rotated in zip(pairs, forth(pairs), strict=True):
        (a, b), x, y = f64(rotated), f64(x), f64(y)
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        # A coordinate is off by 2^-24 for each term of its block, the root and the quotient,
        # relative to the sum of magnitudes over the root of the block, which is at most the length
        # of the block.
        size = largest_power_of_two_in(x.shape[-1])
        off = 2 * (size + 2) * 2**-24 * np.sqrt(size)
        assert np.all(abs(np.sum(a * b, -1) - np.sum(x * y, -1)) <= off * lengths)
        assert np.all(abs(np.sum(a * a, -1) / np.sum(x * x, -1) - 1) <= off)


def test_rotating_back_is_the_inverse(x64):
    xs = [normal(3, features) for features in SIZES]
    for got in (back(forth(xs)), forth(back(xs))):
        for x, y in zip(xs, got, strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("turn", [forth, back], ids=["rotate", "rotate back"])
def test_bfloat16_is_summed_in_float32(turn):
    xs = [normal(50, features).astype(jnp.bfloat16) for features in (7, 12, 64)]
    with jax.enable_x64(True):
        exact = turn([f64(x) for x in xs])
    for x, got, want in zip(xs, turn(xs), exact, strict=True):
        assert got.dtype == jnp.float32
        size = largest_power_of_two_in(x.shape[-1])
        # Sums over a block with 2^-24 per term, the root and the quotient: no rounding to bfloat16.
        sums = abs(f64(x)).reshape(50, -1, size).sum(-1).repeat(size, -1) / np.sqrt(size)
        assert np.all(abs(f64(got) - f64(want)) <= (size + 2) * 2**-24 * sums)


@pytest.mark.parametrize("features", [5, 8])
def test_the_result_has_the_accumulation_dtype(features, x64):
    for dtype, want in [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]:
        x = jax.ShapeDtypeStruct((3, features), dtype)
        for turn in (rotate, rotate_back):
            assert jax.eval_shape(turn, x) == jax.ShapeDtypeStruct(x.shape, want)


def test_the_common_part_of_neighbours_is_spread():
    xs = [
        (1 + slope * np.arange(features) / features).astype("float32")
        for features in (32, 128, 1024)
        for slope in (0, 1)
    ]
    for x, rotated in zip(xs, forth(xs), strict=True):
        # Hoeffding's inequality for random signs: any coordinate exceeds this with a probability
        # below 2 d exp(-t² / 2) = 1/1000. Without signs, one coordinate gets all of a constant.
        t = np.sqrt(2 * np.log(2000 * x.size))
        assert abs(f64(rotated)).max() <= t * np.linalg.norm(f64(x)) / np.sqrt(x.size)


def test_both_signs_are_equally_frequent():
    # An odd number of features has blocks of one, so the map only changes signs.
    signs = f64(forth(np.ones(4095, "float32")))
    np.testing.assert_array_equal(abs(signs), 1)
    # Five standard deviations of a fair coin.
    assert abs(signs.sum()) <= 5 * np.sqrt(4095)


def test_transformations_of_jax_change_nothing():
    x = normal(4, 3, 12).astype("float32")

    @jax.jit
    def transformed(x):
        return [
            (turn(x), jax.vmap(turn)(x), jax.lax.scan(lambda _, y: (None, turn(y)), None, x)[1])
            for turn in (rotate, rotate_back)
        ]

    for want, mapped, scanned in transformed(x):
        for got in (mapped, scanned):
            # Blocks of 4 terms below 10 in another order: a few roundings.
            np.testing.assert_allclose(got, want, rtol=0, atol=10 * 4 * 2**-23)
