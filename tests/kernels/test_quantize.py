"""Tests of actjax/kernels/quantize and dequantize: each implementation, and the one as the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.closeness import TINY, assert_near, assert_same, f64, normal

from actjax import Quantized
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.format import noise_words, normal_levels
from actjax.kernels.noise import uniform
from actjax.kernels.quantize.api import quantize

SEED = np.array([0x1234567, 0x89ABCDEF], np.uint32)
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}

# Each pair of settings that meets in a kernel is in some row, few others: all are compiled. Features
# are whole groups, one group and a rest, only a rest; the rest even, odd, and no multiple of 8.
CASES = [
    (Quantized(1, group=16), "float32", (2, 5, 48), 0),
    (Quantized(2, group=32, rounding="stochastic", scale_dtype="float32"), "bfloat16", (9, 38), 3),
    (Quantized(3, group=32, rounding="dither"), "float32", (2, 5, 77), 0),
    (Quantized(4, group=128, rounding="dither"), "bfloat16", (10, 256), 0),
    (Quantized(8, group=16), "float16", (9, 33), 0),
    (Quantized(8, group=128, rounding="dither", scale_dtype="float32"), "float32", (7, 100), 5),
    (Quantized(4, group=32, levels="normal"), "float32", (9, 40), 2),
    (Quantized(1, group=16, levels="normal"), "bfloat16", (9, 7), 0),
    (Quantized(3, group=16, levels="normal", scale_dtype="float32"), "float16", (2, 5, 32), 0),
    (Quantized(2, group=32, scaling="channel"), "float32", (10, 69), 3),
    (Quantized(3, group=16, scaling="channel", rounding="stochastic"), "bfloat16", (10, 32), 0),
    (Quantized(4, group=32, rounding="dither"), "float32", (77,), 4),
    (
        Quantized(8, group=16, scaling="channel", rounding="dither", scale_dtype="float32"),
        "float32",
        (2, 5, 9),
        0,
    ),
]

every = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]!r}-{case[1]}-{case[2]}-{case[3]}"
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def encoded(implementation, codec, x, seed, channels, step):
    return quantize(
        x, seed, channels, step, format=codec.format, implementation=implementation
    )


@functools.partial(jax.jit, static_argnums=0)
def decoded(implementation, code):
    return dequantize(code, implementation=implementation)


fit_channels = jax.jit(Quantized.fit_channels, static_argnums=0)


def of_all_kinds(count, width, dtype):
    """Rows of numbers that fill their levels, are huge, tiny, constant, or far from zero."""
    huge, tiny = (1e4, 1e-6) if dtype == "float16" else (1e30, 1e-30)
    rows = normal(count, width)
    kinds = np.arange(count) % 9
    rows[kinds == 1] *= huge
    rows[kinds == 2] *= tiny
    rows[kinds == 3, ::7] = 1e4
    rows[kinds == 4, ::3] = huge
    rows[kinds == 4, 1::3] = -tiny
    rows[kinds == 5] = 0.1
    rows[kinds == 6] = -2.5
    rows[kinds == 7] = 0
    rows[kinds == 8] += 1000
    return jnp.asarray(rows, dtype)


def problem(codec, dtype, shape, outliers):
    """Returns the arguments of `quantize`, from `x` on."""
    tokens = int(np.prod(shape[:-1]))
    if codec.scaling == "group":
        x = of_all_kinds(tokens, shape[-1], dtype)
    else:
        x = of_all_kinds(shape[-1], tokens, dtype).T
    x = x.reshape(shape)
    # In no order, and the last one of a rest if there is one.
    channels = np.random.default_rng(1).permutation(shape[-1] - 1)[: outliers - 1]
    channels = np.int32([shape[-1] - 1, *channels]) if outliers else None
    step = None
    if codec.scaling == "channel":
        # Some numbers lie beyond the scales of two thirds of the tokens.
        step = fit_channels(codec, x.reshape(tokens, -1)[: 2 * tokens // 3], channels)
    return x, SEED if codec.needs_key else None, channels, step


# What it means, in float64 NumPy.


def spread(scale, codec, features):
    """Stored scales by feature: of groups [..., groups], or [d] by channel."""
    if scale is None:
        return None
    scale = np.asarray(scale)
    if scale.dtype == np.uint16:
        scale = scale.view(jnp.bfloat16)
    scale = f64(scale)
    if codec.scaling == "channel":
        return scale
    return np.repeat(scale, codec.group, -1)[..., :features]


def numbers_of(code, codec):
    """Codes one by one: in each byte of a group are as many of its features as fit, low bits first,
    as far apart as the group has bytes.
    """
    parts, features = [], code.features
    for start in range(0, features, codec.group):
        size, value, shift = min(codec.group, features - start), 0, 0
        for width, plane in zip(PLANES[codec.bits], code.planes, strict=True):
            count = -(-size * width // 8)
            place = start * width // 8
            some = np.asarray(plane)[..., place : place + count].astype(int)
            fields = [some >> i & 2**width - 1 for i in range(0, 8, width)]
            value = value | np.concatenate(fields, -1)[..., :size] << shift
            # What no feature fills is zero.
            np.testing.assert_array_equal(np.concatenate(fields, -1)[..., size:], 0)
            shift += width
        parts.append(value)
    return np.concatenate(parts, -1)


def shifts_of(seed, codec, shape):
    """The random shift of each number, by the docstring of `uniform`."""
    if seed is None:
        return 0.0
    tokens, words = int(np.prod(shape[:-1])), noise_words(shape[-1], codec.group)
    whole, rest = divmod(shape[-1], codec.group)
    # NumPy counts no better than XLA, and takes no compilation.
    first = whole * -(-codec.group // 2)
    parts = [_uniform(seed, tokens, whole, codec.group, 0, words)] if whole else []
    parts += [_uniform(seed, tokens, 1, rest, first, words)] if rest else []
    return f64(np.concatenate([p.reshape(tokens, -1) for p in parts], -1)).reshape(shape)


_uniform = jax.jit(uniform, static_argnums=(1, 2, 3, 4, 5))


def assert_nearest(x, numbers, low, step, seed, codec, where):
    """Holds codes to be those of the nearest levels, and next to these within 1e-4 of a tie.

    Positions are below 256, and rounded by their difference, inverse, product and sum.
    """
    x, top = f64(x), 2**codec.bits - 1
    position = (x - (0 if low is None else low)) / np.where(step > 0, step, 1)
    if codec.levels == "normal":
        levels = normal_levels(codec.bits)
        ties = (levels[1:] + levels[:-1]) / 2
        want = np.searchsorted(ties, position)
    else:
        position = position + (top / 2 if low is None else 0) + shifts_of(seed, codec, x.shape)
        ties = np.arange(top) + 0.5
        want = np.clip(np.rint(position), 0, top)
    near = (abs(position[..., None] - ties) < 1e-4).any(-1)
    assert near[where].mean() < 0.3
    np.testing.assert_array_equal(numbers[where & ~near], want[where & ~near])
    assert np.all(abs(numbers - want)[where] <= 1)


def check(codec, x, seed, channels, step):
    """Holds both implementations to the oracle, and the one to the other."""
    reference, interpreted = (
        encoded(name, codec, x, seed, channels, step) for name in ("reference", "interpreted")
    )
    assert jax.tree.structure(reference) == jax.tree.structure(interpreted)
    within = np.ones(x.shape, bool)
    if channels is not None:
        within[..., channels] = False
        for code in (reference, interpreted):
            np.testing.assert_array_equal(code.channels, channels)
            assert code.outliers.dtype == x.dtype
            np.testing.assert_array_equal(code.outliers, x[..., channels])
    for got, want in ((interpreted.low, reference.low), (interpreted.step, reference.step)):
        if want is not None:
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    for code in (reference, interpreted):
        assert (code.step is None) == (codec.scaling == "channel")
        low = spread(code.low, codec, code.features)
        unit = spread(code.step if step is None else step, codec, code.features)
        numbers = numbers_of(code, codec)
        assert_nearest(x, numbers, low, unit, seed, codec, within)

    # Decoded from one code.
    whole = reference if step is None else jax.tree.map(lambda a: a, reference)
    if step is not None:
        whole = whole.__class__(**{**vars(reference), "step": step})
    values = [decoded(name, whole) for name in ("reference", "interpreted")]
    numbers, top = numbers_of(reference, codec), 2**codec.bits - 1
    low = spread(reference.low, codec, code.features)
    unit = spread(whole.step, codec, code.features)
    if codec.levels == "normal":
        want = normal_levels(codec.bits)[numbers] * unit
    else:
        shift = shifts_of(seed, codec, x.shape) if codec.rounding == "dither" else 0
        want = (numbers - shift - (top / 2 if low is None else 0)) * unit + (0 if low is None else low)
    want = np.where(within, want, f64(x))
    # A difference, a product and a sum of up to `2^bits` steps and the lowest value.
    slack = TINY * (4 * 2**codec.bits * unit + (0 if low is None else 2 * abs(low)))
    for value in values:
        assert value.dtype == x.dtype
        assert_near(value, want, slack)
        np.testing.assert_array_equal(f64(value)[~within], f64(x)[~within])
    assert_same(values[1], values[0], slack)


@every
def test_implementations_agree(case):
    codec, *rest = case
    check(codec, *problem(codec, *rest))
