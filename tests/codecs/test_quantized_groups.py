"""Tests of actjax/codecs/quantized.py: normal levels, rotation, outlier channels and groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_codes import (
    KEYS,
    ROUNDINGS,
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

# Levels for normal numbers.

# Max, "Quantizing for minimum distortion" (1960), table I; Lloyd (1982).
LLOYD_MAX = {
    1: ([0.7979], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


def nearest_level(bits, x):
    levels = normal_levels(bits)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_normal_levels_are_the_published_ones(bits):
    levels, (published, error) = normal_levels(bits), LLOYD_MAX[bits]
    assert levels.shape == (2**bits,)
    # Half a unit in the fourth digit.
    np.testing.assert_allclose(levels[2 ** (bits - 1) :], published, rtol=5e-4, atol=5e-5)
    np.testing.assert_allclose(levels, -levels[::-1], rtol=0, atol=1e-12)
    # By quadrature with cells of 1e-5: each level is the mean of the numbers nearest to it, and the
    # error is the published one.
    x = np.linspace(-9, 9, 1_800_001)
    density, nearest = np.exp(-(x**2) / 2), nearest_level(bits, x)
    for level in levels:
        own = nearest == level
        assert np.average(x[own], weights=density[own]) == pytest.approx(level, abs=2e-5)
    assert np.average((x - nearest) ** 2, weights=density) == pytest.approx(error, rel=5e-4)


@pytest.mark.parametrize(
    ("bits", "scaling"), [(1, "group"), (2, "group"), (2, "channel"), (3, "group"), (4, "group")]
)
def test_normal_numbers_err_as_published(bits, scaling):
    x = 3 * (normal(64, 8192) if scaling == "group" else normal(8192, 64))
    codec = Quantized(bits, group=8192, scaling=scaling, levels="normal")
    squares = (round_trip(codec, x) - f64(x)) ** 2 / 9
    # A scale in bfloat16 is off by 2^-8, whose square adds to the error. Fitting a scale to 8192
    # numbers changes the error by about one part in 8192.
    off = 5 * squares.std() / np.sqrt(x.size) + 2**-16 + 4 / 8192
    assert abs(squares.mean() - LLOYD_MAX[bits][1]) <= off


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_the_scale_of_normal_levels_is_a_least_squares_fit(bits, x64):
    # Numbers that are far from normally distributed.
    x = f64(normal(40, 16)) ** 3 + 0.2
    codec = Quantized(bits, group=16, levels="normal", scale_dtype="float32")
    code, _, decoded = coded(codec, x)
    deviation = np.sqrt((x**2).mean(-1, keepdims=True))
    levels = nearest_level(bits, x / deviation)
    fitted = (x * levels).sum(-1, keepdims=True) / (levels**2).sum(-1, keepdims=True)
    scale = scales(codec, code)[1]
    # Rounding to 24 bits.
    np.testing.assert_allclose(scale, fitted, rtol=2**-24)
    np.testing.assert_allclose(decoded, scale * nearest_level(bits, x / scale), rtol=1e-12)
    errors, plain = (((y - x) ** 2).sum(-1) for y in (f64(decoded), deviation * levels))
    assert np.all(errors <= plain * (1 + 1e-6))


@pytest.mark.parametrize(
    "codec",
    [
        Quantized(4, group=8),
        Quantized(3, group=8, levels="normal"),
        Quantized(2, scaling="channel"),
    ],
    ids=repr,
)
def test_a_power_of_two_changes_nothing_but_the_scale(codec):
    x = normal(30, 16)
    plain = round_trip(codec, x)
    for power in (-90, -40, 40, 90):
        # A power of two changes no rounding of any operation.
        got = round_trip(codec, np.ldexp(x, power))
        np.testing.assert_array_equal(got, np.ldexp(plain, power))


# Rotated groups and outlier channels.


def test_a_rotation_makes_an_outlier_hurt_the_others_less():
    x, others = normal(1, 64), np.arange(64) != 5
    x[0, 5] = 1e4
    squares = {}
    for rotate in (False, True):
        codec = Quantized(4, group=64, rounding="dither", rotate=rotate)
        code, samples = draws(codec, x, many_keys())
        scale = scales(codec, code)[1]
        errors = (f64(samples) - f64(x))[:, 0, others] / scale
        # Before the orthogonal map, errors are independent with variance 1/12 of a level, and so
        # they are after it. The fourth moment of their sums is at most that of a normal, 3 / 144.
        # In float32 there are two sums of 64 terms, each at most the outlier, which is 60 levels.
        slack = 2 * 66 * 60 * TINY
        assert np.all(abs(errors.mean(0)) <= 5 * np.sqrt(1 / 12 / KEYS) + slack)
        assert np.all(abs((errors**2).mean(0) - 1 / 12) <= 5 * np.sqrt(2 / 144 / KEYS) + slack)
        squares[rotate] = float(scale[0, 0] ** 2 / 12)
    # The outlier becomes an eighth as large in each coordinate, with both signs; the others add at
    # most the sum of their sizes. Both ends are rounded outwards by 2^-7.
    largest = (1e4 + abs(x[0, others]).sum()) / 8
    bound = (2 * largest * (1 + 2**-7) ** 2 / 15) ** 2 / 12
    assert squares[True] <= bound < 0.1 * squares[False]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rotation_does_not_lengthen_the_error_of_a_group(rounding, x64):
    x = f64(normal(50, 20))
    codec = Quantized(4, group=8, rounding=rounding, rotate=True)
    code, _, decoded = coded(codec, x)
    scale = levels_of(codec, code)[1]
    most = 1.0 if rounding == "stochastic" else 0.5
    # An orthogonal map keeps the length of the errors of each group.
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        lengths = np.linalg.norm((f64(decoded) - x)[:, part], axis=-1)
        assert np.all(lengths <= most * np.linalg.norm(scale[:, part], axis=-1) * (1 + 1e-12))


@pytest.mark.parametrize(
    ("fraction", "count", "scaling", "rotate"),
    [
        (0.01, 1, "group", False),
        (0.2, 3, "group", True),
        (0.2, 3, "channel", False),
        (0.99, 15, "group", False),
    ],
)
def test_channels_with_the_largest_norms_come_back_whole(fraction, count, scaling, rotate):
    # Norms are in random order. The channel of the least norm has the largest number, in one token
    # of 120.
    sizes = np.random.default_rng(1).permutation(1.5 ** np.arange(16))
    x = np.sign(normal(3, 40, 16)) * sizes
    x[..., sizes == 1] = 0
    x[1, 7, sizes == 1] = sizes.max() * 1.1
    x = x.astype(jnp.bfloat16)
    codec = Quantized(2, group=8, outlier_fraction=fraction, rotate=rotate, scaling=scaling)
    code, _, decoded = coded(codec, x)
    assert (code.outliers.shape, code.outliers.dtype) == ((3, 40, count), "bfloat16")
    norms = (f64(x) ** 2).sum((0, 1))
    largest = np.argsort(norms)[::-1][:count]
    assert np.argmax(abs(f64(x)).max((0, 1))) not in largest[:3]
    assert {*np.asarray(code.channels).tolist()} == {*largest.tolist()}
    decoded = np.asarray(decoded)
    np.testing.assert_array_equal(decoded[..., largest], x[..., largest])
    # The other channels are encoded as if the outlier channels were zero.
    plain = dataclasses.replace(codec, outlier_fraction=0)
    rest = np.setdiff1d(np.arange(16), largest)
    x[..., largest] = 0
    want = round_trip(plain, x)
    np.testing.assert_array_equal(f64(decoded)[..., rest], want[..., rest])


@pytest.mark.parametrize(
    ("fraction", "features", "count"),
    [(0, 100, 0), (0.0, 8, 0), (0.001, 100, 1), (0.01, 128, 1), (0.02, 128, 3), (0.5, 7, 4)],
)
def test_outliers_are_a_share_of_the_channels_and_at_least_one(fraction, features, count):
    codec = Quantized(4, group=8, outlier_fraction=fraction)
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((6, features), "float32"))
    if count == 0:
        assert code.outliers is None
        assert code.channels is None
    else:
        assert code.outliers.shape == (6, count)
        assert (code.channels.shape, code.channels.dtype) == ((count,), "int32")


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_outliers_are_found_where_squares_leave_float32(size):
    x = np.float32(size) * normal(40, 16)
    x[:, 11] *= 100
    assert list(coded(Quantized(4, outlier_fraction=0.05), x)[0].channels) == [11]


# Groups.

VARIANTS = {
    "affine": Quantized(4, group=8),
    "stochastic": Quantized(3, group=8, rounding="stochastic"),
    "dither, rotated": Quantized(2, group=8, rounding="dither", rotate=True),
    "normal": Quantized(3, group=8, levels="normal"),
}


variants = pytest.mark.parametrize("codec", VARIANTS.values(), ids=VARIANTS)


@variants
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_group_does_not_affect_the_code_of_another(codec, changed):
    # The last group has four features.
    x = normal(5, 20)
    other = x.copy()
    own = slice(8 * changed, 8 * changed + 8)
    other[2, own] = 1e6 * x[2, own] + 7
    (a, a_numbers, _), (b, b_numbers, _) = (coded(codec, y) for y in (x, other))
    kept = np.ones(x.shape, bool)
    kept[2, own] = False
    np.testing.assert_array_equal(np.asarray(a_numbers)[kept], np.asarray(b_numbers)[kept])
    for before, after in zip(scales(codec, a), scales(codec, b), strict=True):
        if before is not None:
            assert [*np.argwhere(before != after)[0]] == [2, changed]
            assert (before != after).sum() == 1


@pytest.mark.parametrize(("levels", "rotate"), [("uniform", True), ("normal", False)])
def test_a_smaller_last_group_is_encoded_as_by_itself(levels, rotate):
    x = normal(5, 12)
    codec = Quantized(3, group=8, levels=levels, rotate=rotate)
    parts = [round_trip(codec, part) for part in (x[:, :8], x[:, 8:])]
    np.testing.assert_array_equal(round_trip(codec, x), np.concatenate(parts, -1))


@pytest.mark.parametrize("name", ["affine", "dither, rotated"])
def test_a_group_larger_than_a_token_is_the_token(name):
    x = normal(5, 12)
    large, exact = (dataclasses.replace(VARIANTS[name], group=group) for group in (1000, 12))
    for a, b in zip(*(jax.tree.leaves(coded(c, x)) for c in (large, exact)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert large.stored_bytes((5, 12), "float32") == exact.stored_bytes((5, 12), "float32")


@pytest.mark.parametrize(("bits", "rounding"), [*zip((1, 4, 8), ROUNDINGS, strict=True)])
def test_one_number_is_the_lowest_level_of_its_group(bits, rounding):
    # The dtype of scales represents it, and the range is zero.
    x = normal(50, 1).astype(jnp.bfloat16).astype("float32")
    np.testing.assert_array_equal(round_trip(Quantized(bits, rounding=rounding), x), x)


# NaN and overflow.

WITH_CHANNELS = {
    **VARIANTS,
    "channel, dither": Quantized(4, scaling="channel", rounding="dither"),
    "channel, normal": Quantized(2, scaling="channel", levels="normal"),
}


@pytest.mark.parametrize("codec", WITH_CHANNELS.values(), ids=WITH_CHANNELS)
def test_nan_spoils_only_its_own_group(codec):
    x = normal(5, 20)
    spoilt, group = x.copy(), np.zeros(x.shape, bool)
    spoilt[2, 10] = np.nan
    group[(2, slice(8, 16)) if codec.scaling == "group" else (slice(None), 10)] = True
    got, want = round_trip(codec, spoilt), round_trip(codec, x)
    assert np.all(np.isnan(got[group]))
    assert np.all(np.isfinite(got[~group]))
    np.testing.assert_array_equal(got[~group], want[~group])


@pytest.mark.parametrize(("scale_dtype", "value"), [("bfloat16", 3e38), ("float32", 3e38)])
@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_a_range_that_is_too_large_overflows(scale_dtype, value, scaling):
    # With one bit by channel, the scale is twice the largest number.
    x = normal(4, 16)
    x[1, :2] = value, -value
    codec = Quantized(1, group=8, scale_dtype=scale_dtype, scaling=scaling)
    spoilt = np.zeros(x.shape, bool)
    spoilt[(1, slice(0, 8)) if scaling == "group" else (slice(None), slice(0, 2))] = True
    got = round_trip(codec, x)
    assert not np.any(np.isfinite(got[spoilt]))
    assert np.all(np.isfinite(got[~spoilt]))


@pytest.mark.parametrize(
    "codec",
    [Quantized(2), Quantized(4), Quantized(8, scaling="channel"), Quantized(4, levels="normal")],
    ids=repr,
)
def test_a_scale_whose_inverse_is_subnormal(codec):
    x = np.linspace(-1, 1, 128, dtype="float32")[None]
    want = np.asarray(round_trip(codec, x), np.float64)
    got = np.asarray(round_trip(codec, x * np.float32(2.0**126)), np.float64)
    # A power of two changes no rounding.
    np.testing.assert_array_equal(got / 2.0**126, want)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize(
    "codec",
    [
        Quantized(3, rotate=True, balance=True),
        Quantized(4, outlier_fraction=0.1),
        Quantized(1, levels="normal"),
    ],
    ids=repr,
)
def test_arrays_without_elements(codec, shape):
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(np.zeros(shape, "float32"))
    assert decoded.shape == shape
