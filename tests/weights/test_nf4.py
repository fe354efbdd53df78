"""Tests of actjax/weights/nf4.py: QLoRA's weights of 4 bits, with scales of 8 bits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jaxprs import nbytes
from ops.helpers import normal
from optim.optim_oracles import blockwise_round_trip

from actjax import NF4Weight
from actjax.weights.nf4 import levels

PUBLISHED = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022833, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
"""Dettmers et al., "QLoRA" (2023), appendix E."""
LEVEL_ERROR = 2.5e-7
"""Error of the published levels, which were computed in float32.

Half the distance of its numbers at the outermost probability, 3e-8, times the slope of the quantile
there, 14, divided by the quantile, 1.85.
"""
BLOCK, SCALES = 64, 256
HALF_GAP = 0.9 / 64 / 2
"""Error of the 8-bit map: half the gap of the top decade's 64 levels."""
MAP_ERROR = 4e-6
"""Error of float32 in a value of 8 bits, relative to the largest: a logarithm, a power, a sum."""


@jax.jit
def round_trip(w):
    return NF4Weight.quantize(w).astype(w.dtype)


def per_weight(scales, w):
    """Returns the scale [d, n] of each weight."""
    return np.repeat(scales, BLOCK, axis=0)[: len(w)]


def scales_of(w):
    """Returns the largest magnitudes of blocks [blocks, n]: exact, as 8 bits hold them.

    And the error of float32 in the latter.
    """
    w = np.asarray(w, np.float64)
    starts = range(0, len(w), BLOCK)
    exact = np.stack([np.abs(w[i : i + BLOCK]).max(0) for i in starts])
    rest = (exact - exact.mean()).ravel()
    # All scales are one row, whose last block may be shorter.
    coded = blockwise_round_trip(rest, False, SCALES).reshape(exact.shape) + exact.mean()
    return exact, coded, MAP_ERROR * (largest_in_blocks(exact) + exact.mean())


def largest_in_blocks(scales):
    """Returns for each scale the largest distance from the mean in its block of 256."""
    rest = np.abs(scales - scales.mean()).ravel()
    largest = [rest[i : i + SCALES].max() for i in range(0, rest.size, SCALES)]
    return np.repeat(largest, SCALES)[: rest.size].reshape(scales.shape)


def nearest(unit):
    """Returns the level nearest to each number."""
    return PUBLISHED[np.argmin(np.abs(np.asarray(unit)[..., None] - PUBLISHED), axis=-1)]


def assert_the_papers(w, got):
    """Compares a decoded weight with section 3 of the paper, or with a nearer level.

    The paper divides weights by the exact scale. Divided by the decoded scale, a few take the
    neighbouring level; both are right.
    """
    w, got = np.asarray(w, np.float64), np.asarray(got, np.float64)
    exact, coded, slack = (per_weight(x, w) for x in scales_of(w))
    want = nearest(w / exact) * coded
    slack = slack + 2 * LEVEL_ERROR * exact
    assert np.all(np.abs(got - nearest(got / coded) * coded) <= slack)
    assert np.all(np.abs(got - w) <= np.abs(want - w) + slack)


def assert_within_the_error(w, got):
    """Checks that a decoded weight errs by no more than its level and its scale do.

    If the scale `s` is decoded as `t`, the level `l` that is nearest to `w / s` errs by
    `|l t - w| <= |l s - w| + |l| |t - s|`, and the nearest to `w / t` by no more.
    """
    w, got = np.asarray(w, np.float64), np.asarray(got, np.float64)
    exact, _, slack = scales_of(w)
    of_scale = per_weight(HALF_GAP * largest_in_blocks(exact) + slack, w)
    exact = per_weight(exact, w)
    level = nearest(w / np.where(exact > 0, exact, 1))
    # Near the middle of two levels their last digits decide. Below 1e-37 float32 loses bits.
    slack = 4 * LEVEL_ERROR * exact + 1e-37
    assert np.all(np.abs(got - w) <= np.abs(level * exact - w) + np.abs(level) * of_scale + slack)


# The levels.


