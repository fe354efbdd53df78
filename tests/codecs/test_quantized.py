"""Tests of actjax/codecs/quantized.py: the error of each number and the bytes it takes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_codes import (
    BITS,
    KEY,
    KEYS,
    ROUNDINGS,
    TINY,
    arithmetic,
    coded,
    drawing,
    draws,
    f64,
    levels_of,
    many_keys,
    normal,
    round_trip,
    scales,
)

import actjax
from actjax import Quantized
from actjax.formats.scales import SLACK

scale_dtypes = pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])


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


@pytest.mark.parametrize(
    ("bits", "scaling", "features"),
    [
        (3, "group", 3),
        *((bits, "group", 20) for bits in BITS),
        *((bits, "channel", 5) for bits in (1, 3, 8)),
    ],
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
    assert scaling == "channel" or code.offset.dtype == stored
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


@drawing
@pytest.mark.parametrize(
    ("bits", "scaling", "dtype"),
    [
        *((bits, "group", "float32") for bits in (1, 3, 5, 6, 8)),
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


def test_the_shift_of_the_dither_does_not_depend_on_the_values(x64):
    # 0 and 15 fix the range to levels of one. With one key, the errors agree up to whole levels.
    codec = Quantized(4, group=32, rounding="dither")
    xs = np.random.default_rng(0).uniform(0, 15, (2, 4, 32))
    xs[..., :2] = 0, 15
    a, b = (round_trip(codec, x) % 1 for x in xs)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert len(np.unique(np.round(a, 6))) > 100


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
        (Quantized(5), 5 + AFFINE),
        (Quantized(6, balance=True), 6 + AFFINE + 2 * 16 / TOKENS),
        (Quantized(8), 8 + AFFINE),
        (Quantized(2, group=32), 2 + 2 * 16 / 32),
        (Quantized(4, group=2048), 4 + 2 * 16 / 2048),
        (Quantized(4, group=4096), 4 + 2 * 16 / 2048),
        (Quantized(4, group=100), 4 + 21 * 2 * 16 / 2048),
        (Quantized(4, scale_dtype="float32"), 4 + 2 * AFFINE),
        (Quantized(4, levels="normal"), 4.125),
        (Quantized(2, levels="normal", group=64, rotate=True), 2 + 16 / 64),
        (Quantized(4, rotate=True), 4 + AFFINE),
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


# Wrong arguments.


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("bits", (0, 7, 16, -4, True, None, "4", [4]), "must be one of (1, 2, 3, 4, 5, 6, 8)"),
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


def test_rotation_needs_even_groups():
    with pytest.raises(ValueError, match=r"`rotate` of Quantized has no effect .* got group=7:"):
        Quantized(4, group=7, rotate=True)
    assert Quantized(4, group=7).group == 7


@pytest.mark.parametrize(("name", "value"), [("bits", 4.0), ("bits", True), ("rotate", "yes")])
def test_settings_of_another_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of Quantized"):
        Quantized(**{"bits": 4, name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bits": 2, "scaling": "channel"},
        {"group": 32, "rounding": "dither"},
        {"levels": "normal"},
    ],
    ids=str,
)
def test_a_nan_is_seen_wherever_it_is(settings):
    codec = Quantized(**{"bits": 4, **settings})
    xs = np.tile(normal(32, 128), (3, 1, 1))
    for x, place in zip(xs, [(3, 5), (0, 0), (31, 127)], strict=True):
        x[place] = np.nan
    decoded = jax.jit(lambda xs: jax.lax.map(lambda x: codec.decode(codec.encode(x, KEY)), xs))(xs)
    assert np.all(np.isnan(decoded).any((1, 2)) | np.isinf(decoded).any((1, 2)))
