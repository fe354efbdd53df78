"""Tests of actjax/codecs/quantized.py: what each number errs by, and the bytes that it takes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax import Quantized
from actjax.codecs.packing import unpack
from actjax.codecs.quantized import normal_levels

KEY = jax.random.key(5)
KEYS = 2000
BITS = (1, 2, 3, 4, 8)
TINY = 2.0**-24
"""What an operation of float32 rounds by, of its result."""

every = pytest.mark.parametrize("bits", BITS)
drawing = pytest.mark.parametrize("rounding", ["stochastic", "dither"])
scale_dtypes = pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x, key=KEY):
    return codec.encode(x, key)


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, code):
    return codec.decode(code)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x, key=KEY):
    return codec.decode(codec.encode(x, key))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def f64(x):
    return np.asarray(x, np.float64)


def scales(codec, code):
    """The lowest values, or None, and the scales as they are stored, [..., groups] or [d]."""

    def read(stored):
        return (
            None if stored is None else f64(np.asarray(stored).view(jnp.dtype(codec.scale_dtype)))
        )

    return read(code.low), read(code.step)


def levels_of(codec, code):
    """For each number, the lowest level of its group or channel, and the distance of two."""
    low, step = scales(codec, code)
    if codec.scaling == "channel":
        return -step * (2**codec.bits - 1) / 2, step
    return tuple(np.repeat(s, codec.group, -1)[..., : code.features] for s in (low, step))


def arithmetic(codec, low, step):
    """What float32 adds to an error.

    Encoding rounds a difference, a quotient, the half range of a channel, and the sum with a
    shift that itself is a multiple of 2^-23; decoding a difference, a product and a sum. Each is
    of at most `2^bits` levels, the last also of the lowest level.
    """
    return TINY * (8 * 2**codec.bits * step + abs(low))


# Codes in float64 NumPy.


def outwards(value, dtype, towards):
    """Rounds to `dtype`, away from what lies between: down (-1) or up (1)."""
    dtype = jnp.dtype(dtype)
    nearest = value.astype(dtype)
    wrong = (f64(nearest) - value) * towards < 0
    end = np.full_like(nearest, towards * np.inf)
    return f64(np.where(wrong, np.nextafter(nearest, end), nearest))


def oracle(codec, x):
    """Low values, scales and codes of `x` [T, d], to the nearest."""
    steps = 2**codec.bits - 1
    if codec.scaling == "channel":
        step = outwards(abs(x).max(0) * 2 / steps, codec.scale_dtype, 1)
        return None, step, np.clip(np.rint(x / step + steps / 2), 0, steps)
    cuts = range(0, x.shape[-1], codec.group)
    groups = [x[:, cut : cut + codec.group] for cut in cuts]
    low = outwards(np.stack([g.min(-1) for g in groups], -1), codec.scale_dtype, -1)
    high = np.stack([g.max(-1) for g in groups], -1)
    step = outwards((high - low) / steps, codec.scale_dtype, 1)
    spread = functools.partial(np.repeat, repeats=codec.group, axis=-1)
    position = (x - spread(low)[:, : x.shape[-1]]) / spread(step)[:, : x.shape[-1]]
    return low, step, np.clip(np.rint(position), 0, steps)


@every
@pytest.mark.parametrize("scaling", ["group", "channel"])
@pytest.mark.parametrize(("features", "group"), [(20, 8), (5, 8), (1, 1), (16, 4)])
def test_to_the_nearest_it_is_the_oracle(bits, scaling, features, group, x64):
    x = normal(30, features) + 0.5
    codec = Quantized(bits, group=group, scaling=scaling)
    code = encode(codec, x)
    low, step, codes = oracle(codec, x)
    got_low, got_step = scales(codec, code)
    np.testing.assert_array_equal(got_step, step)
    if scaling == "group":
        assert got_step.shape == (30, -(-features // group))
        np.testing.assert_array_equal(got_low, low)
    else:
        assert got_low is None
        assert got_step.shape == (features,)
    np.testing.assert_array_equal(unpack(code.planes, bits, features), codes)
    first, distance = levels_of(codec, code)
    np.testing.assert_allclose(
        decode(codec, code), first + codes * distance, rtol=1e-13, atol=1e-13
    )


@scale_dtypes
@pytest.mark.parametrize("scaling", ["group", "channel"])
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e3])
def test_scales_are_the_least_that_hold_a_group_within_its_levels(scale_dtype, scaling, size):
    # 24 bits of `x` hold the difference of two, so that the exact range rounds by 2^-24.
    x = (size * (normal(500, 16) + 3)).astype("float32")
    codec = Quantized(4, group=8, scaling=scaling, scale_dtype=scale_dtype)
    low, step = levels_of(codec, encode(codec, x))
    x, eps = f64(x), float(jnp.finfo(scale_dtype).eps)
    slack = 4 * TINY * abs(x).max()
    assert np.all(low <= x + slack)
    assert np.all(x <= low + 15 * step + slack)
    if scaling == "channel":
        exact = np.broadcast_to(abs(x).max(0) * 2 / 15, x.shape)
    else:
        by_group = x.reshape(500, 2, 8)
        least = by_group.min(-1).repeat(8, -1)
        # Where all is positive, down by less than a unit of the last place.
        assert np.all(least - low <= eps * abs(least))
        exact = (by_group.max(-1).repeat(8, -1) - low) / 15
    assert np.all(step <= exact * (1 + eps) + slack)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
@pytest.mark.parametrize("size", [1e-4, 1e-6, 1e-30])
def test_float16_scales_hold_small_groups_within_their_levels_too(rounding, size):
    x = (size * normal(50, 16)).astype("float32")
    codec = Quantized(4, group=8, rounding=rounding, scale_dtype="float16")
    code = encode(codec, x)
    low, step = levels_of(codec, code)
    slack = arithmetic(codec, low, step)
    assert np.all(low <= x)
    assert np.all(x <= low + 15 * step + slack)
    most = 1.0 if rounding == "stochastic" else 0.5
    assert np.all(abs(f64(decode(codec, code)) - x) <= most * step + slack)


# What each number errs by, over keys.


def groups_of_all_kinds():
    rows = normal(9, 20)
    rows[1] *= 1e30
    rows[2] *= 1e-30
    rows[3, [1, 9, 17]] = 1e4
    rows[4, ::3], rows[4, 1::3] = 1e30, 1e-30
    rows[5] = 0.1
    rows[6] = -2.5
    rows[7] = 0
    # Far from zero, where the lowest value rounds by as much as a level.
    rows[8] += 1000
    return rows


def variance(codec, share):
    """In squared levels, of a number this share of the way from one level to the next."""
    return share * (1 - share) if codec.rounding == "stochastic" else np.full(share.shape, 1 / 12)


@functools.partial(jax.jit, static_argnums=0)
def over_keys(codec, x):
    """The code under one key, and what is decoded under many, before it is rounded to bfloat16."""

    def decoded(key):
        code = codec.encode(x, key)
        return codec.decode(dataclasses.replace(code, dtype=jnp.dtype("float32")))

    keys = jax.random.split(KEY, KEYS)
    return codec.encode(x, keys[0]), jax.vmap(decoded)(keys)


@every
@drawing
@pytest.mark.parametrize(
    ("scaling", "dtype"), [("group", "float32"), ("group", "bfloat16"), ("channel", "float32")]
)
def test_it_is_unbiased_and_of_the_variance_that_the_docstring_says(bits, rounding, scaling, dtype):
    x = groups_of_all_kinds()
    # By channel, zeros and constants and a large one among small ones, down the columns.
    x = jnp.asarray(x if scaling == "group" else x.T, dtype)
    codec = Quantized(bits, group=8, rounding=rounding, scaling=scaling)
    code, samples = over_keys(codec, x)
    x, samples = f64(x), f64(samples)
    low, step = (np.broadcast_to(a, x.shape) for a in levels_of(codec, code))

    # Where all are the same number of the dtype of scales, nothing is rounded.
    flat = step == 0
    np.testing.assert_array_equal(samples[:, flat], np.tile(x[flat], (KEYS, 1)))

    # In levels from here on.
    position = ((x - low) / np.where(flat, 1, step))[~flat]
    errors = (samples - x)[:, ~flat] / step[~flat]
    slack = (arithmetic(codec, low, step) / np.where(flat, 1, step))[~flat]
    assert np.all(position >= -slack)
    assert np.all(position <= 2**bits - 1 + slack)
    share = np.clip(position - np.floor(position), 0, 1)
    of_one = variance(codec, share)

    # Every draw: nothing wraps at the ends of the range.
    most = 1.0 if rounding == "stochastic" else 0.5
    assert np.all(abs(errors) <= most + slack)

    # Bernstein's inequality, for what errs by one level at most: 5 standard errors, and 25 / (3 n)
    # for rare events, are exceeded with a probability below 2 e^-12.5.
    rare = 25 / (3 * KEYS)
    assert np.all(abs(errors.mean(0)) <= 5 * np.sqrt(of_one / KEYS) + rare + slack)
    # All together: a hundred numbers with draws of their own.
    pooled = 5 * np.sqrt(of_one.sum() / KEYS) + rare
    assert abs(errors.mean(0).sum()) <= pooled + slack.sum()

    squares = (errors**2).mean(0)
    if rounding == "stochastic":
        # `1 - t` with a probability of `t`, else `-t`: the square has this variance.
        of_square = of_one * (1 - 2 * share) ** 2
        assert np.all(squares <= 0.25 + 5 * np.sqrt(of_square / KEYS) + rare + 2 * slack)
    else:
        of_square = 1 / 180
        # Uniform, wherever a number lies between two levels. Dvoretzky-Kiefer-Wolfowitz:
        # exceeded with a probability below 1e-7.
        ordered, ranks = np.sort(errors, 0), (np.arange(KEYS)[:, None] + 0.5) / KEYS
        off = np.sqrt(np.log(2e7) / (2 * KEYS)) + 0.5 / KEYS
        assert np.all(abs(ordered + 0.5 - ranks) <= off + slack)
    assert np.all(abs(squares - of_one) <= 5 * np.sqrt(of_square / KEYS) + rare + 2 * slack)


@pytest.mark.parametrize(
    ("rounding", "square", "of_square"),
    # Of errors uniform within half a level, and 1/15 - 1/36 for a uniform share.
    [("nearest", 1 / 12, 1 / 180), ("dither", 1 / 12, 1 / 180), ("stochastic", 1 / 6, 7 / 180)],
)
def test_numbers_spread_evenly_err_as_the_docstring_says_on_average(rounding, square, of_square):
    x = np.random.default_rng(0).uniform(-1, 1, (1, 100_000)).astype("float32")
    codec = Quantized(4, group=100_000, rounding=rounding)
    code = encode(codec, x)
    low, step = levels_of(codec, code)
    errors = (f64(decode(codec, code)) - x) / step
    # Both ends of the range lie within a level that is used in part: a share of 2 / 15 at most of
    # one that rounds outwards by 2^-7 of the range, 1 / 8 of a level.
    ends = 2 / 15 / 8
    assert abs((errors**2).mean() - square) <= 5 * np.sqrt(of_square / 100_000) + ends


def test_the_shift_of_the_dither_does_not_depend_on_the_values(x64):
    # Of one key, the same error (mod 1) in levels, whatever is encoded: 0 and 15 fix the range.
    codec = Quantized(4, group=32, rounding="dither")
    ends = np.tile([0.0, 15.0], (4, 1))
    xs = [
        np.concatenate([ends, np.random.default_rng(s).uniform(0, 15, (4, 30))], 1) for s in (1, 2)
    ]
    shifts = [(round_trip(codec, x) % 1) for x in xs]
    np.testing.assert_allclose(shifts[0], shifts[1], rtol=0, atol=1e-13)
    assert len(np.unique(np.round(shifts[0], 6))) > 100


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_to_the_nearest_it_errs_by_half_a_level_at_most(bits, dtype, scaling):
    x = groups_of_all_kinds()
    x = jnp.asarray(x if scaling == "group" else x.T, dtype)
    codec = Quantized(bits, group=8, scaling=scaling)
    code = encode(codec, x)
    got = f64(decode(codec, code))
    low, step = levels_of(codec, code)
    # "Then the result is rounded to the dtype of `x`".
    rounded = float(jnp.finfo(dtype).eps) / 2 * abs(got)
    assert np.all(abs(got - f64(x)) <= step / 2 + arithmetic(codec, low, step) + rounded)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_result_is_rounded_to_the_dtype_once(rounding, rotate):
    x = np.ones((8, 64))
    x[:, 5] = 1e4
    codec = Quantized(8, group=64, rounding=rounding, rotate=rotate)
    code = encode(codec, jnp.asarray(x, "bfloat16"))
    got = decode(codec, code)
    assert got.dtype == jnp.bfloat16
    exact = f64(decode(codec, dataclasses.replace(code, dtype=jnp.dtype("float32"))))
    # Half a unit of 2^-7. A rotation sums 64 terms of float32, none above 1e4.
    once = 2**-8 * abs(exact) + (66 * TINY * 1e4 * 8 if rotate else 0)
    assert np.all(abs(f64(got) - exact) <= once)


@drawing
def test_the_top_of_the_range_never_wraps(rounding):
    # All at the ends: 0, and 255 levels above it. In float32 the top level and a shift just below
    # a half round to 255.5, for one draw in 2^17, which is rounded to 256: there are two million.
    x = np.tile(np.float32([0, 255]), (4096, 512))
    codec = Quantized(8, group=1024, rounding=rounding)
    got = f64(round_trip(codec, x))
    most = 1.0 if rounding == "stochastic" else 0.5 + 256 * TINY
    assert abs(got - x).max() <= most
    if rounding == "stochastic":
        assert got.min() == 0
        assert got.max() == 255


@every
@drawing
def test_the_largest_of_a_group_stays_within_its_range(bits, rounding):
    x = normal(20, 8).astype("float32")
    codec = Quantized(bits, group=8, rounding=rounding)
    code, samples = over_keys(codec, x)
    low, step = levels_of(codec, code)
    beyond = arithmetic(codec, low, step) + (step / 2 if rounding == "dither" else 0)
    assert np.all(samples <= low + (2**bits - 1) * step + beyond)
    assert np.all(samples >= low - beyond)
    at = np.argmax(x, -1)[:, None]
    top = np.take_along_axis(f64(samples), at[None], -1)
    largest, level = (np.take_along_axis(a, at, -1) for a in (x, step))
    assert np.all(
        top >= largest - (level if rounding == "stochastic" else level / 2) - beyond.max()
    )


# Bytes.

TOKENS, WIDTH = 16384, 2048


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Quantized(4), 4 + 2 * 16 / 128),
        (Quantized(1), 1 + 2 * 16 / 128),
        (Quantized(2), 2 + 2 * 16 / 128),
        (Quantized(3), 3 + 2 * 16 / 128),
        (Quantized(8), 8 + 2 * 16 / 128),
        (Quantized(2, group=32), 2 + 2 * 16 / 32),
        (Quantized(4, group=2048), 4 + 2 * 16 / 2048),
        (Quantized(4, group=4096), 4 + 2 * 16 / 2048),
        (Quantized(4, group=100), 4 + 21 * 2 * 16 / 2048),
        (Quantized(4, scale_dtype="float16"), 4 + 2 * 16 / 128),
        (Quantized(4, scale_dtype="float32"), 4 + 2 * 32 / 128),
        (Quantized(4, levels="normal"), 4 + 16 / 128),
        (Quantized(2, levels="normal", group=64, rotate=True), 2 + 16 / 64),
        (Quantized(4, rotate=True), 4 + 2 * 16 / 128),
        (Quantized(4, rounding="stochastic"), 4 + 2 * 16 / 128),
        # Besides: two words of a key.
        (Quantized(4, rounding="dither"), 4 + 2 * 16 / 128 + 64 / (TOKENS * WIDTH)),
        (Quantized(4, scaling="channel"), 4 + 16 / TOKENS),
        (Quantized(2, scaling="channel", scale_dtype="float32"), 2 + 32 / TOKENS),
        (Quantized(4, scaling="channel", levels="normal"), 4 + 16 / TOKENS),
        # 32 channels of 16 bits, and an index of 32 bits each.
        (Quantized(4, outlier_fraction=1 / 64), 4.25 + (16 + 32 / TOKENS) / 64),
        (Quantized(2, scaling="channel", outlier_fraction=0.01), 2 + 16 / TOKENS + 20 / 2048 * 16
         + 20 * 32 / (TOKENS * WIDTH)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_number_takes_these_bits_with_all_that_goes_with_it(codec, bits):
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16")
    code = jax.eval_shape(codec.encode, x, KEY)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    # Sums of a few numbers, none of which is above 2^33.
    assert total * 8 / x.size == pytest.approx(bits, rel=1e-14)
    assert codec.stored_bytes(x.shape, x.dtype) == total


@pytest.mark.parametrize(
    "codec", [Quantized(3, group=5), Quantized(3, scaling="channel")], ids=repr
)
def test_odd_tokens_are_filled_up_to_bytes_and_no_more(codec):
    # Of 13 numbers, 26 bits in 4 bytes and 13 in 2.
    scale = 10 * 3 * 2 * 2 if codec.scaling == "group" else 13 * 2
    assert codec.stored_bytes((2, 5, 13), "float32") == 10 * (4 + 2) + scale
    code = codec.encode(jnp.ones((2, 5, 13)), KEY)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(code)) == 10 * (4 + 2) + scale


@pytest.mark.parametrize(
    "codec",
    [
        Quantized(4),
        Quantized(2, group=32, rounding="stochastic"),
        Quantized(3, rounding="dither", rotate=True),
        Quantized(2, levels="normal"),
        Quantized(4, scaling="channel"),
        Quantized(8, scale_dtype="float32"),
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
    # Buffers are aligned. The activation of one of the eight more layers would be 256 KiB, and
    # its scales in 32 bits rather than 16 4 KiB more by layer.
    assert abs(grown - 8 * codec.stored_bytes(shape, "bfloat16")) < 4096


# Levels for normal numbers.

# Max, "Quantizing for minimum distortion" (1960), table I; Lloyd (1982).
LLOYD_MAX = {
    1: ([0.7979], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_normal_levels_are_the_published_ones(bits):
    levels, published = normal_levels(bits), LLOYD_MAX[bits][0]
    assert levels.shape == (2**bits,)
    # Half a unit of the fourth digit.
    np.testing.assert_allclose(levels[2 ** (bits - 1) :], published, rtol=5e-4, atol=5e-5)
    np.testing.assert_allclose(levels, -levels[::-1], rtol=0, atol=1e-12)
    # By quadrature: each is the mean of what is nearest to it, and the error is the published one.
    x = np.linspace(-9, 9, 1_800_001)
    density = np.exp(-(x**2) / 2)
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    means = np.bincount(nearest, density * x) / np.bincount(nearest, density)
    np.testing.assert_allclose(levels, means, rtol=0, atol=2e-5)
    error = np.average((x - levels[nearest]) ** 2, weights=density)
    assert error == pytest.approx(LLOYD_MAX[bits][1], rel=5e-4)


@pytest.mark.parametrize("bits", LLOYD_MAX)
@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_normal_numbers_err_as_published(bits, scaling):
    x = (3 * normal(8192, 64)).astype("float32")
    codec = Quantized(bits, group=8192, scaling=scaling, levels="normal")
    x = x.T if scaling == "group" else x
    got = f64(round_trip(codec, x))
    squares = (got - x) ** 2 / 9
    # A scale that is rounded to bfloat16 is off by 2^-8, and one from 8192 numbers moves the error
    # by a few parts of that many; the sample itself is as large as its variance says.
    off = 5 * squares.std() / np.sqrt(x.size) + 2**-16 + 4 / 8192
    assert abs(squares.mean() - LLOYD_MAX[bits][1]) <= off


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_the_scale_of_normal_levels_is_better_than_the_deviation(bits, x64):
    # Numbers that are anything but normal.
    x = normal(40, 16) ** 3 + 0.2
    codec = Quantized(bits, group=16, levels="normal", scale_dtype="float32")
    code = encode(codec, x)
    levels, (_, step) = normal_levels(bits), scales(codec, code)
    bounds = (levels[1:] + levels[:-1]) / 2
    deviation = np.sqrt((x**2).mean(-1, keepdims=True))
    plain = levels[np.searchsorted(bounds, x / deviation)]
    fitted = (x * plain).sum(-1) / (plain**2).sum(-1)
    # Least squares, in 24 bits.
    np.testing.assert_allclose(step[:, 0], fitted, rtol=2**-24)
    got = f64(decode(codec, code))
    np.testing.assert_allclose(
        got, step * levels[np.searchsorted(bounds, x / step)], rtol=1e-12, atol=0
    )
    better = ((got - x) ** 2).sum(-1) <= ((deviation * plain - x) ** 2).sum(-1) * (1 + 1e-6)
    assert np.all(better)


@pytest.mark.parametrize(
    "codec",
    [
        Quantized(4, group=8),
        Quantized(3, group=8, levels="normal"),
        Quantized(2, scaling="channel"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("power", [-90, -40, 40, 90])
def test_a_power_of_two_changes_nothing_but_the_scale(codec, power):
    x = normal(30, 16).astype("float32")
    # No rounding of any operation changes, and squares are no more than a means.
    np.testing.assert_array_equal(
        round_trip(codec, np.ldexp(x, power)), np.ldexp(round_trip(codec, x), power)
    )


# Rotated groups and outlier channels.


def with_an_outlier(features=64, size=1e4):
    x = normal(1, features).astype("float32")
    x[0, 5] = size
    return x


def test_a_rotation_makes_an_outlier_hurt_the_others_less():
    x, others = with_an_outlier(), np.arange(64) != 5
    squares = {}
    for rotate in (False, True):
        codec = Quantized(4, group=64, rounding="dither", rotate=rotate)
        code, samples = over_keys(codec, x)
        low, step = (f64(s[0, 0]) for s in scales(codec, code))
        error = (f64(samples) - f64(x))[:, 0, others] / step
        # Errors before an orthogonal map are independent, of variance 1/12 levels: and so after.
        # Of a sum of 64 of them the fourth moment is no more than a normal's, 3 / 144.
        off = 5 * np.sqrt(2 / 144 / KEYS) + 64 * 20 * TINY
        assert np.all(abs((error**2).mean(0) - 1 / 12) <= off)
        assert np.all(abs(error.mean(0)) <= 5 * np.sqrt(1 / 12 / KEYS) + 64 * 20 * TINY)
        squares[rotate] = step**2
    # The outlier is an eighth as large in each coordinate, but on both sides of zero; the others
    # add the sum of their sizes at most. Both ends are rounded outwards by 2^-7.
    largest = (1e4 + abs(x[0, others]).sum()) / 8
    bound = (2 * largest * (1 + 2**-7) ** 2 / 15) ** 2
    assert squares[True] <= bound < 0.1 * squares[False]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
def test_a_rotated_group_errs_by_half_a_level_on_average_at_most(rounding, x64):
    x = normal(50, 20)
    codec = Quantized(4, group=8, rounding=rounding, rotate=True)
    code = encode(codec, x)
    _, step = levels_of(codec, code)
    most = 1.0 if rounding == "stochastic" else 0.5
    # An orthogonal map keeps the length of the errors of each group, and blocks of the last.
    error = f64(decode(codec, code)) - x
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        lengths = np.linalg.norm(error[:, part], axis=-1)
        assert np.all(lengths <= most * np.linalg.norm(step[:, part], axis=-1) * (1 + 1e-12))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("scaling", ["group", "channel"])
@pytest.mark.parametrize(
    ("fraction", "count"), [(0.125, 2), (0.01, 1), (0.2, 3), (0.99, 15), (0.0, 0)]
)
def test_channels_with_the_largest_norms_come_back_whole(rotate, scaling, fraction, count):
    # Norms, not largest numbers, and in no order; the dtype holds them as they are.
    x = normal(3, 40, 16) * np.random.default_rng(1).permutation(2.0 ** np.arange(16))
    x[0, 0, np.argmin((x**2).sum((0, 1)))] = 0.6 * np.sqrt((x**2).sum((0, 1))).min()
    x = jnp.asarray(x, "bfloat16")
    codec = Quantized(2, group=8, outlier_fraction=fraction, rotate=rotate, scaling=scaling)
    code = encode(codec, x)
    if count == 0:
        assert code.outliers is None
        assert code.channels is None
        return
    assert code.outliers.shape == (3, 40, count)
    assert code.outliers.dtype == jnp.bfloat16
    largest = np.argsort((f64(x) ** 2).sum((0, 1)))[::-1][:count]
    assert set(np.asarray(code.channels)) == set(largest)
    got = f64(decode(codec, code))
    np.testing.assert_array_equal(got[..., largest], f64(x)[..., largest])
    # Without them a group has a range of its own: zeros in their place.
    rest = np.setdiff1d(np.arange(16), largest)
    zeroed = f64(x).copy()
    zeroed[..., largest] = 0
    plain = f64(
        round_trip(dataclasses.replace(codec, outlier_fraction=0), jnp.asarray(zeroed, "bfloat16"))
    )
    np.testing.assert_array_equal(got[..., rest], plain[..., rest])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_outliers_are_found_where_squares_leave_float32(size):
    x = size * normal(40, 16).astype("float32")
    x[:, 11] *= 100
    assert list(encode(Quantized(4, outlier_fraction=0.05), x).channels) == [11]


def test_one_channel_at_least_is_left_to_be_rounded():
    assert Quantized(4, outlier_fraction=0.9).stored_bytes((6, 1), "float32") == 6 * (1 + 4)
    code = encode(Quantized(4, outlier_fraction=0.99), normal(6, 2).astype("float32"))
    assert code.outliers.shape == (6, 1)


# Groups.

VARIANTS = {
    "affine": Quantized(4, group=8),
    "stochastic": Quantized(3, group=8, rounding="stochastic"),
    "dither, rotated": Quantized(2, group=8, rounding="dither", rotate=True),
    "normal": Quantized(3, group=8, levels="normal"),
}
variants = pytest.mark.parametrize("codec", VARIANTS.values(), ids=VARIANTS)


def by_number(codec, code):
    """Codes, and scales by group."""
    low, step = scales(codec, code)
    return unpack(code.planes, codec.bits, code.features), step, step if low is None else low


@variants
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_group_has_no_part_in_the_code_of_another(codec, changed):
    # The last group is of four.
    x = normal(5, 20).astype("float32")
    other = x.copy()
    own = slice(8 * changed, 8 * changed + 8)
    other[2, own] = 1e6 * x[2, own] + 7
    first, second = (by_number(codec, encode(codec, a)) for a in (x, other))
    for a, b, at in zip(first, second, (own, changed, changed), strict=True):
        kept = np.ones(a.shape, bool)
        kept[2, at] = False
        np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])
    # Its scale is another.
    assert first[1][2, changed] != second[1][2, changed]


@pytest.mark.parametrize("levels", ["uniform", "normal"])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_last_group_that_is_smaller_is_encoded_as_by_itself(levels, rotate):
    x = normal(5, 20).astype("float32")
    codec = Quantized(3, group=8, levels=levels, rotate=rotate)
    got = f64(round_trip(codec, x))
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        np.testing.assert_array_equal(got[:, part], f64(round_trip(codec, x[:, part])))


@pytest.mark.parametrize("codec", VARIANTS.values(), ids=VARIANTS)
def test_a_group_larger_than_a_token_is_the_token(codec):
    x = normal(5, 12).astype("float32")
    large, exact = (dataclasses.replace(codec, group=group) for group in (1000, 12))
    a, b = encode(large, x), encode(exact, x)
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(got, want)
    assert large.stored_bytes((5, 12), "float32") == exact.stored_bytes((5, 12), "float32")


@every
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
def test_one_number_a_group_is_its_lowest_level(bits, rounding):
    # Of 8 bits, so that the lowest value is stored as it is, and the range is none.
    x = f64(jnp.asarray(normal(50, 1), "bfloat16")).astype("float32")
    for group in (1, 8):
        np.testing.assert_array_equal(round_trip(Quantized(bits, group, rounding), x), x)


@scale_dtypes
@every
def test_scales_are_stored_in_their_dtype(bits, scale_dtype):
    x = normal(6, 16).astype("float32")
    codec = Quantized(bits, group=8, scale_dtype=scale_dtype)
    code = encode(codec, x)
    stored = "uint16" if scale_dtype != "float32" else "float32"
    assert (code.low.dtype, code.step.dtype) == (stored, stored)
    low, step = levels_of(codec, code)
    errors = abs(f64(decode(codec, code)) - x)
    assert np.all(errors <= step / 2 + arithmetic(codec, low, step))
    # By all that is known of the scale: of the exact range, a little more.
    by_group = f64(x).reshape(6, 2, 8)
    eps = float(jnp.finfo(scale_dtype).eps)
    reach = by_group.max(-1) - by_group.min(-1) + eps * abs(by_group.min(-1))
    bound = reach.repeat(8, -1) * (1 + eps) / (2**bits - 1) / 2
    assert np.all(errors <= bound + 2 * arithmetic(codec, low, step))


# Numbers that are none.

WITH_CHANNELS = {
    **VARIANTS,
    "channel": Quantized(4, scaling="channel"),
    "channel, dither": Quantized(4, scaling="channel", rounding="dither"),
    "channel, normal": Quantized(2, scaling="channel", levels="normal"),
}


@pytest.mark.parametrize("codec", WITH_CHANNELS.values(), ids=WITH_CHANNELS)
def test_what_is_no_number_spoils_its_own_group_alone(codec):
    x = normal(5, 20).astype("float32")
    spoilt = x.copy()
    spoilt[2, 10] = np.nan
    group = np.zeros(x.shape, bool)
    if codec.scaling == "group":
        group[2, 8:16] = True
    else:
        group[:, 10] = True
    got, want = f64(round_trip(codec, spoilt)), f64(round_trip(codec, x))
    assert np.all(np.isnan(got[group]))
    np.testing.assert_array_equal(got[~group], want[~group])
    assert np.all(np.isfinite(got[~group]))


@pytest.mark.parametrize(
    ("scale_dtype", "value"), [("bfloat16", 3e38), ("float32", 3e38), ("float16", 3e6)]
)
@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_a_range_too_large_overflows_to_what_is_no_number(scale_dtype, value, scaling):
    # One bit: by channel, the distance of two levels is twice the largest number.
    x = normal(4, 16).astype("float32")
    x[1, :2] = value, -value
    codec = Quantized(1, group=8, scale_dtype=scale_dtype, scaling=scaling)
    got = f64(round_trip(codec, x))
    spoilt = np.zeros(x.shape, bool)
    if scaling == "group":
        spoilt[1, :8] = True
    else:
        spoilt[:, :2] = True
    assert not np.any(np.isfinite(got[spoilt]))
    assert np.all(np.isfinite(got[~spoilt]))


# Wrong arguments.


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("bits", v, "must be one of (1, 2, 3, 4, 8)") for v in (0, 5, 16, -4, True, None, "4")),
        *(("group", v, "must be an integer >= 1") for v in (0, -1, 2.5, True, None, "8")),
        *(
            ("rounding", v, "must be one of ('nearest', 'stochastic', 'dither')")
            for v in ("up", "", None, 1)
        ),
        *(("scaling", v, "must be one of ('group', 'channel')") for v in ("token", None)),
        *(
            ("scale_dtype", v, "must be one of ('bfloat16', 'float16', 'float32')")
            for v in ("float64", "int8", None)
        ),
        *(("levels", v, "must be one of ('uniform', 'normal')") for v in ("nf4", None)),
        *(
            ("outlier_fraction", v, "must be in [0, 1)")
            for v in (-0.1, 1, 1.5, float("nan"), True, None, "0.1")
        ),
    ],
)
def test_wrong_settings_are_named_with_what_came(name, value, expected):
    message = f"`{name}` of Quantized {expected}, got {value!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Quantized(**{"bits": 4, name: value})


@pytest.mark.parametrize(
    ("bits", "rounding"), [(8, "nearest"), (4, "stochastic"), (2, "dither"), (8, "dither")]
)
def test_normal_levels_are_for_few_bits_to_the_nearest(bits, rounding):
    message = (
        "`levels` of Quantized can be 'normal' for up to 4 bits with rounding='nearest',"
        f" got bits={bits}, rounding={rounding!r}: use levels='uniform'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Quantized(bits, rounding=rounding, levels="normal")


def test_what_is_declared():
    assert Quantized(4).biased
    assert not Quantized(4).needs_key
    assert Quantized(4, levels="normal").biased
    for rounding in ("stochastic", "dither"):
        assert not Quantized(4, rounding=rounding).biased
        assert Quantized(4, rounding=rounding).needs_key
