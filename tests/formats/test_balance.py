"""Tests of actjax/formats/balance.py: means and spreads of channels, robust to massive tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.kernel_cases import TINY, f64, normal

from actjax.formats.balance import balance_of

balance = jax.jit(balance_of, static_argnums=1)

LEAST = 2.0**-6
"""Least spread: the root of the least deviation relative to the largest, 2^-12."""


def channels_apart(*shape, seed=0):
    """Returns normal numbers, in channels of other means and deviations."""
    deviation, mean = np.exp(2 * normal(shape[-1], seed=seed + 1)), normal(shape[-1], seed=seed + 2)
    return (normal(*shape, seed=seed) * deviation + 5 * mean).astype("float32")


def weights(tokens):
    norms = np.linalg.norm(tokens, axis=-1)
    inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    return inverse / max(inverse.sum(), 1e-300)


def oracle(x):
    """Returns the mean and the spread of each channel [..., d], weighted by the inverse of norms.

    Each sequence [S, d] of x [..., S, d] is alone.
    """
    if x.ndim > 2:
        return tuple(np.stack(parts) for parts in zip(*map(oracle, x), strict=True))
    tokens = f64(x)
    mean = weights(tokens) @ tokens
    deviation = np.sqrt(weights(tokens) @ (tokens - mean) ** 2)
    return mean, np.sqrt(np.maximum(deviation / deviation.max(), LEAST**2))


@pytest.mark.parametrize("shape", [(40, 6), (3, 5, 7)])
def test_it_is_a_step_towards_the_geometric_median(shape, x64):
    x = f64(channels_apart(*shape))
    mean, spread = (f64(a) for a in balance(x, "float32"))
    want_mean, want_spread = oracle(x)
    # Stored in 24 bits.
    np.testing.assert_allclose(mean, want_mean, rtol=TINY)
    np.testing.assert_allclose(spread, want_spread, rtol=TINY)
    # Weiszfeld's step never lengthens the distances to the tokens. It starts from zero.
    after = np.linalg.norm(x - mean[..., None, :], axis=-1).sum(-1)
    assert np.all(after < np.linalg.norm(x, axis=-1).sum(-1))


@pytest.mark.parametrize(
    ("length", "stride"), [(1024, 8), (1020, 4), (512, 4), (504, 1), (1023, 1)]
)
def test_long_sequences_are_sampled(length, stride):
    x = channels_apart(2, length, 6)
    for got, want in zip(balance(x, "float32"), balance(x[:, ::stride], "float32"), strict=True):
        # Sums of at most 1,023 terms in another order.
        np.testing.assert_allclose(got, want, rtol=1024 * TINY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_in_float32_and_results_are_rounded_once(dtype):
    x = channels_apart(40, 6).astype(jnp.dtype(dtype))
    mean, spread = balance(x, "bfloat16")
    assert (mean.dtype, spread.dtype) == ("uint16", "uint16")
    want_mean, want_spread = oracle(x)
    # Two sums of 40 terms, with norms of 6; the deviation is that of differences.
    off = (40 + 6 + 8) * TINY * abs(f64(x)).max()
    got = f64(np.asarray(mean).view(jnp.bfloat16))
    assert np.all(abs(got - want_mean) <= 2**-8 * abs(want_mean) + off)
    got = f64(np.asarray(spread).view(jnp.bfloat16))
    np.testing.assert_allclose(got, want_spread, rtol=2**-8 + 2**-12)


def test_a_massive_first_token_counts_as_one_token():
    x = channels_apart(40, 6)
    x[0] *= 1000
    mean = f64(balance(x, "float32")[0])
    norms = np.linalg.norm(f64(x), axis=-1)
    others = weights(f64(x[1:])) @ f64(x[1:])
    # The step is a sum of directions over a sum of inverse norms, and one of each is new.
    most = (1 + np.linalg.norm(others) / norms[0]) / (1 / norms).sum()
    assert np.linalg.norm(mean - others) <= most + 50 * TINY * np.linalg.norm(others)
    assert most < 0.05 * np.linalg.norm(f64(x).mean(0) - others)


def test_a_large_mean_does_not_hide_a_deviation():
    x = normal(40, 2).astype("float32")
    x[:, 1] = x[:, 0] + 2**13
    first, second = f64(balance(x, "float32")[1])
    # Tokens are rounded to 2^-10 by the mean; the root of the spread halves the relative error.
    np.testing.assert_allclose(first, second, rtol=2**-9)


def test_a_power_of_two_multiplies_the_means_only():
    x = channels_apart(40, 6)
    # Constant channels get their value and the least spread.
    x[:, 2], x[:, 4] = -7.5, 0
    mean, spread = balance(x, "float32")
    np.testing.assert_allclose(mean[2], -7.5, rtol=50 * TINY)
    assert mean[4] == 0
    np.testing.assert_array_equal(np.asarray(spread)[[2, 4]], LEAST)
    for power in (-110, -90, -40, 40, 90, 110):
        scaled, same = balance(np.ldexp(x, power), "float32")
        np.testing.assert_array_equal(scaled, np.ldexp(mean, power))
        np.testing.assert_array_equal(same, spread)


def test_one_token_is_its_own_mean_and_zeros_change_nothing():
    x = channels_apart(40, 6)
    mean, spread = balance(x[:1], "float32")
    np.testing.assert_allclose(mean, x[0], rtol=4 * TINY)
    # Deviations are zero up to the rounding of the mean.
    assert np.all((f64(spread) >= LEAST) & (f64(spread) <= 1))
    mean, spread = balance(0 * x, "float32")
    assert not np.any(mean)
    np.testing.assert_array_equal(spread, 1)


def test_tokens_of_zeros_change_nothing():
    x = channels_apart(40, 6)
    zeros = np.zeros_like(x)
    for tokens in (np.vstack([x, zeros]), np.vstack([zeros, x]), np.vstack([zeros, x, zeros])):
        for got, want in zip(balance(tokens, "float32"), balance(x, "float32"), strict=True):
            # Sums of 40 terms about another token.
            np.testing.assert_allclose(got, want, rtol=1e3 * TINY, atol=1e3 * TINY * abs(x).max())


def test_a_tiny_last_token_does_not_hide_deviations():
    # Its squares vanish beside the others, and theirs overflow in the unit that fits it alone.
    x = np.vstack([channels_apart(40, 6), np.full((1, 6), 1e-12, "float32")])
    spread = balance(x, "float32")[1]
    np.testing.assert_allclose(spread, oracle(x)[1], rtol=100 * TINY)


def test_all_statistics_are_finite_if_the_numbers_are():
    rng = np.random.default_rng(0)
    size = 10.0 ** rng.uniform(-37, 36, (3, 40, 6))
    for x in (size * rng.choice([-1, 1], size.shape), np.sort(size, 1), -np.sort(-size, 1)):
        mean, spread = map(f64, balance(x.astype("float32"), "float32"))
        assert np.all(abs(mean) <= (1 + 100 * TINY) * abs(x).max(1))
        assert np.all((spread >= LEAST) & (spread <= 1))


@pytest.mark.parametrize("place", [(0, 0), (17, 3), (39, 5)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_spoils_all_means_of_its_sequence(place, value):
    x = channels_apart(2, 40, 6)
    x[1][place] = value
    mean, _ = balance(x, "float32")
    assert np.isnan(mean[1]).all()
    np.testing.assert_array_equal(mean[0], balance(x[:1], "float32")[0][0])


def test_devices_that_share_a_sequence_find_its_statistics():
    x = channels_apart(2, 1024, 8)
    mesh = jax.make_mesh((4,), ("tokens",), (AxisType.Auto,))
    with jax.set_mesh(mesh):
        shared = NamedSharding(mesh, PartitionSpec(None, "tokens"))
        got = jax.jit(balance_of, static_argnums=1)(jax.device_put(x, shared), "float32")
    for a, b, largest in zip(got, balance(x, "float32"), (abs(x).max(), 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1024 * TINY * largest)


def test_arrays_without_elements_have_statistics_of_zeros():
    for shape, want in (((64, 0), (0,)), ((0, 6), (6,)), ((2, 64, 0), (2, 0))):
        mean, spread = balance(np.zeros(shape, "float32"), "float32")
        assert mean.shape == spread.shape == want
        assert not np.any(mean)
        assert np.all(spread == 1)
