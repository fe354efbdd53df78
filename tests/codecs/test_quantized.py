"""Tests of actjax/codecs/quantized.py: bias, variance, bytes, scales, NaN and overflow.

`tests/kernels/test_quantize.py` compares each code and each decoded number with an oracle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax import Quantized
from actjax.formats.levels import code_of, normal_levels
from actjax.formats.scales import SLACK

KEY = jax.random.key(5)
KEYS = 2000
ROUNDINGS = ("nearest", "stochastic", "dither")
TINY = 2.0**-24
"""Relative rounding of an operation in float32."""

drawing = pytest.mark.parametrize("rounding", ["stochastic", "dither"])


@functools.partial(jax.jit, static_argnums=0)
def decoded_of_all(codecs, x):
    return [codec.decode(codec.encode(x, KEY)) for codec in codecs]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def f64(x):
    return np.asarray(x, np.float64)


def as_numbers(stored):
    """Returns stored scales or statistics as numbers; None stays None."""
    if stored is None:
        return None
    stored = np.asarray(stored)
    return f64(stored.view(jnp.bfloat16) if stored.dtype == np.uint16 else stored)


def levels_of(codec, code):
    """Returns for each number the lowest level of its group or channel, and the scale."""
    scale = as_numbers(code.scale)
    if codec.scaling == "channel":
        return -scale * (2**codec.bits - 1) / 2, scale
    stored = as_numbers(code.offset), scale
    return tuple(np.repeat(s, codec.group, -1)[..., : code.features] for s in stored)


def arithmetic(codec, low, scale):
    """Returns the error that float32 arithmetic adds.

    Encoding rounds a difference, a quotient, half the range of a channel, and the sum with a shift,
    which is a multiple of 2^-23. Decoding rounds a difference, a product and a sum. Each operand is
    at most `2^bits` levels, the last also the lowest level.
    """
    return TINY * (8 * 2**codec.bits * scale + abs(low))


@functools.partial(jax.jit, static_argnums=0)
def draws(codec, x):
    """Returns a code, and the decoded numbers for each key before they are rounded to bfloat16."""

    def draw(key):
        code = codec.encode(x, key)
        return codec.decode(dataclasses.replace(code, dtype=jnp.dtype("float32")))

    return codec.encode(x, KEY), jax.vmap(draw)(jax.random.split(KEY, KEYS))


# Bias and variance.


def groups_of_all_kinds():
    rows = normal(9, 20)
    rows[1] *= 1e30
    rows[2] *= 1e-30
    rows[3, [1, 9, 17]] = 1e4
    rows[4, ::3], rows[4, 1::3] = 1e30, 1e-30
    rows[5] = 0.1
    rows[6] = -2.5
    rows[7] = 0
    # Far from zero, where the rounding of the offset is as large as a level.
    rows[8] += 1000
    return rows


@drawing
@pytest.mark.parametrize(
    ("bits", "scaling", "dtype"),
    [
        (1, "group", "float32"),
        (4, "group", "bfloat16"),
        (8, "group", "float32"),
        (3, "channel", "float32"),
    ],
)
def test_it_is_unbiased_with_the_documented_variance(bits, rounding, scaling, dtype):
    x = groups_of_all_kinds()
    # By channel, the rows become columns: a channel with an outlier, a constant, zeros.
    x = (x if scaling == "group" else x.T).astype(jnp.dtype(dtype))
    codec = Quantized(bits, group=8, rounding=rounding, scaling=scaling)
    code, samples = draws(codec, x)
    x, samples = f64(x), f64(samples)
    low, scale = (np.broadcast_to(a, x.shape) for a in levels_of(codec, code))

    # A constant that the dtype of scales represents is not rounded.
    flat = scale == 0
    np.testing.assert_array_equal(samples[:, flat], np.tile(x[flat], (KEYS, 1)))

    # In units of levels from here on.
    position = ((x - low) / np.where(flat, 1, scale))[~flat]
    errors = (samples - x)[:, ~flat] / scale[~flat]
    slack = (arithmetic(codec, low, scale) / np.where(flat, 1, scale))[~flat]
    top = 2**bits - 1
    share = np.clip(position - np.floor(position), 0, 1)
    variance = share * (1 - share) if rounding == "stochastic" else np.full(share.shape, 1 / 12)

    # For every key: nothing wraps around at the ends of the range.
    most, beyond = (1, 0) if rounding == "stochastic" else (0.5, 0.5)
    assert np.all(abs(errors) <= most + slack)
    assert np.all(abs(position + errors - top / 2) <= top / 2 + beyond + slack)

    # Bernstein's inequality for errors of at most one level: 5 standard errors plus 25 / (3 n) for
    # rare events are exceeded with a probability below 2 e^-12.5.
    rare = 25 / (3 * KEYS)
    assert np.all(abs(errors.mean(0)) <= 5 * np.sqrt(variance / KEYS) + rare + slack)
    # All together: a hundred numbers with independent draws.
    pooled = 5 * np.sqrt(variance.sum() / KEYS) + rare
    assert abs(errors.mean(0).sum()) <= pooled + slack.sum()

    squares = (errors**2).mean(0)
    if rounding == "stochastic":
        # The error is `1 - t` with probability `t`, else `-t`: its square has this variance.
        of_square = variance * (1 - 2 * share) ** 2
    else:
        of_square = 1 / 180
        # The error is uniform for every position between two levels. The bound of Dvoretzky, Kiefer
        # and Wolfowitz is exceeded with a probability below 1e-7.
        ordered, ranks = np.sort(errors, 0), (np.arange(KEYS)[:, None] + 0.5) / KEYS
        off = np.sqrt(np.log(2e7) / (2 * KEYS)) + 0.5 / KEYS
        assert np.all(abs(ordered + 0.5 - ranks) <= off + slack)
        # The shifts are independent: six standard errors, for ten thousand pairs.
        assert abs(np.corrcoef(errors.T) - np.eye(len(share))).max() <= 6 / np.sqrt(KEYS)
    chance = 5 * np.sqrt(of_square / KEYS) + rare + 2 * slack
    assert np.all(abs(squares - variance) <= chance)
    assert np.all(squares <= 0.25 + chance)


@pytest.mark.parametrize("rotate", [False, True])
def test_the_result_is_rounded_to_the_dtype_once(rotate):
    x = np.ones((8, 64), "float32")
    x[:, 5] = 1e4
    codec = Quantized(8, group=64, rotate=rotate)

    @jax.jit
    def both(x):
        code = codec.encode(x)
        wide = dataclasses.replace(code, dtype=jnp.dtype("float32"))
        return codec.decode(code), codec.decode(wide)

    decoded, exact = (f64(a) for a in both(x.astype(jnp.bfloat16)))
    # Half a unit of 2^-7. A rotation sums 64 terms of at most 2e4 / 8 each, divided by 8.
    once = 2**-8 * abs(exact) + (66 * TINY * 64 * 2e4 / 64 if rotate else 0)
    assert np.all(abs(decoded - exact) <= once)


@drawing
def test_the_top_of_the_range_never_wraps(rounding):
    # All numbers are at the ends, 0 or 255 levels. For one draw in 2^17, the top level and a shift
    # just below a half add up to 255.5 in float32, which rounds to 256. There are a million draws.
    x = np.tile(np.float32([0, 255]), (2048, 512))
    (got,) = decoded_of_all((Quantized(8, group=1024, rounding=rounding),), x)
    got = f64(got)
    assert abs(got - x).max() <= (1 if rounding == "stochastic" else 0.5 + 256 * TINY)
    if rounding == "stochastic":
        assert (got.min(), got.max()) == (0, 255)


def test_bias_and_keys_are_declared():
    for rounding in ROUNDINGS:
        codec = Quantized(4, rounding=rounding)
        assert codec.biased == (rounding == "nearest")
        assert codec.needs_key == (rounding != "nearest")


# Bytes.

TOKENS, WIDTH = 16384, 2048
AFFINE = 2 * 16 / 128
"""A scale and an offset of 16 bits each, for 128 numbers."""

CHANNELS = 20 * (16 / WIDTH + 32 / (TOKENS * WIDTH))
"""20 outlier channels of 16 bits, with an index of 32 bits each."""


def bytes_of(codec, shape, dtype):
    """Returns the bytes of a code, which must be those that the codec states."""
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, dtype), KEY)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    assert codec.stored_bytes(shape, dtype) == total
    return total


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Quantized(1), 1 + AFFINE),
        (Quantized(3), 3 + AFFINE),
        (Quantized(4), 4.25),
        (Quantized(5), 5 + AFFINE),
        (Quantized(6, balance=True), 6 + AFFINE + 2 * 16 / TOKENS),
        (Quantized(8), 8 + AFFINE),
        (Quantized(2, group=32), 2 + 2 * 16 / 32),
        (Quantized(4, group=2048), 4 + 2 * 16 / 2048),
        (Quantized(4, group=4096), 4 + 2 * 16 / 2048),
        # 21 groups, of which 52 numbers are filled up.
        (Quantized(4, group=100), (4 * 2100 + 21 * 2 * 16) / 2048),
        (Quantized(4, scale_dtype="float32"), 4 + 2 * AFFINE),
        (Quantized(4, levels="normal"), 4.125),
        (Quantized(2, levels="normal", group=64, rotate=True), 2 + 16 / 64),
        (Quantized(4, levels="normal", rotate=True, balance=True), 4.125 + 2 * 16 / TOKENS),
        (Quantized(4, rounding="stochastic"), 4 + AFFINE),
        # Two words of a key.
        (Quantized(4, rounding="dither"), 4 + AFFINE + 64 / (TOKENS * WIDTH)),
        (Quantized(4, scaling="channel"), 4 + 16 / TOKENS),
        (Quantized(2, scaling="channel", scale_dtype="float32"), 2 + 32 / TOKENS),
        (Quantized(4, scaling="channel", levels="normal"), 4 + 16 / TOKENS),
        (Quantized(4, outlier_fraction=0.01), 4 + AFFINE + CHANNELS),
        (Quantized(2, scaling="channel", outlier_fraction=0.01), 2 + 16 / TOKENS + CHANNELS),
    ],
    ids=repr,
)
def test_a_number_takes_these_bits_with_its_scales_and_indices(codec, bits):
    total = bytes_of(codec, (TOKENS, WIDTH), "bfloat16")
    # Exact to a byte, of 2^26.
    assert total * 8 / (TOKENS * WIDTH) == pytest.approx(bits, rel=1e-12)


def test_odd_tokens_are_padded_to_whole_groups_and_bytes_and_no_more():
    # 15 numbers are 30 bits in 4 bytes and 15 bits in 2, and so are 13; three groups have a scale
    # and an offset.
    for scaling, scales in (("group", 10 * 3 * 2 * 2), ("channel", 13 * 2)):
        codec = Quantized(3, group=5, scaling=scaling)
        assert bytes_of(codec, (2, 5, 13), "float32") == 10 * (4 + 2) + scales


@pytest.mark.parametrize(
    ("fraction", "features", "count"),
    [(0, 100, None), (0.001, 100, 1), (0.01, 128, 1), (0.02, 128, 3), (0.5, 7, 4), (0.99, 16, 15)],
)
def test_outliers_are_a_share_of_the_channels_and_at_least_one(fraction, features, count):
    codec = Quantized(4, group=8, outlier_fraction=fraction)
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((6, features), "float32"))
    shapes = [getattr(array, "shape", None) for array in (code.outliers, code.channels)]
    assert shapes == ([None, None] if count is None else [(6, count), (count,)])


# Levels for normal numbers.

# Max, "Quantizing for minimum distortion" (1960), table I; Lloyd (1982).
LLOYD_MAX = {
    1: ([0.7979], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_normal_levels_have_the_published_error(bits):
    levels, (published, error) = f64(normal_levels(bits)), LLOYD_MAX[bits]
    assert levels.shape == (2**bits,)
    np.testing.assert_array_equal(levels, -levels[::-1])
    # The means of other intervals, which are 0.2% of a level apart.
    np.testing.assert_allclose(levels[2 ** (bits - 1) :], published, rtol=3e-3)
    x = np.linspace(-8, 8, 400_001, dtype="float32")
    codes = np.asarray(code_of(x, bits))
    assert np.all(np.diff(codes.astype(int)) >= 0)
    density = np.exp(-np.square(f64(x)) / 2)
    mean_square = np.sum((levels[codes] - x) ** 2 * density) / density.sum()
    # Half a unit in the fourth digit.
    assert mean_square == pytest.approx(error, rel=5e-4)
    # Each level is the mean of the numbers that get its code, to half a unit of float16, and to a
    # step of `x`.
    means = np.bincount(codes, density * x) / np.bincount(codes, density)
    np.testing.assert_allclose(means, levels, rtol=2**-11, atol=x[1] - x[0])


def test_the_scale_of_normal_levels_is_the_root_mean_square(x64):
    # Numbers that are far from normally distributed.
    x = f64(normal(40, 16)) ** 3 + 0.2
    codec = Quantized(4, group=16, levels="normal", scale_dtype="float32")
    code = jax.jit(codec.encode)(x)
    # Rounding to 24 bits.
    np.testing.assert_allclose(code.scale, np.sqrt((x**2).mean(-1, keepdims=True)), rtol=2**-24)


@pytest.mark.parametrize(
    ("codec", "features", "group"),
    [
        (Quantized(4), 2048, 128),
        (Quantized(4, levels="normal"), 576, 64),
        (Quantized(4, levels="normal"), 192, 64),
        # 1,400 features are 11 groups, of which 8 features are filled up.
        (Quantized(4, levels="normal"), 1400, 128),
        (Quantized(2, group=256), 300, 64),
        (Quantized(4), 33, 64),
        (Quantized(4), 5, 8),
        (Quantized(4), 1, 2),
        (Quantized(4, group=100), 2048, 100),
        (Quantized(4, group=3), 7, 3),
        (Quantized(4, scaling="channel", rotate=True), 576, 64),
        (Quantized(4, scaling="channel"), 576, 576),
    ],
    ids=repr,
)
def test_a_group_is_halved_where_that_takes_fewer_bytes(codec, features, group):
    assert codec.format_of(features).group == group


def test_scales_of_channels_are_the_least_that_hold_them():
    x = normal(500, 16) + 3
    uniform, normal_ones = (
        Quantized(4, scaling="channel", levels=n) for n in ("uniform", "normal")
    )
    wide = dataclasses.replace(uniform, scale_dtype="float32")
    codecs = uniform, wide, normal_ones
    scales = jax.jit(lambda x: [codec.fit_channels(x, None) for codec in codecs])(x)
    exact = abs(f64(x)).max(0) * 2 / 15
    for codec, stored in zip(codecs[:2], scales, strict=False):
        ratio = as_numbers(stored) / exact
        eps = float(jnp.finfo(codec.scale_dtype).eps)
        # A product in float32, then at most a unit in the last place; `SLACK` as documented.
        assert np.all((ratio >= 1 - SLACK - 2 * TINY) & (ratio <= 1 + eps + 2 * TINY))
    deviation = np.sqrt(np.square(f64(x)).mean(0))
    np.testing.assert_allclose(as_numbers(scales[2]), deviation, rtol=2**-8 + 1e-6)


# Rotated groups and balanced channels.


def test_a_rotation_makes_an_outlier_hurt_the_others_less():
    x, others = normal(1, 64), np.arange(64) != 5
    x[0, 5] = 1e4
    squares = {}
    for rotate in (False, True):
        codec = Quantized(4, group=64, rounding="dither", rotate=rotate)
        code, samples = draws(codec, x)
        scale = as_numbers(code.scale)
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


def channels_apart(tokens, features, apart=2):
    """Returns normal numbers, in channels of other means and deviations."""
    deviation, mean = np.exp(apart * normal(features, seed=1)), normal(features, seed=2)
    return (normal(tokens, features) * deviation + 5 * mean).astype("float32")


def test_balanced_dither_has_the_expected_error_of_each_number():
    codec = Quantized(3, group=16, rounding="dither", rotate=True, balance=True)
    x = channels_apart(3, 24)
    code, samples = draws(codec, x)
    deviation = as_numbers(code.spread) * levels_of(codec, code)[1] / np.sqrt(12)
    errors = (f64(samples) - f64(x)) / deviation
    # As if unrotated: independent errors of the same variance, whose sums have a fourth moment of
    # at most that of a normal, 3. Float32 adds a few parts of 2^-24 of a range of 8 levels.
    assert np.all(abs(errors.mean(0)) <= 5 / np.sqrt(KEYS) + 2**-12)
    assert np.all(abs((errors**2).mean(0) - 1) <= 5 * np.sqrt(2 / KEYS) + 2**-12)


def test_balanced_normal_levels_have_the_expected_error_on_average():
    codec = Quantized(4, group=2048, levels="normal", rotate=True, balance=True)
    x = channels_apart(64, 2048, apart=0.5)

    @jax.jit
    def run(x):
        code = codec.encode(x)
        return code, codec.decode(code)

    code, decoded = run(x)
    unit = as_numbers(code.spread) * np.repeat(as_numbers(code.scale), 2048, -1)
    # The mean square distance of a normal number from the nearest level, which is Lloyd's error.
    ratio = np.square(f64(decoded) - f64(x)) / (LLOYD_MAX[4][1] * unit**2)
    # In bfloat16 a scale is off by 2^-9 at most. Rotated numbers are normal up to one part in the
    # number of channels, which counts as 1600 channels of one deviation; so is the fitted scale.
    assert abs(ratio.mean() - 1) <= 5 * ratio.std() / np.sqrt(x.size) + 2**-8 + 8 / 1600


# NaN, overflow, and small arrays.


def test_a_nan_is_seen_wherever_it_is():
    # XLA for CPUs may drop a NaN from the maximum of 4,096 numbers.
    codecs = (
        Quantized(4),
        Quantized(2, scaling="channel"),
        Quantized(4, group=32, rounding="dither"),
        Quantized(4, levels="normal"),
        Quantized(4, balance=True),
    )
    for place in [(3, 5), (0, 0), (31, 127)]:
        x = normal(32, 128)
        x[place] = np.nan
        decoded = decoded_of_all(codecs, x)
        assert all(not np.isfinite(y).all() for y in decoded)
        # The statistics of a balanced channel are of the whole sequence.
        assert np.isnan(decoded[-1]).all()


def test_a_power_of_two_changes_nothing_but_the_scale():
    codecs = (
        Quantized(2),
        Quantized(4),
        Quantized(8, scaling="channel"),
        Quantized(3, group=8, levels="normal"),
        Quantized(4, levels="normal"),
    )
    x = np.stack([np.linspace(-1, 1, 128, dtype="float32"), normal(128) / 8])
    plain = decoded_of_all(codecs, x)
    # The inverse of a scale near 2^126 is subnormal.
    for power in (-90, -40, 40, 90, 126):
        for got, want in zip(decoded_of_all(codecs, np.ldexp(x, power)), plain, strict=True):
            np.testing.assert_array_equal(got, np.ldexp(want, power))


def test_a_range_that_is_too_large_overflows():
    # With one bit by channel, the scale is twice the largest number.
    x = normal(5, 20)
    x[1, :2] = 3e38, -3e38
    by_group = [Quantized(1, group=8, scale_dtype=dtype) for dtype in ("bfloat16", "float32")]
    by_channel = [dataclasses.replace(codec, scaling="channel") for codec in by_group]
    codecs = (*by_group, *by_channel)
    for codec, got in zip(codecs, decoded_of_all(codecs, x), strict=True):
        spoilt = np.zeros(x.shape, bool)
        spoilt[(1, slice(8)) if codec.scaling == "group" else (slice(None), slice(2))] = True
        np.testing.assert_array_equal(np.isfinite(got), ~spoilt)


def test_one_number_is_the_lowest_level_of_its_group():
    # The dtype of scales represents it, and the range is zero.
    x = normal(50, 1).astype(jnp.bfloat16).astype("float32")
    codecs = tuple(map(Quantized, (1, 4, 8), (128,) * 3, ROUNDINGS))
    for got in decoded_of_all(codecs, x):
        np.testing.assert_array_equal(got, x)


def test_arrays_without_elements():
    codecs = (
        Quantized(3, rotate=True, balance=True),
        Quantized(4, outlier_fraction=0.1),
        Quantized(1, levels="normal"),
    )
    for shape in ((0, 5), (3, 0)):
        assert [y.shape for y in decoded_of_all(codecs, np.zeros(shape, "float32"))] == [shape] * 3
