"""Tests of actjax/codecs/calibrated.py: scales that were measured before, given as arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax import Calibrated, Quantized
from actjax.codecs import ChannelRange
from actjax.formats.levels import normal_levels

KEY = jax.random.key(3)

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
every = pytest.mark.parametrize("name", CODECS)


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def f64(x):
    return np.asarray(x, np.float64)


def round_trip(codec, x):
    return codec.decode(codec.encode(x, KEY))


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def as_numbers(stored):
    """Returns stored scales or centres as numbers."""
    stored = np.asarray(stored)
    return f64(stored.view(jnp.bfloat16) if stored.dtype == np.uint16 else stored)


def fit_all(x):
    return {name: Calibrated.fit(codec, x) for name, codec in CODECS.items()}


@functools.cache
def fitted_and_plain():
    """Returns calibrations on an activation, and what they and their codecs make of it."""

    @jax.jit
    def run(x):
        coded = {}
        for name, calibrated in fit_all(x).items():
            codecs = calibrated, CODECS[name]
            codes = [codec.encode(x, KEY) for codec in codecs]
            decoded = [codec.decode(code) for codec, code in zip(codecs, codes, strict=True)]
            coded[name] = calibrated, [code.planes for code in codes], decoded
        return coded

    # One sequence: a codec that balances channels takes their statistics from each sequence.
    return run(normal(1, 15, 12, dtype="bfloat16"))


@every
def test_on_the_activation_it_was_fitted_to_it_equals_the_codec(name):
    calibrated, planes, decoded = fitted_and_plain()[name]
    assert calibrated.scale.shape == (12,)
    assert decoded[0].dtype == "bfloat16"
    np.testing.assert_array_equal(*decoded)
    jax.tree.map(np.testing.assert_array_equal, *planes)


@every
def test_it_stores_neither_scales_nor_indices(name):
    codec = CODECS[name]
    for dtype in ("float32", "bfloat16"):
        x = jax.ShapeDtypeStruct((2, 15, 12), dtype)
        calibrated = jax.eval_shape(functools.partial(Calibrated.fit, codec), x)
        code = jax.eval_shape(lambda codec, x: codec.encode(x, KEY), calibrated, x)
        statistics = ("offset", "mean", "spread", "centre", "channels")
        assert [getattr(code, name, None) for name in statistics] == [None] * 5
        stored = nbytes(code)
        item, scale_bytes = x.dtype.itemsize, jnp.dtype(codec.scale_dtype).itemsize
        # A scale of each channel is given; the scales of two groups of 8 of a token are stored.
        groups, features = (0, 12) if codec.scaling == "channel" else (2, 16)
        planes = sum(-(-features * p // 8) for p in {3: (2, 1)}.get(codec.bits, (codec.bits,)))
        outliers = round(codec.outlier_fraction * 12)
        key = 8 if codec.rounding == "dither" else 0
        assert stored == 30 * (planes + groups * scale_bytes + outliers * item) + key
        assert calibrated.stored_bytes(x.shape, dtype) == stored
        # A scale of each channel, or mean and spread of each channel of two sequences.
        statistics_count = 12 if codec.scaling == "channel" else 2 * 2 * 12
        assert (
            codec.stored_bytes(x.shape, dtype)
            == stored + statistics_count * scale_bytes + 4 * outliers
        )

        # The backward pass holds the code, the weight and the calibration.
        def pullback(x, w, codec):
            return jax.vjp(lambda x, w: actjax.linear(x, w, codec=codec, key=KEY), x, w)[1]

        w = jax.ShapeDtypeStruct((12, 5), dtype)
        held = nbytes(jax.eval_shape(pullback, x, w, calibrated))
        assert held - nbytes(w) == stored + nbytes(calibrated)


@every
def test_it_is_a_pytree_of_its_arrays_with_the_properties_of_its_codec(name):
    codec, calibrated = CODECS[name], fitted_and_plain()[name][0]
    leaves, structure = jax.tree.flatten(calibrated)
    assert len(leaves) == 1 + bool(codec.outlier_fraction) + codec.balance
    again = jax.tree.unflatten(structure, leaves)
    assert again.codec == codec
    assert (again.biased, again.needs_key) == (codec.biased, codec.needs_key)
    assert repr(again) == f"Calibrated({codec!r})"
    assert again.gradient_rank((15, 12)) is None


@pytest.mark.parametrize(
    ("bits", "rounding"),
    [(1, "nearest"), (5, "nearest"), (8, "nearest"), (3, "stochastic"), (8, "dither")],
)
def test_numbers_outside_its_range_saturate_and_others_err_by_a_level(bits, rounding):
    codec, reach = Quantized(bits, scaling="channel", rounding=rounding), (2**bits - 1) / 2

    @jax.jit
    def run(x, sizes, signs):
        calibrated = Calibrated.fit(codec, x)
        scale = calibrated.scale.view(jnp.bfloat16).astype(jnp.float32)
        inside = jnp.clip(x[::-1], -reach * scale, reach * scale)
        outside = (reach + sizes[:, None, None]) * scale * signs
        return scale, inside, round_trip(calibrated, inside), round_trip(calibrated, outside)

    # Just above the range and far above it, where a code or a byte would wrap around.
    sizes = np.float32([0.51, 1.5, 2.0 ** (bits - 1) + 1, 2.0**bits, 300, 1e6])
    signs = np.sign(normal(6, 50, 8))
    scale, inside, decoded, got = map(f64, run(normal(200, 8), sizes, signs))
    # A few roundings in float32, of up to `2^bits` levels.
    most, rounded = 1 if rounding == "stochastic" else 0.5, 2.0 ** (bits - 20)
    assert np.all(abs(decoded - inside) <= scale * (most + rounded))
    if rounding == "dither":
        # The shift is subtracted again: half a level to either side.
        assert np.all(abs(got - signs * reach * scale) <= scale / 2 * (1 + 2**-14))
    else:
        # Stochastic rounding too: from 0.51 levels above the top, only the top is left. Float32
        # rounds.
        np.testing.assert_allclose(got, signs * reach * scale, rtol=2**-23)


@pytest.mark.parametrize("make", [Calibrated.fit, Calibrated.least_error], ids=lambda f: f.__name__)
def test_its_outlier_channels_come_back_whole_however_large(make):
    x = normal(30, 20) * np.where(np.arange(20) % 7 == 3, 50, 1).astype("float32")
    # Now another channel is the largest, and saturates.
    other = normal(30, 20, seed=1) * np.where(np.arange(20) == 5, 1e6, 1).astype("float32")
    codec = Quantized(2, scaling="channel", outlier_fraction=0.15)

    @jax.jit
    def run(x, other):
        calibrated = make(codec, x)
        return calibrated, round_trip(calibrated, other)

    calibrated, decoded = run(x, other)
    assert sorted(calibrated.channels.tolist()) == [3, 10, 17]
    np.testing.assert_array_equal(decoded[:, 3::7], other[:, 3::7])
    centre = 0 if calibrated.centre is None else as_numbers(calibrated.centre)[5]
    reach = 1.5 * as_numbers(calibrated.scale)[5]
    assert abs(f64(decoded[:, 5]) - centre).max() <= reach * (1 + 2**-20)


def test_a_linear_operator_takes_it_as_a_traced_argument(x64):
    x, w, dy = (normal(*shape, dtype="float64") for shape in [(2, 15, 12), (12, 5), (2, 15, 5)])
    traced = []

    @jax.jit
    def update(x, w, calibrations):
        traced.append(None)
        results = {}
        for name, codec in calibrations.items():
            linear = functools.partial(actjax.linear, codec=codec, key=KEY)
            y, pullback = jax.vjp(linear, x, w)
            results[name] = round_trip(codec, x), y, *pullback(dy)
        return results

    fit = jax.jit(fit_all)
    # The second time with other scales: nothing is compiled again.
    for factor in (1.0, 3.0):
        for decoded, y, dx, dw in update(x, w, fit(factor * x)).values():
            np.testing.assert_allclose(y, x @ w, rtol=0, atol=1e-13)
            np.testing.assert_allclose(dx, dy @ w.T, rtol=0, atol=1e-13)
            # Sums of 30 terms in another order.
            want = f64(decoded).reshape(30, 12).T @ dy.reshape(30, 5)
            np.testing.assert_allclose(dw, want, rtol=0, atol=1e-12)
    assert len(traced) == 1


@pytest.mark.parametrize("name", ["outliers", "balanced"])
def test_stacked_calibrations_go_through_scan_with_the_layers(name, x64):
    xs, ws = normal(3, 15, 12, dtype="float64"), normal(3, 12, 12, dtype="float64", seed=1)
    fit = functools.partial(Calibrated.fit, CODECS[name])

    def layer(x, layer):
        w, calibrated = layer
        return x + jnp.tanh(actjax.linear(x, w, codec=calibrated, key=KEY)), None

    def scanned(ws, calibrations):
        return jnp.sum(jax.lax.scan(layer, xs[0], (ws, calibrations))[0] ** 2)

    def unrolled(ws, calibrations):
        x = xs[0]
        for each in zip(ws, calibrations, strict=True):
            x, _ = layer(x, each)
        return jnp.sum(x**2)

    @jax.jit
    def gradients(ws, xs):
        each = [fit(x) for x in xs]
        return jax.grad(scanned)(ws, jax.vmap(fit)(xs)), jax.grad(unrolled)(ws, each)

    # Not to the last digits, which would decide the rounding of a number halfway between two
    # levels. None of these 540 numbers is so close.
    np.testing.assert_allclose(*gradients(ws, xs), rtol=1e-9, atol=1e-9)


# Scales of the least error.


def squared_error(x, codec, scale, centre):
    """Returns the squared error by channel, in float64, of the nearest levels around a centre."""
    if codec.levels == "normal":
        levels = normal_levels(codec.bits)
    else:
        levels = np.arange(2**codec.bits) - (2**codec.bits - 1) / 2
    position = (f64(x) - centre) / scale
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, position)]
    return np.square((nearest - position) * scale).sum(0)


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

    @jax.jit
    def run(x):
        calibrated = Calibrated.least_error(codec, x)
        return calibrated.scale, calibrated.centre, round_trip(calibrated, x)

    scale, centre, decoded = map(f64, run(x))
    # A mean of 3,000 terms in float32.
    np.testing.assert_allclose(centre, f64(x).mean(0), rtol=0, atol=1e-5)
    got = squared_error(x, codec, scale, centre)
    # Candidates that are a fifth apart, compared with candidates 2% apart.
    tries = [squared_error(x, codec, scale * 1.02**i, centre) for i in range(-200, 201)]
    assert np.all(got <= 1.15 * np.min(tries, 0) + 1e-9)
    # The codes have this error.
    np.testing.assert_allclose(np.square(decoded - x).sum(0), got, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_under_random_rounding_nothing_saturates(rounding):
    x = normal(500, 6)
    x[3, 2], x[4, 3] = 40, -40
    codec = Quantized(2, scaling="channel", rounding=rounding, scale_dtype="float32")

    @jax.jit
    def run(x):
        calibrated = Calibrated.least_error(codec, x)
        draw = lambda key: calibrated.decode(calibrated.encode(x[:5], key))  # noqa: E731
        decoded = jax.vmap(draw)(jax.random.split(KEY, 2000))
        return calibrated.scale, jnp.mean(decoded, 0)

    scale, mean = map(f64, run(x))
    # Means of 2,000 draws: 5 standard errors, each at most half a scale.
    assert np.all(abs(mean - x[:5]) < 5 * 0.5 * scale / np.sqrt(2000))


def test_ranges_of_parts_are_those_of_the_whole():
    x = normal(60, 7) + 3

    @jax.jit
    def run(*parts):
        merged = functools.reduce(ChannelRange.merged, map(ChannelRange.of, parts))
        return merged, merged.typical

    merged, typical = run(x[:10].reshape(2, 5, 7), x[10:15], x[15:])
    want = f64(x)
    np.testing.assert_array_equal(merged.low, want.min(0))
    np.testing.assert_array_equal(merged.high, want.max(0))
    # Sums of 60 numbers in float32.
    np.testing.assert_allclose(merged.mean, want.mean(0), rtol=1e-5)
    weights = 1 / np.linalg.norm(want, axis=-1, keepdims=True)
    np.testing.assert_allclose(typical, (weights * want).sum(0) / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(merged.squares, np.square(want).sum(0), rtol=1e-5)
    assert merged.tokens == 60


# Means and spreads of balanced channels.

BALANCED = Quantized(2, group=16, levels="normal", rotate=True, balance=True, scale_dtype="float32")


def uneven(count, features, seed=0):
    """Returns tokens whose channels have means and deviations of very different sizes."""
    random = np.random.default_rng(seed)
    sizes, means = np.exp(random.normal(size=features)), 3 * random.normal(size=features)
    x = means * (random.random(features) < 0.3) + sizes * random.normal(size=(count, features))
    x[0] *= 300
    return x.astype("float32")


def in_two_passes(codec, parts):
    """Returns the calibration on several activations, as training measures it."""
    known = functools.reduce(ChannelRange.merged, map(ChannelRange.of, parts))
    first = Calibrated.over_range(codec, known)
    return first.refined(sum(first.observe(part) for part in parts))


def test_means_and_spreads_of_parts_are_those_of_the_whole():
    x = uneven(90, 20)

    @jax.jit
    def run(x):
        parts = [x[:30].reshape(2, 15, 20), x[30:31], x[31:]]
        return (
            in_two_passes(BALANCED, parts),
            Calibrated.fit(BALANCED, x),
            Calibrated.least_error(BALANCED, x),
        )

    got, *others = run(x)
    # By the definition, in float64: tokens weighted by inverse norms.
    wide = f64(x)
    weights = 1 / np.linalg.norm(wide, axis=-1, keepdims=True)
    mean = (weights * wide).sum(0) / weights.sum()
    deviation = np.sqrt((weights * (wide - mean) ** 2).sum(0) / weights.sum())
    # Sums of 90 numbers in float32, which cancel down to the mean.
    np.testing.assert_allclose(got.centre, mean, rtol=0, atol=90 * 2**-24 * abs(wide[1:]).max())
    np.testing.assert_allclose(got.scale, np.sqrt(deviation / deviation.max()), rtol=1e-4)
    for other in others:
        np.testing.assert_allclose(other.centre, got.centre, rtol=0, atol=1e-4)
        np.testing.assert_allclose(other.scale, got.scale, rtol=1e-4)


def test_zeros_and_constants_come_back():
    @jax.jit
    def run(x):
        by_channel = Quantized(2, scaling="channel", outlier_fraction=0.3)
        calibrations = {
            "by channel": Calibrated.least_error(by_channel, x),
            "bfloat16": Calibrated.least_error(by_channel, x.astype(jnp.bfloat16)),
            "balanced": Calibrated.fit(BALANCED, x),
            "in two passes": in_two_passes(BALANCED, [x, x]),
        }
        return {
            name: round_trip(codec, x.astype(jnp.bfloat16 if name == "bfloat16" else x.dtype))
            for name, codec in calibrations.items()
        }

    for value in (0.0, 0.1, -3e38, -1e30, 1e-30):
        x = np.full((16, 3), value, "float32")
        for name, decoded in run(x).items():
            if value == -3e38 and name in ("balanced", "in two passes"):
                continue  # Balanced values above 1/64 of the largest number overflow.
            want = f64(x.astype(decoded.dtype))
            # A centre has 8 bits, as a bfloat16 number has; the levels around it reach the value.
            # The mean of equal numbers in float32 is once more rounded.
            rtol = {"by channel": 2**-8, "bfloat16": 0}.get(name, 2**-20)
            np.testing.assert_allclose(f64(decoded), want, rtol=rtol)


def test_a_calibration_on_zeros_still_codes_other_numbers():
    x = normal(40, 16)
    run = jax.jit(lambda zeros, x: round_trip(in_two_passes(BALANCED, [zeros]), x))
    error = np.square(f64(run(np.zeros((8, 16), "float32"), x)) - x).mean()
    # Not balanced: normal levels with a scale of each token, which 16 numbers fit a bit better.
    assert error < 0.13 * np.square(f64(x)).mean()
