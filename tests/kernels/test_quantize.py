"""Every format of `actjax.Quantized` against one oracle, in float64 NumPy.

The codec, its definition and its kernel are compared in one program for each format.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.kernel_cases import PLANES, TINY, assert_near, assert_same, f64, normal

import actjax
from actjax.formats.code import QuantizeInputs
from actjax.formats.levels import index_terms, normal_levels
from actjax.formats.noise import halves, random_words, seed_of
from actjax.formats.scales import SLACK
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize

Q, KEY = actjax.Quantized, jax.random.key(5)

# Codec, dtype and shape. Features are whole groups, or fill a group in part, even or odd. Each case
# is one program; codes by channel have no kernel.
CASES = {
    "stochastic": (Q(1, 16, "stochastic"), "float32", (2, 5, 48)),
    "rotated dither": (Q(3, 32, "dither", rotate=True), "float32", (3, 3, 21)),
    "dither": (Q(4, 128, "dither"), "bfloat16", (10, 256)),
    "one token": (Q(8, 16, "dither", outlier_fraction=0.12), "float32", (33,)),
    "float32 scales": (
        Q(8, 128, scale_dtype="float32", outlier_fraction=0.05),
        "float32",
        (9, 100),
    ),
    "normal": (Q(2, 16, levels="normal"), "bfloat16", (10, 15)),
    "balanced": (
        Q(4, 16, levels="normal", scale_dtype="float32", balance=True, outlier_fraction=0.1),
        "float16",
        (9, 32),
    ),
    "channels, rotated": (
        Q(2, 32, "stochastic", scaling="channel", rotate=True, outlier_fraction=0.05),
        "bfloat16",
        (10, 64),
    ),
    "channels": (Q(3, 16, scaling="channel", scale_dtype="float32"), "bfloat16", (10, 22)),
    "channels, dither": (Q(8, 16, "dither", scaling="channel"), "float32", (2, 5, 9)),
    "channels, normal": (
        Q(4, 16, scaling="channel", levels="normal", outlier_fraction=0.12),
        "bfloat16",
        (10, 16),
    ),
    "default of the programs": (
        Q(4, 32, levels="normal", rotate=True, balance=True),
        "bfloat16",
        (9, 3 * 32 + 24),
    ),
    "two planes, a last group in part": (
        Q(5, 16, rotate=True, balance=True, outlier_fraction=0.15),
        "float32",
        (9, 16 + 5),
    ),
    "rotated balanced dither": (
        Q(6, 16, "dither", rotate=True, balance=True),
        "float32",
        (2, 5, 16),
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def results(codec, x, scale, centre):
    """Returns the seed, the code, and the decoded array."""
    seed = seed_of(KEY) if codec.needs_key else None
    if codec.scaling == "channel":
        code = codec.encode_with(x, KEY, codec.outlier_channels(x), scale, centre)
        code = dataclasses.replace(code, scale=scale, centre=centre)
    else:
        code = codec.encode(x, KEY)
    return seed, code, codec.decode(code)


# Arguments.


def of_all_kinds(count, width, dtype):
    """Returns rows of large, huge, tiny or constant numbers, or numbers far from zero."""
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
    return rows.astype(jnp.dtype(dtype))


def arguments(codec, dtype, shape):
    """Returns the arguments of `results`, without the codec."""
    tokens = int(np.prod(shape[:-1]))
    if codec.scaling == "group":
        return of_all_kinds(tokens, shape[-1], dtype).reshape(shape), None, None
    x = of_all_kinds(shape[-1], tokens, dtype).T
    # From some tokens only, so that others exceed the range.
    some = f64(x[: tokens // 2])
    scale, centre = abs(some).max(0) * 2 / (2**codec.bits - 1), None
    # With stochastic rounding around zero; otherwise constants are not halfway between levels.
    if codec.rounding != "stochastic":
        centre = stored(some.mean(0) + 0.3 * scale, codec)
    return x.reshape(shape), stored(scale, codec), centre


def stored(scale, codec):
    scale = scale.astype(jnp.dtype(codec.scale_dtype))
    return scale if codec.scale_dtype == "float32" else scale.view(np.uint16)


# The documented format, in float64 NumPy.


def by_sequence(stored):
    """Returns what is stored of the channels of each sequence [..., d] as numbers [..., 1, d]."""
    return f64(as_float(stored))[..., None, :]


def as_float(scale):
    """Returns stored scales as numbers; None stays None."""
    if scale is None:
        return None
    scale = np.asarray(scale)
    return scale.view(jnp.bfloat16) if scale.dtype == np.uint16 else scale


def by_feature(scale, codec):
    """Returns scales of groups [..., groups] or channels [d] for every number; 0 for None."""
    if scale is None:
        return 0.0
    scale = f64(as_float(scale))
    return scale if codec.scaling == "channel" else scale.repeat(codec.group, -1)


@functools.cache
def rotation(size):
    """Returns the orthogonal matrix of a group: signs, then Sylvester's matrix block by block."""
    block, sylvester = size & -size, np.ones((1, 1))
    while len(sylvester) < block:
        sylvester = np.kron([[1, 1], [1, -1]], sylvester)
    signs = np.random.Generator(np.random.PCG64(size)).choice([-1.0, 1.0], size)
    return signs[:, None] * np.kron(np.eye(size // block), sylvester) / np.sqrt(block)


def of_groups(codec, x, function):
    """Returns a function of the groups of `x`, [..., groups, group], for every number."""
    groups = x.reshape(*x.shape[:-1], -1, codec.group)
    return (function(groups) * np.ones(groups.shape)).reshape(x.shape)


def sums(codec, x):
    """Returns the largest that a rotation of `x`, or its inverse, can be for any signs."""
    return of_groups(codec, abs(x), lambda groups: groups @ abs(rotation(codec.group)))


def rounding(codec):
    """Returns the rounding of a rotation in float32, relative to `sums`: `2^-24` for each term of a
    group, the root and the quotient.
    """
    return (codec.group + 4) * TINY


def prepared(codec, x, code):
    """Returns the numbers that are rounded to levels, and by how much float32 may miss them."""
    values, off = f64(x), np.zeros(x.shape)
    if codec.balance:
        mean, spread = by_sequence(code.mean), by_sequence(code.spread)
        if codec.rotate and codec.rounding == "nearest":
            # In float32, since rounding to 16 bits follows.
            mean, spread = mean.astype("float32"), spread.astype("float32")
            values = f64((x.astype("float32") - mean) * (1 / spread))
        else:
            values = (values - mean) / spread
            off = 3 * TINY * (abs(values) + abs(mean) / spread)
    if code.channels is not None:
        values[..., code.channels] = 0
    fill = "edge" if codec.levels == "uniform" and not codec.rotate else "constant"
    pads = ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % codec.group),)
    values, off = np.pad(values, pads, fill), np.pad(off, pads, fill)
    if codec.rotate:
        if codec.rounding == "nearest":
            values = f64(values.astype("float32").astype(jnp.bfloat16))
        off = sums(codec, rounding(codec) * abs(values) + off)
        values = of_groups(codec, values, lambda groups: groups @ rotation(codec.group))
    return values, off


