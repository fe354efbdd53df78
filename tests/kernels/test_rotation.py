"""Tests of actjax/kernels/rotation.py: an orthogonal map that spreads outliers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.kernels.rotation import block_size, rotate, rotate_back

forth, back = jax.jit(rotate), jax.jit(rotate_back)

every = pytest.mark.parametrize("features", [1, 7, 8, 12, 64, 96])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def f64(x):
    return np.asarray(x, np.float64)


def largest_power_of_two_in(features):
    return max(2**i for i in range(20) if features % 2**i == 0)


def test_blocks_are_the_largest_power_of_two():
    for features in (*range(1, 130), 2048, 5461, 14336):
        assert block_size(features) == largest_power_of_two_in(features)


@every
def test_the_map_is_orthogonal_block_by_block(features, x64):
    r, size = f64(forth(np.eye(features))), largest_power_of_two_in(features)
    # A single outlier gives a row: its block gets equal shares, other blocks nothing.
    block = np.arange(features) // size
    share = (block[:, None] == block) / np.sqrt(size)
    np.testing.assert_allclose(abs(r), share, rtol=1e-15, atol=0)
    np.testing.assert_allclose(r @ r.T, np.eye(features), rtol=0, atol=1e-14)
    # Linear in each token, and back by the transpose. Sums of 96 terms, each off by 2^-53.
    x = normal(3, features)
    np.testing.assert_allclose(forth(x), x @ r, rtol=0, atol=1e-13)
    np.testing.assert_allclose(back(x), x @ r.T, rtol=0, atol=1e-13)


@every
def test_lengths_and_inner_products_stay(features):
    x, y = (normal(3, features, seed=seed).astype("float32") for seed in (0, 1))
    a, b, x, y = f64(forth(x)), f64(forth(y)), f64(x), f64(y)
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    # A coordinate is off by 2^-24 for each term of its block, the root and the quotient, relative
    # to the sum of magnitudes over the root of the block, which is at most the length of the block.
    size = largest_power_of_two_in(features)
    off = 2 * (size + 2) * 2**-24 * np.sqrt(size)
    assert np.all(abs(np.sum(a * b, -1) - np.sum(x * y, -1)) <= off * lengths)
    assert np.all(abs(np.sum(a * a, -1) / np.sum(x * x, -1) - 1) <= off)


@every
def test_rotating_back_is_the_inverse(features, x64):
    x = normal(3, features)
    np.testing.assert_allclose(back(forth(x)), x, rtol=0, atol=1e-13)
    np.testing.assert_allclose(forth(back(x)), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("turn", [forth, back], ids=["rotate", "rotate back"])
@pytest.mark.parametrize("features", [7, 12, 64])
def test_bfloat16_is_summed_in_float32(turn, features):
    x = normal(50, features).astype(jnp.bfloat16)
    got = turn(x)
    assert got.dtype == jnp.float32
    with jax.enable_x64(True):
        want = f64(turn(f64(x)))
    size = largest_power_of_two_in(features)
    # Sums over a block with 2^-24 per term, the root and the quotient: no rounding to bfloat16.
    sums = abs(f64(x)).reshape(50, -1, size).sum(-1).repeat(size, -1) / np.sqrt(size)
    assert np.all(abs(f64(got) - want) <= (size + 2) * 2**-24 * sums)


@pytest.mark.parametrize("features", [5, 8])
def test_the_result_has_the_accumulation_dtype(features, x64):
    for dtype, want in [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]:
        x = jax.ShapeDtypeStruct((3, features), dtype)
        for turn in (rotate, rotate_back):
            assert jax.eval_shape(turn, x) == jax.ShapeDtypeStruct(x.shape, want)


@pytest.mark.parametrize("features", [32, 128, 1024])
@pytest.mark.parametrize("slope", [0, 1], ids=["constant", "slope"])
def test_the_common_part_of_neighbours_is_spread(features, slope):
    x = 1 + slope * np.arange(features) / features
    rotated = abs(f64(forth(x.astype("float32"))))
    # Hoeffding's inequality for random signs: any coordinate exceeds this with a probability below
    # 2 d exp(-t² / 2) = 1/1000. Without signs, one coordinate gets all of a constant.
    t = np.sqrt(2 * np.log(2000 * features))
    assert rotated.max() <= t * np.linalg.norm(x) / np.sqrt(features)


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