def test_the_levels_are_the_published_ones():
    got = levels()
    assert got.dtype == np.float32
    assert got.shape == (16,)
    np.testing.assert_allclose(got, PUBLISHED, rtol=0, atol=LEVEL_ERROR)
    # Zero and the largest weights are exact.
    assert {-1.0, 0.0, 1.0} <= set(got.tolist())
    assert np.diff(got).max() / 2 == pytest.approx(0.152, abs=5e-4)


def test_levels_come_back_exactly():
    # All scales are equal, hence exact: only the code book is tested.
    index = np.random.default_rng(0).integers(0, 16, (172, 5))
    index[[0, 64, 171]] = 15
    w = levels()[index] * np.float32(0.75)
    np.testing.assert_allclose(round_trip(w), w, rtol=2e-7, atol=0)


# The error.

SHAPES = [(1, 1), (63, 2), (64, 3), (65, 4), (172, 5), (128, 300)]
"""All tests use these: each shape is compiled."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_agrees_with_the_paper(shape):
    w = normal(0, *shape, dtype="float32")
    got = round_trip(w)
    assert got.dtype == jnp.float32
    assert_the_papers(w, got)
    assert_within_the_error(w, got)


def test_a_block_holds_inputs_of_one_output():
    # All scales are equally far from their mean, which 8 bits hold exactly. Blocks along another
    # axis would not find the smaller scales.
    scales = np.array([[1.25, 0.75, 1.25], [0.75, 1.25, 0.75]])
    w = np.array(normal(0, 128, 3, dtype="float32"))
    for i, row in enumerate(scales):
        part = w[64 * i : 64 * (i + 1)]
        part *= row / np.abs(part).max(0)
    exact = per_weight(scales, w)
    np.testing.assert_allclose(round_trip(w), nearest(w / exact) * exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_weight_of_another_dtype(dtype, x64):
    w = normal(0, 172, 5, dtype=dtype)

    @jax.jit
    def run(w):
        q = NF4Weight.quantize(w)
        return q, q.astype(dtype), q.astype("float32")

    q, got, wide = run(w)
    assert (q.dtype, got.dtype, wide.dtype) == (dtype, dtype, "float32")
    # Scales are float32 in any case.
    assert_the_papers(w, wide)
    # A rounding of the level, of the scale, and of their product.
    unit = float(jnp.finfo(dtype).eps) / 2 + 2.0**-23
    np.testing.assert_allclose(np.float64(got), np.float64(wide), rtol=3 * unit)


FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_error_holds_for_any_weight(data):
    shape = data.draw(st.sampled_from([(1, 1), (63, 2), (65, 4)]))
    w = data.draw(arrays.arrays(np.float32, shape, elements=FINITE))
    got = np.asarray(round_trip(w))
    assert_within_the_error(w, got)
    assert np.all(got[w == 0] == 0)
    # No sign changes, whatever the error of a scale.
    assert np.all(np.sign(got) * np.sign(w) >= 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(-90, 90), st.integers(0, 2**32 - 1))
def test_a_power_of_two_changes_only_the_scale(power, seed):
    w = np.asarray(normal(seed, 65, 4, dtype="float32"))
    factor = np.float32(2.0**power)
    np.testing.assert_array_equal(round_trip(w * factor), np.asarray(round_trip(w)) * factor)


# Special weights.


def weight(*shape):
    return np.array(normal(0, *shape, dtype="float32"))


def changed(w, *changes):
    """Returns a weight with other values at some places."""
    for place, value in changes:
        w[place] = value
    return w


SMALL_SCALES = weight(65, 4) * np.float32([1e-6, 1e-6, 1, 1])
HUGE = 1e3, -1e6, 1e30
SPECIAL = {
    # Half of the scales are a millionth of the others. Some of them decode to negative numbers.
    **{f"small scales, {f}": SMALL_SCALES * np.float32([1, 1, 1, f]) for f in (1, 2, 24, 5040)},
    # 600 scales: the last 88 are large and in a separate block, so that they blur no others.
    "blocks of scales": weight(128, 300) * np.float32(1 + 9 * (np.arange(300) >= 212)),
    "zeros": changed(weight(172, 5), (np.s_[64:128, 1], 0), (np.s_[:, 3], 0)),
    **{f"huge, {huge}": changed(weight(128, 300), ((5, 1), huge)) for huge in HUGE},
    **{f"constant, {x}": np.full((172, 5), x, np.float32) for x in (0.0, 2.5, -2.5, 1e-30, 1e30)},
    "tiny": weight(172, 5) * np.float32(1e-30),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_weights_keep_the_bound_their_signs_and_zeros(name):
    w = SPECIAL[name]
    got = np.asarray(round_trip(w))
    assert_within_the_error(w, got)
    assert np.all(np.sign(got) * np.sign(w) >= 0)
    np.testing.assert_array_equal(got[w == 0], 0)
    if "blocks" in name:
        assert_the_papers(w, got)
    elif "constant" in name:
        # The mean of equal scales is summed, and may err by a few units in the last place.
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=0)
    elif "huge" in name:
        # The huge value only has the error of its scale.
        assert got[5, 1] == pytest.approx(w[5, 1], rel=0.008)
    elif name == "tiny":
        # The factor's rounding moves no weight over the middle of two levels.
        np.testing.assert_allclose(got / np.float32(1e-30), round_trip(weight(172, 5)), rtol=1e-5)


def test_a_value_that_is_not_finite_makes_the_whole_weight_nan():
    for shape in ((40, 66), (64, 64), (40, 40)):
        for value in (math.nan, math.inf, -math.inf):
            assert np.isnan(round_trip(changed(weight(*shape), ((3, 5), value)))).all()


# Storage.


def test_a_weight_takes_4_13_bits():
    for dtype in ("float32", "bfloat16"):
        w = jax.ShapeDtypeStruct((4096, 4096), dtype)
        size = nbytes(jax.eval_shape(NF4Weight.quantize, w))
        # A code, a scale for 64 of them, a scale for 256 of those, and a mean.
        assert size * 8 == 4096**2 * (4 + 8 / 64 + 32 / (64 * 256)) + 32
        assert round(size * 8 / 4096**2, 2) == 4.13


def test_bytes_of_ragged_weights():
    for d, n in SHAPES:
        blocks = -(-d // 64)
        want = blocks * 32 * n + blocks * n + 4 * -(-blocks * n // 256) + 4
        assert nbytes(jax.eval_shape(NF4Weight.quantize, normal(0, d, n))) == want


def test_a_quantized_weight_has_the_shape_of_the_weight():
    q = jax.eval_shape(NF4Weight.quantize, normal(0, 172, 5, dtype=jnp.bfloat16))
    assert (q.shape, q.ndim, q.dtype) == ((172, 5), 2, jnp.bfloat16)
    assert "172, 5" in repr(q)
    assert len(repr(q)) < 100  # Without its numbers.
    again = jax.tree.map(lambda x: x, q)
    assert (again.shape, again.ndim, again.dtype) == ((172, 5), 2, jnp.bfloat16)


# Under transformations of JAX.


def test_stacked_layers_are_quantized_each_by_itself():
    # Layers of very different sizes: a mean over layers would show.
    w = np.array(normal(0, 3, 70, 4, dtype="float32")) * np.float32([1, 1e-6, 1e6])[:, None, None]

    @jax.jit
    def run(w):
        stacked = jax.vmap(NF4Weight.quantize)(w)
        mapped = jax.vmap(lambda q: q.astype("float32"))(stacked)
        scanned = jax.lax.scan(lambda _, q: (None, q.astype("float32")), None, stacked)[1]
        return stacked, mapped, scanned

    stacked, mapped, scanned = run(w)
    assert (stacked.shape, stacked.ndim, stacked.dtype) == ((3, 70, 4), 3, "float32")
    np.testing.assert_array_equal(mapped, scanned)
    for got, one in zip(scanned, w, strict=True):
        np.testing.assert_allclose(got, round_trip(one), rtol=1e-6)


def test_within_a_scan_a_layer_has_the_shape_of_one():
    stacked = jax.eval_shape(jax.vmap(NF4Weight.quantize), normal(0, 3, 70, 4))
    seen = []

    def body(carry, q):
        seen.append((q.shape, q.ndim))
        return carry, None

    jax.eval_shape(lambda q: jax.lax.scan(body, None, q), stacked)
    assert set(seen) == {((70, 4), 2)}