def numbers_of(code, codec):
    """Returns the codes: byte `j` of a group of `b` bytes holds the features `j`, `j + b`, ..., low
    bits first.
    """
    parts, features = [], code.features + -code.features % codec.group
    for start in range(0, features, codec.group):
        size, numbers, shift = codec.group, 0, 0
        for width, plane in zip(PLANES[codec.bits], code.planes, strict=True):
            count, place = -(-size * width // 8), start * width // 8
            some = np.asarray(plane)[..., place : place + count].astype(int)
            fields = np.concatenate([some >> i & 2**width - 1 for i in range(0, 8, width)], -1)
            # Beyond the last feature there are zeros.
            np.testing.assert_array_equal(fields[..., size:], 0)
            numbers = numbers + fields[..., :size] * 2**shift
            shift += width
        parts.append(numbers)
    return np.concatenate(parts, -1)


def shifts(codec, shape, seed):
    """Returns the random shift of each number: a group has a word for two features, and the two
    halves of the group use the two halves of its words.
    """
    tokens, groups = int(np.prod(shape[:-1])), shape[-1] // codec.group
    words = np.arange(tokens * groups * -(-codec.group // 2), dtype=np.uint32)
    both = halves(random_words(words.reshape(tokens, groups, -1), seed[0], seed[1]))
    return f64(np.concatenate(both, -1)[..., : codec.group]).reshape(shape)


def nearest(codec, x, off, low, scale, seed):
    """Returns the codes of numbers, and where another code is as near up to 1e-4 of a level and
    what float32 may miss `x` by.

    Below 256 levels the error of a position is smaller: 2^-24 each for the difference, the inverse,
    the product and the sum with a shift.
    """
    top = 2**codec.bits - 1
    position = (f64(x) - low) / np.where(scale > 0, scale, 1)
    slack = 1e-4 + off / np.where(scale > 0, scale, 1) * np.ones(x.shape)
    if codec.levels == "normal":
        a, b, c = index_terms(codec.bits)
        # It is steepest at zero.
        slack = slack * top * a
        position = top * (0.5 + position * a + position**3 * b + position**5 * c)
    else:
        position = position + (top / 2 if codec.scaling == "channel" else 0)
        position = position + (0 if seed is None else shifts(codec, x.shape, seed))
    ties = np.arange(top) + 0.5
    want = np.clip(np.rint(position), 0, top)
    return want, (abs(position[..., None] - ties) < slack[..., None]).any(-1)


def values_of(codec, numbers, low, scale, seed):
    """Returns the values of codes."""
    if codec.levels == "normal":
        return normal_levels(codec.bits)[numbers] * scale + low
    shift = shifts(codec, numbers.shape, seed) if codec.rounding == "dither" else 0
    middle = (2**codec.bits - 1) / 2 if codec.scaling == "channel" else 0
    return (numbers - shift - middle) * scale + low


# Encoding and decoding.


def largest_of_groups(codec, x):
    """Returns for each number the largest one of its group."""
    return of_groups(codec, x, lambda groups: groups.max(-1, keepdims=True))


def deviation_of(codec, x):
    """Returns for each number the root mean square of its group."""
    return of_groups(codec, x, lambda groups: np.sqrt((groups**2).mean(-1, keepdims=True)))


def check_range(codec, values, off, low, scale):
    """Asserts that the levels of a group are the least ones that hold its numbers, up to a unit in
    the last place of the offset and of the scale."""
    top, eps = 2**codec.bits - 1, float(jnp.finfo(codec.scale_dtype).eps)
    least, largest = -largest_of_groups(codec, -values), largest_of_groups(codec, values)
    # Three operations in float32, on numbers up to the largest one.
    slack = largest_of_groups(codec, off) + 4 * TINY * np.maximum(abs(least), abs(largest))
    assert np.all(low <= least + slack)
    assert np.all(least - low <= eps * abs(least) + slack)
    assert np.all(largest <= low + top * scale * (1 + SLACK) + slack)
    assert np.all(scale <= (largest - low) / top * (1 + eps) + slack)


def check_outliers(codec, x, code):
    """Asserts that the channels of the largest norms are stored whole."""
    count = round(codec.outlier_fraction * x.shape[-1])
    assert len(set(code.channels.tolist())) == count
    np.testing.assert_array_equal(code.outliers, x[..., code.channels], strict=True)
    squares = np.square(f64(x)).reshape(-1, x.shape[-1])
    norms = squares.sum(0)
    # Sums in float32, of squares relative to the largest; those below 2^-126 are taken for zero.
    off = len(squares) * 2.0**-126 * squares.max()
    assert np.all(norms[code.channels] >= (1 - 1e-5) * np.sort(norms)[-count] - off)


def check_encoding(codec, x, seed, code):
    """Compares a code with the oracle; returns the share of numbers halfway between two levels."""
    values, off = prepared(codec, x, code)
    inner = np.ones(values.shape[-1], bool)
    if codec.outlier_fraction:
        check_outliers(codec, x, code)
        inner[code.channels] = codec.rotate
    low, scale = levels_of(codec, code)
    if codec.scaling == "group" and codec.levels == "uniform":
        check_range(codec, values, off, low, scale)
    elif codec.scaling == "group":
        # Codes are of numbers over the root mean square itself, not as it is stored.
        deviation = deviation_of(codec, values)
        eps = float(jnp.finfo(codec.scale_dtype).eps) / 2 + (codec.group + 4) * TINY
        assert_near(scale, deviation, eps * deviation + deviation_of(codec, off))
        scale = deviation
    numbers = numbers_of(code, codec)
    want, tie = nearest(codec, values, off, low, scale, seed)
    exact = inner & ~tie
    np.testing.assert_array_equal(numbers[exact], want[exact])
    # All codes of a scale of zero decode to the same value.
    near = (abs(numbers - want) <= 1) | (scale == 0)
    assert np.all(near[..., inner])
    return tie[..., inner].mean()


def levels_of(codec, code):
    """Returns the lowest level, or the middle of the levels, and the scale of each number."""
    low = code.centre if codec.scaling == "channel" else code.offset
    return tuple(by_feature(s, codec) for s in (low, code.scale))


def check_decoding(codec, x, code, decoded):
    """Compares decoded values with the oracle."""
    low, scale = levels_of(codec, code)
    want = values_of(codec, numbers_of(code, codec), low, scale, code.seed)
    # A difference, a product and a sum, of up to `2^bits` scales and the offset.
    slack = TINY * (4 * 2**codec.bits * scale + 2 * abs(low)) * np.ones(want.shape)
    if codec.rotate:
        slack = sums(codec, slack + rounding(codec) * abs(want))
        want = of_groups(codec, want, lambda groups: groups @ rotation(codec.group).T)
    want, slack = want[..., : x.shape[-1]], slack[..., : x.shape[-1]]
    if codec.balance:
        mean, spread = by_sequence(code.mean), by_sequence(code.spread)
        slack = slack * spread + 2 * TINY * (abs(want) * spread + abs(mean))
        want = want * spread + mean
    if code.channels is not None:
        want[..., code.channels] = f64(x)[..., code.channels]
        slack[..., code.channels] = 0
    assert decoded.dtype == x.dtype
    assert_near(decoded, want, slack)
    if code.channels is not None:
        np.testing.assert_array_equal(decoded[..., code.channels], x[..., code.channels])


def check(codec, x, *statistics):
    """Compares codes and decoded values of numbers; returns the share of ties."""
    # With the group that these features have.
    codec = dataclasses.replace(codec, group=codec.format_of(x.shape[-1]).group)
    seed, code, decoded = jax.tree.map(np.asarray, results(codec, x, *statistics))
    check_decoding(codec, x, code, decoded)
    return check_encoding(codec, x, seed, code)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers_take_the_nearest_level_and_come_back(case):
    # Zero is halfway between symmetric levels.
    assert check(case[0], *arguments(*case)) < 0.25


PARTS = st.tuples(
    st.sampled_from(["normal", "uniform", "zero", "constant", "one", "signs", "outlier"]),
    st.integers(-25, 25),
    st.integers(0, 10**6),
)


def drawn(kind, exponent, seed, size):
    """Returns numbers of a kind, of a size between 1e-25 and 1e25."""
    rng = np.random.default_rng(seed)
    unit = {
        "normal": rng.normal(size=size),
        "uniform": rng.uniform(1, 2, size),
        "zero": np.zeros(size),
        "constant": np.full(size, rng.normal()),
        "one": np.arange(size) == rng.integers(size),
        "signs": rng.choice([-1, 1], size),
        "outlier": np.where(np.arange(size) == rng.integers(size), 1e6, rng.normal(size=size)),
    }
    return unit[kind] * 10.0**exponent


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(
        [
            "stochastic",
            "float32 scales",
            "default of the programs",
            "two planes, a last group in part",
        ]
    ),
    parts=st.lists(PARTS, min_size=1, max_size=12),
)
def test_whatever_the_numbers(name, parts):
    codec, dtype, shape = CASES[name]
    size, width = int(np.prod(shape)), codec.group // 2 + 3
    # Runs that end within groups and within rows.
    runs = [drawn(*parts[i % len(parts)], width) for i in range(-(-size // width))]
    check(codec, np.concatenate(runs)[:size].reshape(shape).astype(jnp.dtype(dtype)), None, None)


def test_vmap_and_scan_of_the_kernel_change_nothing():
    codec = Q(4, 16, "dither")

    def round_trip(x, seed, implementation=None):
        inputs = QuantizeInputs(x, seed)
        code = quantize(inputs, format=codec.format, implementation=implementation)
        values = dequantize(code, implementation=implementation)
        return (code.planes, code.offset, code.scale), values

    @jax.jit
    def transformed(xs, seeds):
        scanned = jax.lax.scan(lambda _, xs: (None, round_trip(*xs)), None, (xs, seeds))[1]
        alone = jax.lax.map(lambda xs: round_trip(*xs, "reference"), (xs, seeds))
        return alone, scanned, jax.vmap(round_trip)(xs, seeds)

    xs, seeds = normal(3, 2, 32), np.arange(6, dtype=np.uint32).reshape(3, 2)
    (want, values), *others = transformed(xs, seeds)
    for got, decoded in others:
        # No number is so close to another level that rounding decides.
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert_same(decoded, values, 4 * TINY * (abs(f64(values)) + 16))
