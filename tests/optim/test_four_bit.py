"""Moments in 4 bits: levels, rounding without bias, storage, and any values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.state_oracles import SIGNED_LEVELS, quantize_rank_one, quantize_signed

from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.optim import four_bit
from actjax.optim.states.stored import is_code


def rounded(x):
    """Returns `x` as a first moment, and its magnitudes as a second one: to nearest, and not."""
    return jax.device_get(_rounded(x))


@jax.jit
def _rounded(x):
    def stored(zeros, x, stochastic):
        return dataclasses.replace(zeros, stochastic=stochastic).encode(x).decode()

    return tuple(
        [stored(zeros(x.shape, x.dtype), values, stochastic) for stochastic in (False, True)]
        for zeros, values in ((signed_zeros, x), (rank_one_zeros, jnp.abs(x)))
    )


SHAPES = [(3, 128), (2, 300), (5, 7), (4, 1), (130, 257)]
LEVELS = np.sort(np.concatenate([-SIGNED_LEVELS, SIGNED_LEVELS[1:]]))


def values(shape, seed=0, decades=3.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-decades, 0, shape)).astype("float32")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_take_the_nearest_levels_of_the_oracle(shape):
    x = values(shape)
    oracles = quantize_signed(x), quantize_rank_one(np.abs(x))
    for (got, _), (want, ties) in zip(rounded(x), oracles, strict=True):
        np.testing.assert_allclose(np.where(ties, want, got), want, rtol=1e-6)


def test_levels_are_those_of_the_map():
    # Every level is its own code, with either rounding. Scales of columns are 1.
    levels, evenly = np.ones((2, 2, 16), "float32")
    levels[0, :15], evenly[0] = LEVELS, np.arange(1, 17) / 16
    for got in (*rounded(levels)[0], rounded(-levels)[0][0]):
        np.testing.assert_allclose(np.abs(got), np.abs(levels), rtol=3e-7)
    for got in rounded(evenly)[1]:
        np.testing.assert_allclose(got, evenly, rtol=3e-7)


def test_stochastic_rounding_takes_a_neighbour_and_has_no_bias():
    x = np.random.default_rng(0).uniform(-1, 1, (400, 128)).astype("float32")
    x[:, 0], x[0] = 1, 1  # One scale for everything.
    # Second moments below the lowest level become that.
    v, steps = np.maximum(np.abs(x), 1 / 16), np.arange(1, 17) / 16
    for (_, got), want, levels in zip(rounded(x), (x, v), (LEVELS, steps), strict=True):
        above = np.clip(np.searchsorted(levels, want), 1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        assert np.all(np.isclose(got, low, atol=1e-6) | np.isclose(got, high, atol=1e-6))
        # A standard error is the deviation of one rounding over the root of their number.
        error, variance = got - want, np.maximum((high - want) * (want - low), 0)
        for part in (want < 2, want < -0.5, (want > 0.1) & (want < 0.2), np.abs(want) < 0.055):
            assert abs(error[part].sum()) <= 4 * np.sqrt(variance[part].sum())


def test_a_second_moment_never_becomes_zero():
    v = np.zeros((4, 130), "float32")
    v[1] = 1e-12
    v[:, 3] = 1.0
    for got in map(np.asarray, rounded(v)[1]):
        assert (got[v > 0] > 0).all()
        # Zeros where row and column hold something become 1/16 of the smaller scale.
        assert (got[:, 3] > 0).all()
    np.testing.assert_array_equal(rounded(np.zeros((4, 130), "float32"))[1], 0)


def test_bytes_are_half_of_the_numbers_and_the_scales():
    for shape, codes in (((6, 256), 6 * 128), ((6, 300), 6 * 192), ((6, 7), 6 * 4)):
        first, second = signed_zeros(shape, "float32"), rank_one_zeros(shape, "float32")
        assert first.codes.nbytes == second.codes.nbytes == codes
        assert first.scales.nbytes == 4 * 6 * -(-shape[1] // 128)
        for moment in (first, second):
            assert (moment.rows.nbytes, moment.columns.nbytes) == (4 * 6, 4 * shape[1])
    state = jax.eval_shape(four_bit(optax.adamw(1e-3)).init, {"w": np.ones((64, 128))})
    assert len([x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x)]) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4),
    st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e30]),
    st.sampled_from(["normal", "constant", "one value"]),
    st.booleans(),
)
def test_any_values_stay_within_half_or_one_distance(shape, size, kind, bfloat16):
    x = values(SHAPES[shape])
    alone = (np.arange(x.size) == 3).reshape(x.shape)
    x = {"normal": x, "constant": np.ones_like(x), "one value": x * alone}[kind]
    x = (size * x).astype("bfloat16" if bfloat16 else "float32").astype("float32")
    scale = np.abs(x).max(initial=0)
    # The widest distance of two levels of a first moment is 0.2.
    for got, want, distance in zip(rounded(x), (x, np.abs(x)), (0.2, None), strict=True):
        for part, values_of in zip((0.5, 1), map(np.asarray, got), strict=True):
            bound = 1 / 16 if distance is None else part * distance
            assert np.isfinite(values_of).all()
            assert np.abs(values_of - want).max() <= bound * scale * 1.001 + 1e-37


def test_a_number_that_is_not_finite_stays_visible():
    for bad in (np.nan, np.inf):
        x = values((4, 130))
        x[1, 5] = bad
        (_, got), (_, second) = jax.tree.map(np.asarray, rounded(x))
        assert not np.isfinite(got[1, 5])
        # Numbers that share no scale with it are unharmed.
        assert np.isfinite(got[[0, 2, 3]][:, 128:]).all()
        assert not np.isfinite(second[1, 5])


def test_updates_are_bounded_where_gradients_of_a_group_differ_by_decades():
    adam, rng = optax.scale_by_adam(), np.random.default_rng(0)
    sizes = {
        "columns": np.tile(10.0 ** np.linspace(-3, 3, 128), (8, 1)),
        "rows": np.tile(10.0 ** np.linspace(-3, 3, 8)[:, None], (1, 128)),
        # A row that is small where its columns are large.
        "blocks": np.where((np.arange(8)[:, None] == 0) | (np.arange(128) < 8), 1e-4, 1.0),
        "values": 10.0 ** rng.uniform(-3, 3, (8, 128)),
    }

    @jax.jit
    def largest(keys, sizes):
        tx = four_bit(adam, min_size=1)

        def step(state, key):
            g = {"w": jax.random.normal(key, (8, 128)) * sizes}
            updates, state = tx.update(g, state)
            return state, jnp.max(jnp.abs(updates["w"]))

        return jax.lax.scan(step, tx.init({"w": jnp.zeros((8, 128))}), keys)[1]

    keys = jax.random.split(jax.random.key(0), 200)
    for name, size in sizes.items():
        # A first moment errs by at most 0.2 of the smaller of the largest of its row and its
        # column, each of which is at most 6 times the root of a second moment in that row or
        # column, as gradients are at most 5 standard deviations. The root is at least a quarter of
        # its scale's.
        assert largest(keys, size.astype("float32"))[20:].max() < 8, name


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
