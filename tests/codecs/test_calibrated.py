"""Tests of actjax/codecs/calibrated.py: scales that were measured before, given as arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax import Calibrated, Quantized
from actjax.codecs import ChannelRange
from actjax.formats.levels import normal_levels

KEY = jax.random.key(3)
ROUNDINGS = ("nearest", "stochastic", "dither")

CODECS = {
    "plain": Quantized(4, scaling="channel"),
    "outliers": Quantized(3, scaling="channel", outlier_fraction=0.2),
    "dither, rotated": Quantized(
        2, group=8, scaling="channel", rounding="dither", outlier_fraction=0.1, rotate=True
    ),
    "stochastic, float32": Quantized(
        1, scaling="channel", rounding="stochastic", scale_dtype="float32", outlier_fraction=0.1
    ),
    "normal": Quantized(2, scaling="channel", levels="normal"),
    "balanced": Quantized(
        2, group=8, levels="normal", rotate=True, balance=True, outlier_fraction=0.1
    ),
}
every = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def f64(x):
    return np.asarray(x, np.float64)


fit = jax.jit(Calibrated.fit, static_argnums=0)
least_error = jax.jit(Calibrated.least_error, static_argnums=0)


@jax.jit
def round_trip(codec, x, key=KEY):
    code = codec.encode(x, key)
    return code, codec.decode(code)


def scale_of(calibrated):
    return f64(np.asarray(calibrated.scale).view(jnp.dtype(calibrated.codec.scale_dtype)))


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@every
def test_on_the_activation_it_was_fitted_to_it_equals_the_codec(codec):
    @jax.jit
    def both(x):
        calibrated = Calibrated.fit(codec, x)
        code, plain = (c.encode(x, KEY) for c in (calibrated, codec))
        return calibrated, code, calibrated.decode(code), plain, codec.decode(plain)

    # One sequence: a codec that balances channels takes their statistics from each sequence.
    calibrated, code, decoded, plain, want = both(normal(1, 15, 12, dtype="bfloat16"))
    assert calibrated.scale.shape == (12,)
    assert decoded.dtype == "bfloat16"
    np.testing.assert_array_equal(decoded, want)
    for a, b in zip(code.planes, plain.planes, strict=True):
        np.testing.assert_array_equal(a, b)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_stores_neither_scales_nor_indices(codec, dtype):
    x = jax.ShapeDtypeStruct((2, 15, 12), dtype)
    calibrated = jax.eval_shape(functools.partial(Calibrated.fit, codec), x)
    code = jax.eval_shape(lambda codec, x: codec.encode(x, KEY), calibrated, x)
    statistics = ("offset", "mean", "spread", "centre", "channels")
    assert [getattr(code, name, None) for name in statistics] == [None] * 5
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    item, scale_bytes = jnp.dtype(dtype).itemsize, jnp.dtype(codec.scale_dtype).itemsize
    planes = sum(-(-12 * p // 8) for p in {3: (2, 1)}.get(codec.bits, (codec.bits,)))
    # A scale of each channel is given; the scales of two groups of a token are stored.
    groups = 0 if codec.scaling == "channel" else 2
    outliers = round(codec.outlier_fraction * 12)
    key = 8 if codec.rounding == "dither" else 0
    assert stored == 30 * (planes + groups * scale_bytes + outliers * item) + key
    assert calibrated.stored_bytes(x.shape, dtype) == stored
    # A scale of each channel, or mean and spread of each channel of two sequences.
    given = 12 if codec.scaling == "channel" else 2 * 2 * 12
    assert codec.stored_bytes(x.shape, dtype) == stored + given * scale_bytes + 4 * outliers


@pytest.mark.parametrize(
    ("bits", "rounding"),
    [
        *((bits, "nearest") for bits in (1, 2, 5, 6, 8)),
        *((bits, rounding) for bits in (3, 8) for rounding in ("stochastic", "dither")),
    ],
)
def test_numbers_outside_its_range_saturate(bits, rounding):
    codec = Quantized(bits, scaling="channel", rounding=rounding)
    calibrated = fit(codec, normal(200, 8))
    scale = scale_of(calibrated)
    reach = (2**bits - 1) / 2 * scale
    # Just above the range and far above it, where a code or a byte would wrap around.
    sizes = np.float32([0.51, 1.5, 2.0 ** (bits - 1) + 1, 2.0**bits, 300, 1e6])
    x = (reach + sizes[:, None, None] * scale) * np.sign(normal(6, 50, 8))
    got = f64(round_trip(calibrated, x.astype("float32"))[1])
    if rounding == "dither":
        # The shift is subtracted again: half a level to either side.
        assert np.all(abs(got - np.sign(x) * reach) <= scale / 2 * (1 + 2**-14))
    else:
        # Stochastic rounding too: from 0.51 levels above the top, only the top is left. Float32
        # rounds.
        np.testing.assert_allclose(got, np.sign(x) * reach, rtol=2**-23)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_within_its_range_another_activation_errs_by_at_most_a_level(rounding):
    codec = Quantized(4, scaling="channel", rounding=rounding)
    calibrated = fit(codec, normal(200, 8))
    scale = scale_of(calibrated)
    x = np.clip(normal(100, 8, seed=1), -7.5 * scale, 7.5 * scale).astype("float32")
    error = abs(f64(round_trip(calibrated, x)[1]) - x)
    # A few roundings in float32, of up to 16 levels.
    assert np.all(error <= scale * ((1 if rounding == "stochastic" else 0.5) + 2**-16))


def test_its_outlier_channels_come_back_whole_however_large():
    x = normal(30, 20) * np.where(np.arange(20) % 7 == 3, 50, 1).astype("float32")
    codec = Quantized(2, scaling="channel", outlier_fraction=0.15)
    calibrated = fit(codec, x)
    assert sorted(np.asarray(calibrated.channels).tolist()) == [3, 10, 17]
    # Now another channel is the largest, and saturates.
    other = normal(30, 20, seed=1) * np.where(np.arange(20) == 5, 1e6, 1).astype("float32")
    decoded = np.asarray(round_trip(calibrated, other)[1])
    np.testing.assert_array_equal(decoded[:, 3::7], other[:, 3::7])
    assert abs(f64(decoded[:, 5])).max() <= 1.5 * scale_of(calibrated)[5]


def gradients(x, w, dy, calibrated, key):
    y, pullback = jax.vjp(lambda x, w: actjax.linear(x, w, codec=calibrated, key=key), x, w)
    return y, *pullback(dy)


@pytest.mark.parametrize("name", ["outliers", "dither, rotated", "stochastic, float32", "balanced"])
def test_a_linear_operator_takes_it_as_a_traced_argument(name, x64):
    codec = CODECS[name]
    x, w, dy = (normal(*shape, dtype="float64") for shape in [(2, 15, 12), (12, 5), (2, 15, 5)])
    traced = []

    @jax.jit
    def update(x, calibrated):
        traced.append(calibrated)
        decoded = calibrated.decode(calibrated.encode(x, KEY))
        return *gradients(x, w, dy, calibrated, KEY), decoded

    # The second time with other scales: nothing is compiled again.
    for factor in (1.0, 3.0):
        y, dx, dw, decoded = update(x, fit(codec, factor * x))
        np.testing.assert_allclose(y, x @ w, rtol=0, atol=1e-13)
        np.testing.assert_allclose(dx, dy @ w.T, rtol=0, atol=1e-13)
        # Sums of 30 terms in another order.
        want = f64(decoded).reshape(30, 12).T @ f64(dy).reshape(30, 5)
        np.testing.assert_allclose(dw, want, rtol=0, atol=1e-12)
    assert len(traced) == 1


@pytest.mark.parametrize("name", ["outliers", "balanced"])
def test_stacked_calibrations_go_through_scan_with_the_layers(name, x64):
    xs, ws = normal(3, 15, 12, dtype="float64"), normal(3, 12, 12, dtype="float64", seed=1)
    calibrations = jax.jit(jax.vmap(functools.partial(Calibrated.fit, CODECS[name])))(xs)
    assert calibrations.scale.shape == (3, 12)

    def layer(x, w, calibrated):
        return x + jnp.tanh(actjax.linear(x, w, codec=calibrated, key=KEY))

    @jax.jit
    @jax.grad
    def scanned(ws):
        stack = (ws, calibrations)
        return jnp.sum(jax.lax.scan(lambda x, wc: (layer(x, *wc), None), xs[0], stack)[0] ** 2)

    @jax.jit
    def one(x, w, calibrated, dy):
        y, pullback = jax.vjp(lambda x, w: layer(x, w, calibrated), x, w)
        return y, *pullback(dy)

    # By hand: each layer with its own calibration.
    own = [(w, fit(CODECS[name], x)) for w, x in zip(ws, xs, strict=True)]
    inputs, want = [xs[0]], []
    for wc in own:
        inputs.append(one(inputs[-1], *wc, xs[0])[0])
    dx = 2 * inputs.pop()
    for x, wc in zip(reversed(inputs), reversed(own), strict=True):
        _, dx, dw = one(x, *wc, dx)
        want.insert(0, dw)
    # Not to the last digits, which would decide the rounding of a number halfway between two
    # levels. None of these 540 numbers is so close.
    np.testing.assert_allclose(scanned(ws), jnp.stack(want), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "codec",
    [
        Quantized(4, scaling="channel", outlier_fraction=0.05),
        Quantized(2, levels="normal", rotate=True, balance=True),
    ],
    ids=["outliers", "balanced"],
)
def test_under_scan_a_layer_takes_its_bits_and_no_statistics(codec):
    shape, width = (512, 64), 64

    def temporaries(layers):
        def loss(x, ws, calibrations):
            def body(x, layer):
                w, calibrated = layer
                return x + actjax.linear(x, w, codec=calibrated), None

            return jnp.sum(jax.lax.scan(body, x, (ws, calibrations))[0] ** 2)

        x = jax.ShapeDtypeStruct(shape, "float32")
        ws = jax.ShapeDtypeStruct((layers, width, width), "float32")
        stack = jax.ShapeDtypeStruct((layers, *shape), "float32")
        calibrations = jax.eval_shape(jax.vmap(functools.partial(Calibrated.fit, codec)), stack)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws, calibrations).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    calibrated = jax.eval_shape(
        functools.partial(Calibrated.fit, codec), jax.ShapeDtypeStruct(shape, "float32")
    )
    # Buffers are aligned. One activation is 128 KiB.
    assert abs(grown - 8 * calibrated.stored_bytes(shape, "float32")) < 4096


@every
def test_it_is_a_pytree_of_its_arrays(codec):
    calibrated = jax.eval_shape(
        functools.partial(Calibrated.fit, codec), jax.ShapeDtypeStruct((15, 12), "float32")
    )
    leaves, structure = jax.tree.flatten(calibrated)
    assert len(leaves) == 1 + bool(codec.outlier_fraction) + codec.balance
    again = jax.tree.unflatten(structure, leaves)
    assert again.codec == codec
    assert isinstance(again, actjax.Codec)


@every
def test_it_declares_the_properties_of_its_codec(codec):
    calibrated = Calibrated(codec, jnp.ones(12), None)
    assert calibrated.biased == codec.biased
    assert calibrated.needs_key == codec.needs_key
    assert repr(calibrated) == f"Calibrated({codec!r})"
    assert calibrated.gradient_rank((15, 12)) is None


def test_spreads_without_means_are_refused():
    codec = Calibrated(BALANCED, jnp.ones(12), None)
    with pytest.raises(ValueError, match=r"`scale` and `centre` of Quantized.* together"):
        codec.encode(jnp.ones((15, 12)))


def test_balanced_channels_have_no_scales_to_narrow():
    codec = Calibrated(BALANCED, jnp.ones(12), None, jnp.zeros(12))
    with pytest.raises(ValueError, match="no scales of channels to narrow: use `observe`"):
        codec.errors(jnp.ones((15, 12)))


def test_a_codec_that_scales_by_group_is_refused():
    codec = Quantized(4, group=8)
    message = f"`codec` of Calibrated must have scaling='channel', got {codec}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Calibrated.fit(codec, jnp.ones((15, 12)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Calibrated.fit(actjax.Exact(), jnp.ones((5, 4))), "must be a Quantized, got Exac"),
        (lambda: Calibrated.fit(BALANCED, [1.0]), "must be an array, got list"),
        (lambda: Calibrated.over_range(BALANCED, jnp.ones((5, 4))), "must be a ChannelRange, got"),
        (lambda: Calibrated.least_error(BALANCED, jnp.ones((0, 4))), "must have tokens and featur"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("shape", "calibrated"), [((15, 11), (12,)), ((12, 13), (12,)), ((), (1,)), ((15, 12), (3, 12))]
)
def test_another_number_of_channels_is_refused(shape, calibrated):
    # The last calibration is a stack, and a layer takes one of it.
    codec = Calibrated(CODECS["plain"], np.ones(calibrated, "uint16"), None)
    message = f"`x` has {shape[-1:]} channels, but the calibration has {calibrated}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        codec.encode(jnp.ones(shape))
    if shape:
        w, dy = jnp.ones((shape[-1], 5)), jnp.ones((*shape[:-1], 5))
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(gradients, jnp.ones(shape), w, dy, codec, None)


@pytest.mark.parametrize("name", ["dither, rotated", "stochastic, float32"])
def test_a_missing_key_is_named(name):
    x, calibrated = jnp.ones((15, 12)), Calibrated(CODECS[name], jnp.ones(12), None)
    with pytest.raises(ValueError, match="got key=None: pass `key`"):
        calibrated.encode(x)
    with pytest.raises(ValueError, match="got key=None: pass `key`"):
        actjax.linear(x, jnp.ones((12, 5)), codec=calibrated)


# Scales of the least error.


def squared_error(x, codec, scale, centre):
    """Returns the squared error by channel, in float64, of the nearest levels around a centre."""
    if codec.levels == "normal":
        levels = normal_levels(codec.bits)
    else:
        levels = np.arange(2**codec.bits) - (2**codec.bits - 1) / 2
    bounds, total = (levels[1:] + levels[:-1]) / 2, np.zeros(x.shape[1])
    for channel, (column, unit, middle) in enumerate(zip(f64(x).T, scale, centre, strict=True)):
        position = (column - middle) / unit
        total[channel] = np.square(
            (levels[np.searchsorted(bounds, position)] - position) * unit
        ).sum()
    return total


def scales_of(calibrated):
    view = jnp.dtype(calibrated.codec.scale_dtype)
    return (f64(np.asarray(s).view(view)) for s in (calibrated.scale, calibrated.centre))


@pytest.mark.parametrize(
    ("bits", "levels"),
    [(1, "uniform"), (2, "uniform"), (2, "normal"), (4, "uniform"), (8, "uniform")],
)
def test_the_reach_of_least_error_is_found(bits, levels):
    """Channels: normal, far from zero, with one large number, uniform, with two values."""
    count = 3000
    x = normal(count, 5) * np.float32([1, 0.1, 1, 0, 0]) + np.float32([0, 7, 0, 0, 0])
    x[17, 2] = 60
    x[:, 3], x[:, 4] = np.linspace(-3, 1, count), np.tile([2, 5], count // 2)
    codec = Quantized(bits, scaling="channel", levels=levels, scale_dtype="float32")
    calibrated = least_error(codec, x)
    scale, centre = scales_of(calibrated)
    # A mean of 3,000 terms in float32.
    np.testing.assert_allclose(centre, f64(x).mean(0), rtol=0, atol=1e-5)
    got = squared_error(x, codec, scale, centre)
    # Candidates that are a fifth apart, compared with candidates 2% apart.
    tries = [squared_error(x, codec, scale * 1.02**i, centre) for i in range(-200, 201)]
    assert np.all(got <= 1.15 * np.min(tries, 0) + 1e-9)
    # The codes have this error.
    np.testing.assert_allclose(
        np.square(f64(round_trip(calibrated, x)[1]) - f64(x)).sum(0), got, rtol=1e-3, atol=1e-6
    )


def test_it_is_better_than_the_whole_range_about_zero():
    x = normal(2000, 6) + 2
    codec = Quantized(2, scaling="channel")
    errors = [
        np.square(f64(round_trip(one, x)[1]) - f64(x)).mean()
        for one in (fit(codec, x), least_error(codec, x))
    ]
    # The uniform quantizer of Max with four levels errs by 0.1188 of the variance; candidates are a
    # fifth apart.
    assert errors[1] < 0.13 < errors[0]


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_under_random_rounding_nothing_saturates(rounding):
    x = normal(500, 6)
    x[3, 2] = 40
    codec = Quantized(2, scaling="channel", rounding=rounding, scale_dtype="float32")
    calibrated = least_error(codec, x)
    keys = jax.random.split(KEY, 2000)
    draw = lambda key: calibrated.decode(calibrated.encode(x[:5], key))  # noqa: E731
    mean = jax.jit(lambda keys: jnp.mean(jax.vmap(draw)(keys), 0))(keys)
    scale, _ = scales_of(calibrated)
    # Means of 2,000 draws: 5 standard errors, each at most half a scale.
    assert np.all(abs(f64(mean) - f64(x[:5])) < 5 * 0.5 * scale / np.sqrt(2000))


def test_the_range_of_no_tokens_is_refused():
    for shape in ((0, 8), (2, 0, 8), (4, 0)):
        with pytest.raises(ValueError, match="must have tokens and features to measure, got shape"):
            ChannelRange.of(jnp.zeros(shape))


def test_ranges_of_parts_are_those_of_the_whole():
    x = normal(60, 7) + 3
    measure = jax.jit(ChannelRange.of)
    parts = [measure(part) for part in (x[:10].reshape(2, 5, 7), x[10:15], x[15:])]
    merged = jax.jit(lambda *parts: functools.reduce(ChannelRange.merged, parts))(*parts)
    want = f64(x)
    np.testing.assert_array_equal(merged.low, want.min(0))
    np.testing.assert_array_equal(merged.high, want.max(0))
    # Sums of 60 numbers in float32.
    np.testing.assert_allclose(merged.mean, want.mean(0), rtol=1e-5)
    weights = 1 / np.linalg.norm(want, axis=-1, keepdims=True)
    np.testing.assert_allclose(merged.typical, (weights * want).sum(0) / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(merged.squares, np.square(want).sum(0), rtol=1e-5)
    assert merged.tokens == 60


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constant_channels_come_back(dtype):
    codec = Quantized(2, scaling="channel", outlier_fraction=0.3)
    for value in (0.0, 0.1, -3e38, 1e-30):
        x = np.full((16, 3), value, jnp.dtype(dtype))
        decoded = f64(round_trip(least_error(codec, x), x)[1])
        # A centre has 8 bits, as a bfloat16 number has; the levels around it reach the value.
        np.testing.assert_allclose(decoded, f64(x), rtol=0 if dtype == "bfloat16" else 2**-8)


def test_outlier_channels_do_not_affect_the_levels():
    x = normal(200, 10)
    x[:, 4] *= 100
    codec = Quantized(2, scaling="channel", outlier_fraction=0.1)
    calibrated = least_error(codec, x)
    assert calibrated.channels.tolist() == [4]
    decoded = np.asarray(round_trip(calibrated, x)[1])
    np.testing.assert_array_equal(decoded[:, 4], x[:, 4])


def test_rotated_channels_have_no_known_range():
    codec = Quantized(2, scaling="channel", rotate=True)
    with pytest.raises(ValueError, match="`codec` has rotate=True"):
        Calibrated.least_error(codec, jnp.ones((4, 8)))


# Means and spreads of balanced channels.

BALANCED = Quantized(2, group=16, levels="normal", rotate=True, balance=True, scale_dtype="float32")


def uneven(count, features, seed=0):
    """Returns tokens whose channels have means and deviations of very different sizes."""
    random = np.random.default_rng(seed)
    sizes, means = np.exp(random.normal(size=features)), 3 * random.normal(size=features)
    x = means * (random.random(features) < 0.3) + sizes * random.normal(size=(count, features))
    x[0] *= 300
    return x.astype("float32")


@functools.partial(jax.jit, static_argnums=0)
def in_two_passes(codec, parts):
    """Returns the calibration on several activations, as training measures it."""
    known = functools.reduce(ChannelRange.merged, [ChannelRange.of(part) for part in parts])
    whole = Calibrated.over_range(codec, known)
    return whole.refined(sum(whole.observe(part) for part in parts))


def test_means_and_spreads_of_parts_are_those_of_the_whole():
    x = uneven(90, 20)
    got = in_two_passes(BALANCED, [x[:30].reshape(2, 15, 20), x[30:31], x[31:]])
    # By the definition, in float64: tokens weighted by inverse norms.
    wide = f64(x)
    weights = 1 / np.linalg.norm(wide, axis=-1, keepdims=True)
    mean = (weights * wide).sum(0) / weights.sum()
    weights = 1 / np.linalg.norm(wide - mean, axis=-1, keepdims=True)
    deviation = np.sqrt((weights * (wide - mean) ** 2).sum(0) / weights.sum())
    # Sums of 90 numbers in float32, which cancel down to the mean.
    np.testing.assert_allclose(got.centre, mean, rtol=0, atol=90 * 2**-24 * abs(wide[1:]).max())
    np.testing.assert_allclose(got.scale, np.sqrt(deviation / deviation.max()), rtol=1e-4)
    for one in (fit(BALANCED, x), least_error(BALANCED, x)):
        np.testing.assert_allclose(one.centre, got.centre, rtol=0, atol=1e-4)
        np.testing.assert_allclose(one.scale, got.scale, rtol=1e-4)


def test_balanced_channels_err_less_on_other_tokens_than_scales_by_channel():
    x, other = np.split(uneven(600, 64), 2)
    other = other[1:]

    def error(codec):
        return np.square(f64(round_trip(least_error(codec, x), other)[1]) - f64(other)).sum()

    by_channel = error(Quantized(2, scaling="channel"))
    # Normal levels of two bits err by 0.1175 of the variance, Max's uniform ones by 0.1188. The
    # spreads leave it to the channels evenly: at most the mean of the deviations, squared, over
    # that of the variances.
    deviation = f64(x[1:]).std(0)
    best = 0.1175 * deviation.mean() ** 2 * other.size
    assert best * 0.8 < error(BALANCED) < best * 1.3 < by_channel


def test_balanced_zeros_and_constants_come_back():
    for value in (0.0, 0.1, -1e30, 1e-30):
        x = np.full((16, 3), value, "float32")
        for calibrated in (fit(BALANCED, x), in_two_passes(BALANCED, [x, x])):
            decoded = f64(round_trip(calibrated, x)[1])
            # The mean of equal numbers in float32, once more rounded.
            np.testing.assert_allclose(decoded, f64(x), rtol=2**-20)


def test_a_calibration_on_zeros_still_codes_what_comes():
    calibrated = in_two_passes(BALANCED, [np.zeros((8, 16), "float32")])
    x = normal(40, 16)
    error = np.square(f64(round_trip(calibrated, x)[1]) - f64(x)).mean()
    # Not balanced: normal levels with a scale of each token, which 16 numbers fit a bit better.
    assert error < 0.13 * np.square(f64(x)).mean()
