"""Tests of actjax/codecs/quantized.py: the error of each number and the bytes it takes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax import Quantized
from actjax.kernels.group_scales import SLACK
from actjax.kernels.levels import normal_error, normal_levels
from actjax.kernels.packing import unpack

KEY = jax.random.key(5)
KEYS = 2000
BITS = (1, 2, 3, 4, 8)
ROUNDINGS = ("nearest", "stochastic", "dither")
TINY = 2.0**-24
"""Relative rounding of an operation in float32."""

drawing = pytest.mark.parametrize("rounding", ["stochastic", "dither"])
scale_dtypes = pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
quick = pytest.mark.usefixtures("quick_compile")


@functools.partial(jax.jit, static_argnums=0)
def coded(codec, x, key=KEY):
    """Returns the code of `x`, its integers, and the decoded numbers."""
    code = codec.encode(x, key)
    return code, unpack(code.planes, codec.bits, code.features, codec.group), codec.decode(code)


def round_trip(codec, x):
    return f64(coded(codec, x)[2])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def f64(x):
    return np.asarray(x, np.float64)


def scales(codec, code):
    """Returns the stored offsets, or None, and the stored scales, [..., groups] or [d]."""
    stored = (None if s is None else np.asarray(s) for s in (code.offset, code.scale))
    return tuple(None if s is None else f64(s.view(jnp.dtype(codec.scale_dtype))) for s in stored)


def levels_of(codec, code):
    """Returns for each number the lowest level of its group or channel, and the scale."""
    low, scale = scales(codec, code)
    if codec.scaling == "channel":
        return -scale * (2**codec.bits - 1) / 2, scale
    return tuple(np.repeat(s, codec.group, -1)[..., : code.features] for s in (low, scale))


def arithmetic(codec, low, scale):
    """Returns the error that float32 arithmetic adds.

    Encoding rounds a difference, a quotient, half the range of a channel, and the sum with a shift,
    which is a multiple of 2^-23. Decoding rounds a difference, a product and a sum. Each operand is
    at most `2^bits` levels, the last also the lowest level.
    """
    return TINY * (8 * 2**codec.bits * scale + abs(low))


# The oracle, in float64 NumPy.


def outwards(value, dtype, towards):
    """Rounds to `dtype`, down (-1) or up (1)."""
    nearest = value.astype(jnp.dtype(dtype))
    wrong = (f64(nearest) - value) * towards < 0
    end = np.full_like(nearest, towards * np.inf)
    return f64(np.where(wrong, np.nextafter(nearest, end), nearest))


def oracle(codec, x):
    """Returns offsets, scales and codes of `x` [T, d], rounded to the nearest."""
    top = 2**codec.bits - 1
    if codec.scaling == "channel":
        scale = outwards(abs(x).max(0) * 2 / top, codec.scale_dtype, 1)
        return None, scale, np.clip(np.rint(x / scale + top / 2), 0, top)
    groups = [x[:, cut : cut + codec.group] for cut in range(0, x.shape[-1], codec.group)]
    low = outwards(np.stack([g.min(-1) for g in groups], -1), codec.scale_dtype, -1)
    high = np.stack([g.max(-1) for g in groups], -1)
    scale = outwards((high - low) / top, codec.scale_dtype, 1)
    spread = [np.repeat(s, codec.group, -1)[:, : x.shape[-1]] for s in (low, scale)]
    return low, scale, np.clip(np.rint((x - spread[0]) / spread[1]), 0, top)


@quick
@pytest.mark.parametrize(
    ("bits", "scaling", "features"),
    [(3, "group", 3), *((bits, s, d) for bits in BITS for s, d in [("group", 20), ("channel", 5)])],
)
def test_rounding_to_the_nearest_equals_the_oracle(bits, scaling, features, x64):
    x = f64(normal(30, features)) + 0.5
    codec = Quantized(bits, group=8, scaling=scaling)
    code, numbers, decoded = coded(codec, x)
    low, scale, want = oracle(codec, x)
    got_low, got_scale = scales(codec, code)
    np.testing.assert_array_equal(got_scale, scale)
    if scaling == "group":
        assert got_scale.shape == (30, -(-features // 8))
        np.testing.assert_array_equal(got_low, low)
    else:
        assert got_scale.shape == (features,)
        assert got_low is None
    np.testing.assert_array_equal(numbers, want)
    lowest, distance = levels_of(codec, code)
    np.testing.assert_allclose(decoded, lowest + want * distance, rtol=1e-13, atol=1e-13)


@scale_dtypes
@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_scales_are_the_least_that_hold_a_group_within_its_levels(scale_dtype, scaling):
    sizes = np.float32([[1], [1000]]).repeat(250, 0) if scaling == "group" else np.float32(1)
    x = sizes * (normal(500, 16) + 3)
    codec = Quantized(4, group=8, scaling=scaling, scale_dtype=scale_dtype)
    code, _, decoded = coded(codec, x)
    stored = "uint16" if scale_dtype != "float32" else "float32"
    assert code.scale.dtype == stored
    assert code.offset is None if scaling == "channel" else code.offset.dtype == stored
    low, scale = levels_of(codec, code)
    x, eps = f64(x), float(jnp.finfo(scale_dtype).eps)
    # Three operations in float32, on numbers up to the largest one.
    slack = 4 * TINY * abs(x).max(-1, keepdims=True)
    assert np.all(low <= x + slack)
    # The levels may fall short of the range by `SLACK`, as `Quantized` documents.
    assert np.all(x <= low + 15 * scale * (1 + SLACK) + slack)
    if scaling == "channel":
        exact = np.broadcast_to(abs(x).max(0) * 2 / 15, x.shape)
    else:
        by_group = x.reshape(500, 2, 8)
        least = by_group.min(-1).repeat(8, -1)
        # At most a unit in the last place, for the offset and for the scale.
        assert np.all(least - low <= eps * abs(least))
        exact = (by_group.max(-1).repeat(8, -1) - low) / 15
    assert np.all(scale <= exact * (1 + eps) + slack)
    assert np.all(abs(f64(decoded) - x) <= scale / 2 + arithmetic(codec, low, scale))


# The error of each number over keys.


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


@functools.cache
def many_keys():
    return jax.random.split(KEY, KEYS)


@functools.partial(jax.jit, static_argnums=0)
def draws(codec, x, keys):
    """Returns the scales, and the decoded numbers for each key before they are rounded to
    bfloat16."""

    def draw(key):
        code = codec.encode(x, key)
        decoded = codec.decode(dataclasses.replace(code, dtype=jnp.dtype("float32")))
        return dataclasses.replace(code, planes=None, seed=None), decoded

    codes, decoded = jax.vmap(draw)(keys)
    # The scales do not depend on the key.
    return jax.tree.map(lambda leaf: leaf[0], codes), decoded


@quick
@drawing
@pytest.mark.parametrize(
    ("bits", "scaling", "dtype"),
    [
        *((bits, "group", "float32") for bits in BITS),
        (4, "group", "bfloat16"),
        (3, "channel", "float32"),
    ],
)
def test_it_is_unbiased_with_the_documented_variance(bits, rounding, scaling, dtype):
    x = groups_of_all_kinds()
    # By channel, the rows become columns: a channel with an outlier, a constant, zeros.
    x = (x if scaling == "group" else x.T).astype(jnp.dtype(dtype))
    codec = Quantized(bits, group=8, rounding=rounding, scaling=scaling)
    code, samples = draws(codec, x, many_keys())
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
    assert np.all(position >= -slack)
    assert np.all(position <= top + slack)
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


@quick
@pytest.mark.parametrize(
    ("rounding", "square", "of_square"),
    # Variances of the square: of a uniform error within half a level, and 1/15 - 1/36 for two
    # levels.
    [("nearest", 1 / 12, 1 / 180), ("dither", 1 / 12, 1 / 180), ("stochastic", 1 / 6, 7 / 180)],
)
def test_uniform_numbers_have_the_documented_average_error(rounding, square, of_square):
    x = np.random.default_rng(0).uniform(-1, 1, (1, 100_000)).astype("float32")
    codec = Quantized(4, group=100_000, rounding=rounding)
    code, _, decoded = coded(codec, x)
    scale = scales(codec, code)[1]
    errors = (f64(decoded) - x) / scale
    # A scale that is rounded up leaves 2^-7 of the range unused, at the end of a level, where no
    # square is above 1/4.
    assert abs((errors**2).mean() - square) <= 5 * np.sqrt(of_square / 100_000) + 2**-9
    # All of 100,000 numbers but the two at the ends, in float32.
    np.testing.assert_allclose(jax.jit(codec.expected_error)(x) / scale**2, square, rtol=2.1e-5)


@quick
def test_the_shift_of_the_dither_does_not_depend_on_the_values(x64):
    # 0 and 15 fix the range to levels of one. With one key, the errors agree up to whole levels.
    codec = Quantized(4, group=32, rounding="dither")
    xs = np.random.default_rng(0).uniform(0, 15, (2, 4, 32))
    xs[..., :2] = 0, 15
    a, b = (round_trip(codec, x) % 1 for x in xs)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert len(np.unique(np.round(a, 6))) > 100


@quick
@pytest.mark.parametrize(
    ("bits", "scaling", "dtype"),
    [
        *((bits, "group", "bfloat16") for bits in BITS),
        *((bits, s, "float32") for bits in (1, 8) for s in ("group", "channel")),
    ],
)
def test_rounding_to_the_nearest_errs_by_at_most_half_a_level(bits, scaling, dtype):
    x = groups_of_all_kinds()
    x = (x if scaling == "group" else x.T).astype(jnp.dtype(dtype))
    codec = Quantized(bits, group=8, scaling=scaling)
    code, _, decoded = coded(codec, x)
    low, scale = levels_of(codec, code)
    assert decoded.dtype == dtype
    # The result is then rounded to the dtype of `x`.
    rounded = float(jnp.finfo(dtype).eps) / 2 * abs(f64(decoded))
    assert np.all(abs(f64(decoded) - f64(x)) <= scale / 2 + arithmetic(codec, low, scale) + rounded)


@quick
@pytest.mark.parametrize("rotate", [False, True])
def test_the_result_is_rounded_to_the_dtype_once(rotate):
    x = np.ones((8, 64), "float32")
    x[:, 5] = 1e4
    codec = Quantized(8, group=64, rotate=rotate)
    code, _, decoded = coded(codec, x.astype(jnp.bfloat16))
    exact = f64(jax.jit(codec.decode)(dataclasses.replace(code, dtype=jnp.dtype("float32"))))
    # Half a unit of 2^-7. A rotation sums 64 terms of at most 2e4 / 8 each, divided by 8.
    once = 2**-8 * abs(exact) + (66 * TINY * 64 * 2e4 / 64 if rotate else 0)
    assert np.all(abs(f64(decoded) - exact) <= once)


@drawing
def test_the_top_of_the_range_never_wraps(rounding):
    # All numbers are at the ends, 0 or 255 levels. For one draw in 2^17, the top level and a shift
    # just below a half add up to 255.5 in float32, which rounds to 256. There are a million draws.
    x = np.tile(np.float32([0, 255]), (2048, 512))
    codec = Quantized(8, group=1024, rounding=rounding)
    got = round_trip(codec, x)
    assert abs(got - x).max() <= (1 if rounding == "stochastic" else 0.5 + 256 * TINY)
    if rounding == "stochastic":
        assert (got.min(), got.max()) == (0, 255)


# Bytes.

TOKENS, WIDTH = 16384, 2048
AFFINE = 2 * 16 / 128
"""A scale and an offset of 16 bits each, for 128 numbers."""
CHANNELS = 20 * (16 / WIDTH + 32 / (TOKENS * WIDTH))
"""20 outlier channels of 16 bits, with an index of 32 bits each."""


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Quantized(1), 1 + AFFINE),
        (Quantized(2), 2 + AFFINE),
        (Quantized(3), 3 + AFFINE),
        (Quantized(4), 4.25),
        (Quantized(8), 8 + AFFINE),
        (Quantized(2, group=32), 2 + 2 * 16 / 32),
        (Quantized(4, group=2048), 4 + 2 * 16 / 2048),
        (Quantized(4, group=4096), 4 + 2 * 16 / 2048),
        (Quantized(4, group=100), 4 + 21 * 2 * 16 / 2048),
        (Quantized(4, scale_dtype="float32"), 4 + 2 * AFFINE),
        (Quantized(4, levels="normal"), 4.125),
        (Quantized(2, levels="normal", group=64, rotate=True), 2 + 16 / 64),
        (Quantized(4, rotate=True), 4 + AFFINE),
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
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16")
    code = jax.eval_shape(codec.encode, x, KEY)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    # Exact to a byte, of 2^26.
    assert total * 8 / x.size == pytest.approx(bits, rel=1e-12)
    assert codec.stored_bytes(x.shape, x.dtype) == total


@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_odd_tokens_are_padded_to_whole_bytes_and_no_more(scaling):
    codec = Quantized(3, group=5, scaling=scaling)
    # 13 numbers are 26 bits in 4 bytes and 13 bits in 2; three groups have a scale and an offset.
    want = 10 * (4 + 2) + (10 * 3 * 2 * 2 if scaling == "group" else 13 * 2)
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((2, 5, 13), "float32"))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code)) == want
    assert codec.stored_bytes((2, 5, 13), "float32") == want


@pytest.mark.parametrize(
    "codec",
    [
        Quantized(2, levels="normal", outlier_fraction=0.02),
        pytest.param(Quantized(4), marks=pytest.mark.slow),
        pytest.param(
            Quantized(1, scaling="channel", rounding="stochastic"), marks=pytest.mark.slow
        ),
    ],
    ids=repr,
)
def test_under_scan_a_layer_takes_its_bits_and_no_more(codec):
    shape, width = (1024, 128), 128

    def temporaries(layers):
        def loss(x, ws):
            def body(x, w):
                return x + actjax.linear(x, w, codec=codec, key=KEY), None

            return jnp.sum(jax.lax.scan(body, x, ws)[0].astype("float32") ** 2)

        x = jax.ShapeDtypeStruct(shape, "bfloat16")
        ws = jax.ShapeDtypeStruct((layers, width, width), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # Buffers are aligned. In the eight more layers, one activation would be 256 KiB, and scales by
    # group in 32 bits instead of 16 would add 2 KiB each.
    assert abs(grown - 8 * codec.stored_bytes(shape, "bfloat16")) < 4096


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
    assert normal_error(bits) == pytest.approx(error, rel=5e-4)


@quick
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


@quick
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


@quick
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


@quick
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


@quick
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


@quick
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


@quick
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


@quick
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


@quick
@pytest.mark.parametrize(("levels", "rotate"), [("uniform", True), ("normal", False)])
def test_a_smaller_last_group_is_encoded_as_by_itself(levels, rotate):
    x = normal(5, 12)
    codec = Quantized(3, group=8, levels=levels, rotate=rotate)
    parts = [round_trip(codec, part) for part in (x[:, :8], x[:, 8:])]
    np.testing.assert_array_equal(round_trip(codec, x), np.concatenate(parts, -1))


@quick
@pytest.mark.parametrize("name", ["affine", "dither, rotated"])
def test_a_group_larger_than_a_token_is_the_token(name):
    x = normal(5, 12)
    large, exact = (dataclasses.replace(VARIANTS[name], group=group) for group in (1000, 12))
    for a, b in zip(*(jax.tree.leaves(coded(c, x)) for c in (large, exact)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert large.stored_bytes((5, 12), "float32") == exact.stored_bytes((5, 12), "float32")


@quick
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


@quick
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


@quick
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


# Wrong arguments.


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("bits", (0, 5, 16, -4, True, None, "4", [4]), "must be one of (1, 2, 3, 4, 8)"),
        ("group", (0, -1, 2.5, True, None, "8"), "must be an integer >= 1"),
        ("rounding", ("up", "", None), "must be one of ('nearest', 'stochastic', 'dither')"),
        ("scaling", ("token", None), "must be one of ('group', 'channel')"),
        ("scale_dtype", ("float16", "float64", None), "must be one of ('bfloat16', 'float32')"),
        ("levels", ("nf4", None), "must be one of ('uniform', 'normal')"),
        ("outlier_fraction", (-0.1, 1, float("nan"), True, None, "0.1"), "must be in [0, 1)"),
    ],
)
def test_wrong_settings_are_named_with_their_value(name, values, expected):
    for value in values:
        message = f"`{name}` of Quantized {expected}, got {value!r}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Quantized(**{"bits": 4, name: value})


@pytest.mark.parametrize(("bits", "rounding"), [(8, "nearest"), (4, "stochastic"), (2, "dither")])
def test_normal_levels_are_for_few_bits_to_the_nearest(bits, rounding):
    message = (
        "`levels` of Quantized can be 'normal' for up to 4 bits with rounding='nearest',"
        f" got bits={bits}, rounding={rounding!r}: use levels='uniform'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Quantized(bits, rounding=rounding, levels="normal")


def test_bias_and_keys_are_declared():
    for rounding in ROUNDINGS:
        codec = Quantized(4, rounding=rounding)
        assert codec.biased == (rounding == "nearest")
        assert codec.needs_key == (rounding != "nearest")
    assert Quantized(4, levels="normal").biased


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
    [Quantized(3, rotate=True), Quantized(4, outlier_fraction=0.1), Quantized(1, levels="normal")],
    ids=repr,
)
def test_arrays_without_elements(codec, shape):
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(np.zeros(shape, "float32"))
    assert decoded.shape == shape


def test_an_array_that_is_not_an_activation_is_refused():
    with pytest.raises(ValueError, match=r"`x` of Quantized\(bits=4\) must have features"):
        Quantized(4).encode(jnp.float32(1))
    with pytest.raises(TypeError, match="must be floating point, got int32"):
        Quantized(4).encode(jnp.ones((2, 3), "int32"))


@pytest.mark.parametrize(("name", "value"), [("bits", 4.0), ("bits", True), ("rotate", "yes")])
def test_settings_of_another_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of Quantized"):
        Quantized(**{"bits": 4, name: value})
