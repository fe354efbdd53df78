"""Tests of actjax/codecs/quantized.py: balanced channels."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_codes import (
    KEYS,
    TINY,
    coded,
    draws,
    f64,
    levels_of,
    many_keys,
    normal,
    round_trip,
    scales,
)

from actjax import Quantized
from actjax.formats.levels import normal_levels

BALANCED = Quantized(4, group=16, balance=True)
ROTATED = Quantized(5, group=16, rotate=True, balance=True)


def by_channel(stored):
    """Returns stored means or spreads as numbers."""
    return f64(np.asarray(stored).view(jnp.bfloat16))


def channels_apart(tokens, features, seed=0, apart=2):
    """Returns normal numbers, in channels of other means and deviations."""
    deviation, mean = (
        np.exp(apart * normal(features, seed=seed + 1)),
        normal(features, seed=seed + 2),
    )
    return (normal(tokens, features, seed=seed) * deviation + 5 * mean).astype("float32")


@settings(max_examples=30, deadline=None)
@given(
    codec=st.sampled_from([BALANCED, ROTATED]),
    kind=st.sampled_from(["apart", "one token", "massive token", "outlier", "constant", "zero"]),
    power=st.integers(-80, 60),
    seed=st.integers(0, 10**6),
)
def test_a_number_errs_by_its_spread_times_half_a_level(codec, kind, power, seed):
    x = channels_apart(12, 40, seed)
    if kind == "one token":
        x[1:] = 0
    elif kind == "massive token":
        x[0] *= 1000
    elif kind == "outlier":
        x[3, 5] = 1e4
    elif kind == "constant":
        x[:] = x[0]
    elif kind == "zero":
        x[:] = 0
    x = np.ldexp(x, power)
    code, _, decoded = coded(codec, x)
    mean, spread = by_channel(code.mean), by_channel(code.spread)
    low, scale = levels_of(codec, code)
    y = (f64(x) - mean) / spread
    # Of each number, or of the vector of a group; 8 features are left over. In float32 a rotation
    # and its inverse err by 2^-24 for each of 16 terms and a few operations, relative to the length
    # of the group times its root; levels by a few roundings of the range and the lowest value.
    error = np.zeros(x.shape)
    for begin in (0, 16, 32):
        part = slice(begin, begin + 16)
        size = min(16, 40 - begin)
        length = np.linalg.norm(y[:, part], axis=-1, keepdims=True)
        arithmetic = TINY * (8 * 2**codec.bits * scale[:, part] + 2 * abs(low[:, part]))
        rounding = 40 * TINY * np.sqrt(size) * length if codec.rotate else 4 * TINY * length
        longer = np.sqrt(size) if codec.rotate else 1
        error[:, part] = longer * (scale[:, part] / 2 + arithmetic) + rounding
    most = spread * error + 4 * TINY * (abs(f64(x)) + abs(mean))
    assert np.all(abs(f64(decoded) - f64(x)) <= most)


def test_levels_are_spent_within_channels():
    x = channels_apart(64, 40)
    squares = {
        codec: ((round_trip(codec, x) - f64(x)) ** 2).sum()
        for codec in (Quantized(5, group=16, rotate=True), ROTATED)
    }
    plain, balanced = squares.values()
    assert balanced < plain / 4


def test_dither_has_the_expected_error_of_each_number():
    codec = Quantized(3, group=16, rounding="dither", rotate=True, balance=True)
    x = channels_apart(3, 24)
    code, samples = coded(codec, x)[0], draws(codec, x, many_keys())[1]
    deviation = by_channel(code.spread) * levels_of(codec, code)[1] / np.sqrt(12)
    errors = (f64(samples) - f64(x)) / deviation
    # As if unrotated: independent errors of the same variance, whose sums have a fourth moment of
    # at most that of a normal, 3. Float32 adds a few parts of 2^-24 of a range of 8 levels.
    assert np.all(abs(errors.mean(0)) <= 5 / np.sqrt(KEYS) + 2**-12)
    assert np.all(abs((errors**2).mean(0) - 1) <= 5 * np.sqrt(2 / KEYS) + 2**-12)


def test_normal_levels_have_the_expected_error_on_average():
    codec = Quantized(4, group=2048, levels="normal", rotate=True, balance=True)
    x = channels_apart(64, 2048, apart=0.5)
    code, _, decoded = coded(codec, x)
    unit = by_channel(code.spread) * np.repeat(scales(codec, code)[1], 2048, -1)
    # The mean square distance of a normal number from the nearest level, which is Lloyd's error.
    grid = np.linspace(-8, 8, 20_001)
    nearest = abs(grid[:, None] - normal_levels(4)).min(1)
    square = np.average(nearest**2, weights=np.exp(-(grid**2) / 2))
    ratio = (f64(decoded) - f64(x)) ** 2 / (square * unit**2)
    # In bfloat16 a scale is off by 2^-9 at most. Rotated numbers are normal up to one part in the
    # number of channels, which counts as 1600 channels of one deviation; so is the fitted scale.
    assert abs(ratio.mean() - 1) <= 5 * ratio.std() / np.sqrt(x.size) + 2**-8 + 8 / 1600


def test_a_number_that_is_not_finite_spoils_everything():
    x = channels_apart(12, 40)
    x[3, 5] = np.nan
    assert np.all(np.isnan(round_trip(BALANCED, x)))


def test_it_needs_scales_by_group():
    with pytest.raises(ValueError, match="`balance` of Quantized needs scaling='group', got"):
        Quantized(4, scaling="channel", balance=True)
    with pytest.raises(ValueError, match="`balance` of Quantized must be True or False, got 1"):
        Quantized(4, balance=1)
