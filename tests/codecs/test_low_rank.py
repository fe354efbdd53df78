"""Tests of actjax/codecs/low_rank.py: random projection and the randomized SVD."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from actjax import RandomizedSVD, RandomProjection

KEY = jax.random.key(7)
TOKENS, FEATURES = 40, 20


def decaying(tokens=TOKENS, features=FEATURES, seed=0):
    """Returns a matrix whose singular values fall by a quarter each, as the first of an
    activation."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.normal(size=(tokens, tokens)))
    right, _ = np.linalg.qr(rng.normal(size=(features, features)))
    rank = min(tokens, features)
    return left[:, :rank] * 0.75 ** np.arange(rank) @ right[:rank]


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x, key=KEY):
    return codec.encode(x, key)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x, key=KEY):
    return codec.decode(codec.encode(x, key))


def f64(x):
    return np.asarray(x, np.float64)


def projection(key, rank, features=FEATURES):
    """Returns `S` as the codec draws it: normal numbers of variance 1 / rank."""
    return np.asarray(jax.random.normal(key, (features, rank), "float64")) / np.sqrt(rank)


@functools.partial(jax.jit, static_argnums=(0, 2))
def errors(codec, x, count):
    """Returns the squared Frobenius error for each of many keys."""
    keys = jax.random.split(KEY, count)
    return jax.vmap(lambda key: jnp.sum((codec.decode(codec.encode(x, key)) - x) ** 2))(keys)


def test_random_projection_is_the_oracle_on_the_same_matrix(x64):
    x = decaying()
    want = oracles.random_projection(x, projection(KEY, 6))
    np.testing.assert_allclose(round_trip(RandomProjection(6), x), want, rtol=1e-10, atol=1e-13)


def test_random_projection_errs_as_its_docstring_says(x64):
    x = decaying()
    squares = np.asarray(errors(RandomProjection(6), x, 2000))
    expected = oracles.expected_rp_squared_error(x, 6)
    assert expected == pytest.approx(np.sum(x**2) * (FEATURES + 1) / 6)
    assert abs(squares.mean() - expected) <= 5 * squares.std() / np.sqrt(2000)


def test_randomized_svd_is_the_oracle_on_the_same_sketch(x64):
    x, omega = decaying(), np.asarray(jax.random.normal(KEY, (FEATURES, 6), "float64"))
    codecs = [RandomizedSVD(6, power_iterations) for power_iterations in range(3)]

    @jax.jit
    def run(x):
        codes = [codec.encode(x, KEY) for codec in codecs]
        return [
            (code.u, code.v, codec.decode(code)) for codec, code in zip(codecs, codes, strict=True)
        ]

    for codec, (u, v, decoded) in zip(codecs, run(x), strict=True):
        np.testing.assert_allclose(np.transpose(u) @ u, np.eye(6), atol=1e-13)
        np.testing.assert_allclose(v, x.T @ u, atol=1e-13)
        want = oracles.randomized_svd(x, omega, codec.power_iterations)
        # Bases of one space, both orthonormal up to rounding times the condition of the sketch
        # (below 1e3).
        np.testing.assert_allclose(decoded, want, rtol=0, atol=1e-11)


def test_the_basis_is_orthonormal_in_float32_though_the_sketch_is_ill_conditioned():
    # Columns differ by one part in ten thousand, so their Gram matrix has a condition of 1e8. A
    # single Cholesky factorization without a shift fails in float32. With the shift s = 4e-6, the
    # first factorization leaves directions of squared length 1e-8 / s, and the second shortens them
    # by a share of s² / 1e-8, below one percent.
    rng = np.random.default_rng(0)
    x = np.outer(rng.normal(size=200), np.ones(8)) + 1e-4 * rng.normal(size=(200, 8))
    u = np.asarray(encode(RandomizedSVD(4), x.astype("float32")).u)
    np.testing.assert_allclose(u.T @ u, np.eye(4), atol=1e-2)


def test_randomized_svd_keeps_within_the_bound_of_halko(x64):
    x = decaying()
    for rank in (6, 10):
        mean = np.sqrt(errors(RandomizedSVD(rank), x, 500)).mean()
        bounds = [oracles.halko_expected_bound(x, rank - p, p) for p in range(2, rank - 1)]
        assert oracles.best_rank_k_error(x, rank) <= mean <= min(bounds)


def test_power_iterations_come_closer_to_the_best(x64):
    x = decaying()
    means = [np.sqrt(errors(RandomizedSVD(6, n), x, 100)).mean() for n in (0, 1, 3)]
    assert means[0] > means[1] > means[2]
    assert means[2] <= 1.05 * oracles.best_rank_k_error(x, 6)


DEFICIENT = {
    "zero": np.zeros((TOKENS, FEATURES)),
    "one token": np.eye(TOKENS, FEATURES) * np.r_[1, np.zeros(FEATURES - 1)],
    "rank one": np.outer(np.arange(1, TOKENS + 1), np.arange(FEATURES)),
    "rank four": np.random.default_rng(1).normal(size=(TOKENS, 4))
    @ np.random.default_rng(2).normal(size=(4, FEATURES)),
    "columns zero and repeated": np.tile(np.random.default_rng(4).normal(size=(TOKENS, 5)), 4)
    * (np.arange(FEATURES) != 3),
    "the same token": np.tile(np.random.default_rng(3).normal(size=FEATURES), (TOKENS, 1)),
}


@pytest.mark.parametrize("codec", [RandomizedSVD(6), RandomizedSVD(6, 1)], ids=repr)
def test_a_matrix_of_at_most_the_rank_comes_back_whole(codec, x64):
    matrices = np.stack([*DEFICIENT.values()])
    run = jax.jit(lambda xs: jax.lax.map(lambda x: codec.decode(codec.encode(x, KEY)), xs))
    for dtype in ("float32", "float64"):
        # The shift of the Cholesky factorization shortens the basis, squared, by 2 (k + sqrt(T))
        # eps; the rounding of the products adds as much again.
        lost = 4 * (6 + TOKENS**0.5) * float(jnp.finfo(dtype).eps)
        xs = matrices.astype(dtype)
        for name, x, got in zip(DEFICIENT, xs, run(xs), strict=True):
            np.testing.assert_allclose(got, x, rtol=0, atol=lost * abs(x).max(), err_msg=name)


def test_a_large_rank_does_not_shorten_the_basis():
    rank, count = 256, 512
    x = np.random.default_rng(0).normal(size=(count, 300)).astype("float32")
    lengths = np.linalg.svd(f64(encode(RandomizedSVD(rank), x).u), compute_uv=False)
    shift = 2 * (rank + count**0.5) * 2**-23
    # Each of the two factorizations is off by half the shift, and rounding adds as much.
    assert abs(lengths - 1).max() < 2 * shift


def test_power_iterations_of_large_numbers_do_not_overflow():
    # The sketch after an iteration has entries near 1e50 if it is not orthonormalized before.
    x = (1e20 * decaying()).astype("float32")
    small, large = (
        np.asarray(round_trip(RandomizedSVD(6, 1), y)) for y in (decaying().astype("float32"), x)
    )
    np.testing.assert_allclose(large / np.float32(1e20), small, rtol=0, atol=1e-5)
