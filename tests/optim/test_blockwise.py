"""Arrays in 8 bits: levels, blocks and errors, compared with the oracle in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.optim_oracles import blockwise_round_trip, dynamic_levels

from actjax.formats.blockwise import Blockwise, blockwise_zeros

both = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])


@functools.partial(jax.jit, static_argnames=("unsigned", "block"))
def stored(x, unsigned=False, block=256) -> Blockwise:
    return blockwise_zeros(x.shape, x.dtype, unsigned=unsigned, block=block).encode(x)


decode = jax.jit(Blockwise.decode)


def assert_nearest(x, code, got, unsigned, block):
    """Asserts that decoded values are as close as the nearest levels, and agree with the codes."""
    x, got = np.asarray(x, np.float64), np.asarray(got, np.float64)
    want = blockwise_round_trip(x, unsigned, block)
    # Rounding to float32 decides ties, and moves a level by less than a millionth of its value.
    slack = 3e-6 * np.maximum(np.abs(x), np.abs(want))
    assert (np.abs(got - x) <= np.abs(want - x) + slack).all()
    assert code.codes.shape == x.shape
    assert code.codes.dtype == (jnp.uint8 if unsigned else jnp.int8)
    assert code.scales.shape == (*x.shape[:-1], -(-x.shape[-1] // code.block))
    scales = np.repeat(np.asarray(code.scales), code.block, axis=-1)[..., : x.shape[-1]]
    index = np.asarray(code.codes, np.int64) + (0 if unsigned else 127)
    rtol = 1e-6 if code.dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(got, dynamic_levels(unsigned)[index] * scales, rtol=rtol)


# Levels.


@both
def test_codes_are_the_levels_of_the_oracle_and_invert(unsigned):
    codes = np.arange(256) if unsigned else np.arange(-127, 128)
    codes = codes.astype("uint8" if unsigned else "int8")
    every = Blockwise(codes, np.ones(1, "float32"), jnp.dtype("float32"), 256)
    values = decode(every)
    np.testing.assert_allclose(values, dynamic_levels(unsigned), rtol=3e-7)
    np.testing.assert_array_equal(stored(values, unsigned).codes, codes)


def sizes_of_every_decade(count: int = 20_000) -> np.ndarray:
    """Returns magnitudes up to one, the first the largest.

    Half of them are uniform within each decade, and half uniform in their logarithm.
    """
    rng = np.random.default_rng(0)
    decades = 10.0 ** rng.integers(-7, 1, count // 2)
    sizes = np.concatenate(
        [rng.uniform(0.1, 1, count // 2) * decades, 10 ** rng.uniform(-9, 0, count // 2)]
    )
    # The largest, and the lower end of the lowest decade.
    sizes[:4] = 1, 5.1e-7, 5.3e-7, 5.4e-7
    return sizes.astype(np.float32)


@both
def test_a_magnitude_takes_the_nearest_level_within_half_a_distance(unsigned):
    sizes = sizes_of_every_decade()
    block = len(sizes)
    code = stored(sizes, unsigned, block)
    got = np.asarray(decode(code))
    assert_nearest(sizes, code, got, unsigned, block)
    if not unsigned:
        np.testing.assert_array_equal(stored(-sizes, False, block).codes, -np.asarray(code.codes))
    # Levels are monotone in the value.
    assert (np.diff(got[np.argsort(sizes)]) >= 0).all()
    error, top = np.abs(got - sizes), 7 if unsigned else 6
    for decade in range(top):
        inside = (sizes > 0.1 ** (decade + 1)) & (sizes <= 0.1**decade)
        half = 0.45 / 2 ** (top - decade) * 0.1**decade
        # The lower bound shows that the values are dense enough to find the largest error.
        assert 0.9 * half < error[inside].max() < 1.0001 * half
    # The docstring of `encode` gives 0.70% and 0.35% of the largest magnitude.
    assert error.max() <= (0.0036 if unsigned else 0.0071)


# Blocks.

ROW = np.random.default_rng(1).normal(size=(3, 37)) * np.logspace(0, -8, 37)
CASES = {
    "normal": np.random.default_rng(2).normal(size=(2, 3, 32)),
    "many decades, the last block shorter": ROW,
    "shorter than a block": ROW[:, :5],
    "one value in a row": ROW[:, :1],
    "zeros": np.zeros((2, 40)),
    "one block of zeros": np.concatenate([np.zeros((2, 16)), np.ones((2, 20))], axis=1),
    "a constant": np.full((2, 40), 0.3),
    "huge": 1e30 * ROW,
    "tiny": 1e-22 * ROW,
    "1e30 and 1e-30, each in its block": np.repeat([[1e30, 1e-30, -1e30]], 16, axis=1),
    "one outlier": np.where(np.arange(40) == 7, 1e6, ROW[:1, :1] * np.ones(40)),
    "negative": -np.abs(ROW),
    "a vector": ROW[0],
}


@functools.partial(jax.jit, static_argnames="unsigned")
def stored_and_decoded(arrays, unsigned):
    """Returns the code of each array in blocks of 16, decoded in its dtype and in float32."""
    results = {}
    for name, x in arrays.items():
        code = blockwise_zeros(x.shape, x.dtype, unsigned=unsigned, block=16).encode(x)
        wide = dataclasses.replace(code, dtype=jnp.dtype("float32"))
        results[name] = code, code.decode(), wide, wide.decode()
    return results


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_equal_those_of_the_oracle(dtype, unsigned):
    arrays = {
        name: (np.abs(x) if unsigned else x).astype("float32").astype(jnp.dtype(dtype))
        for name, x in CASES.items()
    }
    for name, (code, got, wide, in_float32) in stored_and_decoded(arrays, unsigned).items():
        assert got.dtype == code.dtype == dtype, name
        # Decoding in bfloat16 rounds the float32 value once.
        assert_nearest(arrays[name], wide, in_float32, unsigned, 16)
        rounded = np.asarray(in_float32).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(got), rounded, err_msg=name)


@both
def test_the_largest_value_of_a_block_is_exact_and_a_block_of_zeros_has_no_scale(unsigned):
    x = np.zeros((2, 40), np.float32)
    x[1, :16], x[1, 3], x[1, 39] = 0.001, 0.7, 3e-5
    code = stored(x, unsigned, block=16)
    np.testing.assert_array_equal(code.scales, np.float32([[0, 0, 0], [0.7, 0, 3e-5]]))
    got = np.asarray(decode(code))
    np.testing.assert_array_equal(got[x == 0], 0)
    assert got[1, 3] == np.float32(0.7)
    assert got[1, 39] == np.float32(3e-5)


@both
def test_a_small_value_becomes_zero_if_signed_and_the_lowest_level_if_unsigned(unsigned):
    # The ratio of the last value but one to the scale underflows.
    x = np.float32([1e30, 1e18, 1, 1e-10, 1e-30, 0])
    got = np.asarray(decode(stored(x, unsigned)))
    np.testing.assert_allclose(got[1:], [1e23 * unsigned] * 4 + [0], rtol=1e-6)


def test_a_value_that_is_not_finite_stays_visible_and_in_its_block():
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 32), np.float32)
        x[0, 5] = bad
        got = np.array(decode(stored(x, block=16)))
        assert not np.isfinite(got[0, 5])
        got[0, :16] = 1
        np.testing.assert_array_equal(got, 1)


@st.composite
def arrays(draw, signed: bool):
    """Draws [2, 37] zeros and magnitudes up to 2^60, of mixed or of similar size."""
    magnitude = st.floats(2.0**-60, 2.0**60, width=32)
    near = st.floats(0.125, 8, width=32)
    value = draw(st.sampled_from([magnitude, near, st.one_of(st.just(0.0), near, magnitude)]))
    x = np.array(draw(st.lists(value, min_size=74, max_size=74)), np.float32).reshape(2, 37)
    if signed:
        x = x * np.array(draw(st.lists(st.sampled_from([-1, 1]), min_size=37, max_size=37)))
    return x.astype(np.float32)


@both
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_values_take_their_nearest_levels_and_are_stored_again_unchanged(unsigned, data):
    x = data.draw(arrays(signed=not unsigned))
    code = stored(x, unsigned, block=16)
    got = decode(code)
    assert_nearest(x, code, got, unsigned, 16)
    if unsigned:
        np.testing.assert_array_equal(np.asarray(got) > 0, x > 0)
    again = stored(got, unsigned, block=16)
    jax.tree.map(np.testing.assert_array_equal, again, code)
    # Codes do not depend on a power of two, nor on the sign of signed values.
    codes, scales = np.asarray(code.codes), np.asarray(code.scales)
    larger = stored(x * np.float32(1024), unsigned, block=16)
    np.testing.assert_array_equal(larger.codes, codes)
    np.testing.assert_array_equal(larger.scales, scales * 1024)
    if not unsigned:
        np.testing.assert_array_equal(stored(-x, block=16).codes, -codes)


def test_leading_axes_can_be_sliced_and_mapped_over():
    x = CASES["normal"].astype("float32")
    code = stored(x, block=16)
    one = jax.tree.map(lambda a: np.asarray(a)[1], code)
    np.testing.assert_allclose(decode(one), np.asarray(decode(code))[1], rtol=1e-6)
    mapped = jax.jit(jax.vmap(lambda x: stored(x, block=16)))(x)
    jax.tree.map(np.testing.assert_array_equal, mapped, code)
