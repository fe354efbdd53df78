"""Moments in 4 bits: levels, rounding without bias, storage, any values, and training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.state_oracles import SIGNED_LEVELS, quantize_rank_one, quantize_signed
from optim.test_eight_bit_training import least_squares, losses_of

from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.optim import four_bit
from actjax.optim.states.stored import is_code


def rounded(zeros_of, x, nearest):
    zeros = dataclasses.replace(zeros_of(x.shape, x.dtype), stochastic=not nearest)
    return zeros.encode(x).decode()


signed, rank_one = (
    jax.jit(functools.partial(rounded, zeros_of), static_argnums=1)
    for zeros_of in (signed_zeros, rank_one_zeros)
)
SHAPES = [(3, 128), (2, 300), (5, 7), (4, 1), (130, 257)]


def values(shape, seed=0, decades=3.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-decades, 0, shape)).astype("float32")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_take_the_nearest_levels_of_the_oracle(shape):
    x = values(shape)
    for got, (want, ties) in (
        (signed(x, True), quantize_signed(x)),
        (rank_one(x**2, True), quantize_rank_one(x**2)),
    ):
        np.testing.assert_allclose(np.where(ties, want, got), want, rtol=1e-6)


def test_levels_are_those_of_the_map():
    # Every level is its own code, with either rounding.
    levels = np.concatenate([-SIGNED_LEVELS, SIGNED_LEVELS])[None].astype("float32")
    levels = np.concatenate([levels, np.ones_like(levels)])  # Scales of columns are 1.
    for nearest in (True, False):
        np.testing.assert_allclose(signed(levels, nearest), levels, rtol=3e-7)
    evenly = (np.arange(1, 17)[None] / 16).astype("float32")
    np.testing.assert_allclose(rank_one(evenly, True), evenly, rtol=3e-7)


def test_stochastic_rounding_takes_a_neighbour_and_has_no_bias():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 128)).astype("float32")
    x[:, 0], x[0] = 1, 1  # One scale for everything.
    levels = np.sort(np.concatenate([-SIGNED_LEVELS, SIGNED_LEVELS[1:]]))
    got = np.asarray(signed(x, False))
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    assert np.all(np.isclose(got, low, atol=1e-6) | np.isclose(got, high, atol=1e-6))
    # A standard error is the deviation of one rounding over the root of their number.
    error, deviation = got - x, np.sqrt(np.maximum((high - x) * (x - low), 0))
    assert abs(error.mean()) < 4 * np.sqrt((deviation**2).sum()) / x.size
    for part in (x < -0.5, (x > 0.1) & (x < 0.2), np.abs(x) < 0.055):
        assert abs(error[part].mean()) < 4 * np.sqrt((deviation[part] ** 2).sum()) / part.sum()


def test_stochastic_rounding_of_a_second_moment_has_no_bias():
    rng = np.random.default_rng(0)
    v = rng.uniform(1 / 16, 1, (400, 128)).astype("float32")
    v[0], v[:, 0] = 1, 1
    error = np.asarray(rank_one(v, False)) - v
    assert np.abs(error).max() <= 1 / 16 + 1e-6
    assert abs(error.mean()) < 4 * (1 / 16 / 2) / v.size**0.5


def test_a_second_moment_never_becomes_zero():
    v = np.zeros((4, 130), "float32")
    v[1] = 1e-12
    v[:, 3] = 1.0
    for nearest in (True, False):
        got = np.asarray(rank_one(v, nearest))
        assert (got[v > 0] > 0).all()
        # Zeros where row and column hold something become 1/16 of the smaller scale.
        assert (got[:, 3] > 0).all()
    np.testing.assert_array_equal(rank_one(np.zeros((4, 130), "float32"), False), 0)


def test_bytes_are_half_of_the_numbers_and_the_scales():
    for shape, codes in (((6, 256), 6 * 128), ((6, 300), 6 * 192), ((6, 7), 6 * 4)):
        first, second = signed_zeros(shape, "float32"), rank_one_zeros(shape, "float32")
        assert first.codes.nbytes == second.codes.nbytes == codes
        assert first.scales.nbytes == 4 * 6 * -(-shape[1] // 128)
        for moment in (first, second):
            assert (moment.rows.nbytes, moment.columns.nbytes) == (4 * 6, 4 * shape[1])
    state = jax.eval_shape(four_bit(optax.adamw(1e-3)).init, {"w": np.ones((64, 128))})
    assert len([x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x)]) == 2
    for zeros in (signed_zeros, rank_one_zeros):
        with pytest.raises(ValueError, match=r"has a scale for each row and each column: .*\(5,\)"):
            zeros((5,), "float32")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4),
    st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e30]),
    st.sampled_from(["normal", "constant", "one value"]),
    st.booleans(),
    st.booleans(),
)
def test_any_values_stay_within_half_or_one_distance(shape, size, kind, nearest, bfloat16):
    x = values(SHAPES[shape])
    alone = (np.arange(x.size) == 3).reshape(x.shape)
    x = {"normal": x, "constant": np.ones_like(x), "one value": x * alone}[kind]
    x = np.asarray(jnp.asarray(size * x, "bfloat16" if bfloat16 else "float32"), "float32")
    scale = np.abs(x).max(initial=0)
    got = np.asarray(signed(x, nearest))
    assert np.isfinite(got).all()
    # The widest distance of two levels.
    bound = (0.5 if nearest else 1) * 0.2 * 1.001
    assert np.abs(got - x).max() <= bound * scale + 1e-37
    got = np.asarray(rank_one(np.abs(x), nearest))
    assert np.isfinite(got).all()
    assert np.abs(got - np.abs(x)).max() <= scale / 16 * 1.001 + 1e-37


def test_a_number_that_is_not_finite_stays_visible():
    for bad in (np.nan, np.inf):
        x = values((4, 130))
        x[1, 5] = bad
        got = np.asarray(signed(x, False))
        assert not np.isfinite(got[1, 5])
        # Numbers that share no scale with it are unharmed.
        assert np.isfinite(got[[0, 2, 3]][:, 128:]).all()
        assert not np.isfinite(np.asarray(rank_one(np.abs(x), False))[1, 5])


@pytest.mark.parametrize("spread", ["columns", "rows", "blocks", "values"])
def test_updates_are_bounded_where_gradients_of_a_group_differ_by_decades(spread):
    adam, rng = optax.scale_by_adam(), np.random.default_rng(0)
    sizes = {
        "columns": np.tile(10.0 ** np.linspace(-3, 3, 128), (8, 1)),
        "rows": np.tile(10.0 ** np.linspace(-3, 3, 8)[:, None], (1, 128)),
        # A row that is small where its columns are large.
        "blocks": np.where((np.arange(8)[:, None] == 0) | (np.arange(128) < 8), 1e-4, 1.0),
        "values": 10.0 ** rng.uniform(-3, 3, (8, 128)),
    }[spread]  # fmt: skip

    @jax.jit
    def largest(keys):
        tx = four_bit(adam, min_size=1)

        def step(state, key):
            g = {"w": jax.random.normal(key, (8, 128)) * sizes}
            updates, state = tx.update(g, state)
            return state, jnp.max(jnp.abs(updates["w"]))

        return jax.lax.scan(step, tx.init({"w": jnp.zeros((8, 128))}), keys)[1]

    found = largest(jax.random.split(jax.random.key(0), 200))[20:]
    # A first moment errs by at most 0.2 of the smaller of the largest of its row and its column,
    # each of which is at most 6 times the root of a second moment in that row or column, as
    # gradients are at most 5 standard deviations. The root is at least a quarter of its scale's.
    assert float(found.max()) < 8


# Training.

ADAM = optax.adam(1e-2)
STOCHASTIC = four_bit(ADAM, min_size=1)


@pytest.mark.parametrize("decades", [0, 1.5])
def test_training_in_4_bits_stays_close_to_adam(decades):
    problem = least_squares(0, decades)
    want, got = (np.asarray(losses_of(tx)(*problem)) for tx in (ADAM, STOCHASTIC))
    # No second moment is zero, so that no step is long, as on a linear map with a zero.
    assert got.argmax() == 0
    assert max(want[-1], got[-1]) < 0.04 * want[0]


def test_a_moment_that_moves_slowly_moves_as_it_should_on_average():
    # Decay by 0.99 of a group whose largest value stays, under columns whose largest values stay.
    x = np.full((2, 128), 0.6, "float32")
    x[0, 0], x[1] = 1, 1

    @jax.jit
    def decayed(x):
        def step(_, code):
            moment = code.decode() * jnp.where(x == 0.6, 0.99, 1)
            # Gradients differ from step to step in their last digits.
            return code.encode(moment * (1 + 1e-5 * jnp.sin(jnp.arange(128.0) + moment.sum())))

        code = signed_zeros(x.shape, x.dtype).encode(x)
        return jax.lax.fori_loop(0, 50, step, code).decode()[0, 1:]

    # Rounded to nearest, it would stay at 0.6.
    # 0.6 * 0.99^50 = 0.363, with 127 roundings of at most 0.2 a step.
    assert np.asarray(decayed(x)).mean() == pytest.approx(0.6 * 0.99**50, abs=0.08)
