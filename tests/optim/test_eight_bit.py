"""Tests of actjax/optim/eight_bit.py: moments in 8 bits, and what training with them does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from optim.optim_oracles import blockwise_round_trip, dynamic_levels

import actjax
from actjax.kernels.blockwise import blockwise_zeros
from actjax.optim import Blockwise, EightBitState, eight_bit
from actjax.optim.eight_bit import decoded, encoded_like, is_blockwise
from train.checkpoint import Checkpoints
from train.sharding import make_mesh, state_shardings

both = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])


@functools.partial(jax.jit, static_argnames=("unsigned", "block", "levels"))
def stored(x, unsigned=False, block=256, levels="dynamic") -> Blockwise:
    zeros = blockwise_zeros(x.shape, x.dtype, unsigned=unsigned, block=block, levels=levels)
    return zeros.encode(x)


decode = jax.jit(Blockwise.decode)


def assert_nearest(x, code, unsigned, block):
    """Holds the values to be no farther than the nearest levels, and the codes to say which."""
    x, got = np.asarray(x, np.float64), np.asarray(decode(code), np.float64)
    want = blockwise_round_trip(x, unsigned, block)
    # Rounding to float32 decides ties, and moves a level by less than a millionth of itself.
    slack = 3e-6 * np.maximum(np.abs(x), np.abs(want))
    assert (np.abs(got - x) <= np.abs(want - x) + slack).all()
    assert code.codes.shape == x.shape
    assert code.codes.dtype == (jnp.uint8 if unsigned else jnp.int8)
    assert code.scales.shape == (*x.shape[:-1], -(-x.shape[-1] // code.block))
    scales = np.repeat(np.asarray(code.scales), code.block, axis=-1)[..., : x.shape[-1]]
    index = np.asarray(code.codes, np.int64) + (0 if unsigned else 127)
    rtol = 1e-6 if code.dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(got, dynamic_levels(unsigned)[index] * scales, rtol=rtol)


# The map.


@both
def test_all_codes_are_the_levels_of_the_oracle_and_come_back(unsigned):
    codes = np.arange(256) if unsigned else np.arange(-127, 128)
    zeros = blockwise_zeros(codes.shape, "float32", unsigned=unsigned)
    codes = jnp.asarray(codes, zeros.codes.dtype)
    every = dataclasses.replace(zeros, codes=codes, scales=jnp.ones(1))
    values = decode(every)
    np.testing.assert_allclose(values, dynamic_levels(unsigned), rtol=3e-7)
    np.testing.assert_array_equal(stored(values, unsigned).codes, codes)


@both
def test_linear_codes_are_evenly_spaced_and_come_back(unsigned):
    codes = np.arange(256) if unsigned else np.arange(-127, 128)
    values = jnp.asarray(codes / codes[-1], jnp.float32)
    code = stored(values, unsigned, levels="linear")
    np.testing.assert_array_equal(code.codes, codes)
    np.testing.assert_allclose(decode(code), values, rtol=1e-6)


def sizes_of_every_decade(count: int = 20_000) -> np.ndarray:
    """Magnitudes up to one, the largest first: even in each decade, and in the logarithm."""
    rng = np.random.default_rng(0)
    decades = 10.0 ** rng.integers(-7, 1, count // 2)
    sizes = np.concatenate(
        [rng.uniform(0.1, 1, count // 2) * decades, 10 ** rng.uniform(-9, 0, count // 2)]
    )
    sizes[0] = 1
    return sizes.astype(np.float32)


@both
def test_a_magnitude_takes_the_nearest_level(unsigned):
    sizes = sizes_of_every_decade()
    block = len(sizes)
    assert_nearest(sizes, stored(sizes, unsigned, block), unsigned, block)
    if not unsigned:
        np.testing.assert_array_equal(
            stored(-sizes, False, block).codes, -stored(sizes, False, block).codes
        )


def test_the_foot_of_the_lowest_decade_is_nearest_too():
    sizes = np.array([1, 5.1e-7, 5.3e-7, 5.4e-7], np.float32)
    assert_nearest(sizes, stored(sizes), False, 256)


@both
def test_levels_are_monotone_in_the_value(unsigned):
    sizes = np.sort(sizes_of_every_decade())
    values = sizes if unsigned else np.concatenate([-sizes[::-1], sizes])
    assert (np.diff(np.asarray(decode(stored(values, unsigned, len(values))))) >= 0).all()


@both
def test_the_error_is_at_most_half_the_distance_to_the_next_level(unsigned):
    sizes = sizes_of_every_decade()
    error = np.abs(np.asarray(decode(stored(sizes, unsigned, len(sizes)))) - sizes)
    top = 7 if unsigned else 6
    for decade in range(top):
        inside = (sizes > 0.1 ** (decade + 1)) & (sizes <= 0.1**decade)
        half = 0.45 / 2 ** (top - decade) * 0.1**decade
        # Tight, or the grid of values would be too coarse to see an error that is too large.
        assert 0.9 * half < error[inside].max() < 1.0001 * half
    # What the docstring of `encode` promises.
    assert error.max() <= (0.018 if unsigned else 0.035)


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


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_those_of_the_oracle(name, dtype, unsigned):
    x = np.abs(CASES[name]) if unsigned else CASES[name]
    x = jnp.asarray(x, dtype)
    code = stored(x, unsigned, block=16)
    assert decode(code).dtype == dtype
    if dtype == "float32":
        assert_nearest(x, code, unsigned, 16)
    else:
        # Decoded in float32 and rounded to bfloat16 once.
        wide = dataclasses.replace(code, dtype=jnp.dtype("float32"))
        assert_nearest(x, wide, unsigned, 16)
        np.testing.assert_array_equal(decode(code), decode(wide).astype(dtype))


@both
def test_the_largest_of_a_block_is_kept_exactly_and_a_zero_block_has_no_scale(unsigned):
    x = np.zeros((2, 40), np.float32)
    x[1, :16], x[1, 3], x[1, 39] = 0.001, 0.7, 3e-5
    code = stored(x, unsigned, block=16)
    np.testing.assert_array_equal(code.scales, np.float32([[0, 0, 0], [0.7, 0, 3e-5]]))
    got = decode(code)
    np.testing.assert_array_equal(got[x == 0], 0)
    assert got[1, 3] == np.float32(0.7)
    assert got[1, 39] == np.float32(3e-5)


def test_an_unsigned_value_that_is_not_zero_never_becomes_zero():
    x = np.float32([1e12, 1, 1e-6, 1e-12, 1e-18, 0])
    got = np.asarray(decode(stored(x, unsigned=True)))
    assert (got[:5] > 0).all()
    np.testing.assert_allclose(got[2:5], 1e5, rtol=1e-6)
    assert got[5] == 0
    assert not np.asarray(decode(stored(x)))[2:].any()


@both
def test_a_value_of_a_scale_that_underflows_stays_small(unsigned):
    x = np.float32([1e30, 1e-10, 1e-30])
    got = np.asarray(decode(stored(x, unsigned)))
    assert (got[1:] <= 1e24).all()
    assert (got[1:] > 0).all() == unsigned


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_block(bad):
    x = np.ones((2, 32), np.float32)
    x[0, 5] = bad
    got = np.array(decode(stored(x, block=16)))
    assert not np.isfinite(got[0, 5])
    got[0, :16] = 1
    np.testing.assert_array_equal(got, 1)


@st.composite
def arrays(draw, signed: bool):
    """[2, 37] of zeros and of magnitudes of any order up to 2^60, mixed or alike."""
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
def test_any_values_take_their_nearest_levels(unsigned, data):
    x = data.draw(arrays(signed=not unsigned))
    code = stored(x, unsigned, block=16)
    assert_nearest(x, code, unsigned, 16)
    if unsigned:
        np.testing.assert_array_equal(np.asarray(decode(code)) > 0, x > 0)


@both
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stored_values_are_stored_as_they_are_whatever_their_sign_and_scale(unsigned, data):
    x = data.draw(arrays(signed=not unsigned))
    code = stored(x, unsigned, block=16)
    again = stored(decode(code), unsigned, block=16)
    jax.tree.map(np.testing.assert_array_equal, again, code)
    larger = stored(x * np.float32(1024), unsigned, block=16)
    np.testing.assert_array_equal(larger.codes, code.codes)
    np.testing.assert_array_equal(larger.scales, code.scales * 1024)
    if not unsigned:
        np.testing.assert_array_equal(stored(-x, block=16).codes, -code.codes)


def test_leading_axes_can_be_sliced_and_mapped_over():
    x = jnp.asarray(CASES["normal"], jnp.float32)
    code = stored(x, block=16)
    one = jax.tree.map(lambda a: a[1], code)
    np.testing.assert_allclose(decode(one), decode(code)[1], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(lambda x: stored(x, block=16))(x), code)


# The state.

SHAPES = {"weight": (64, 72), "small": (63, 65), "bias": (5,)}
"""4608, 4095 and 5 values: the first alone is large enough."""


def tree(seed: int, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}


GRADIENTS = [tree(seed) for seed in range(3)]


def step_of(tx):
    """Returns a step of training, compiled: from parameters, state and gradient to the new ones."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx, params, gradients, step=None):
    """Returns parameters and state after an update by each of the gradients."""
    step, state = step or step_of(tx), jax.jit(tx.init)(params)
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, state


def nbytes(state) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def test_adamw_of_a_weight_takes_a_byte_for_each_moment_and_four_for_each_block():
    weight = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    state = jax.eval_shape(eight_bit(optax.adamw(1e-3)).init, weight)
    assert isinstance(state, EightBitState)
    assert nbytes(state) == 2 * (512 * 1024 + 4 * 512 * 4) + 4  # And a counter.
    assert nbytes(jax.eval_shape(optax.adamw(1e-3).init, weight)) / nbytes(state) > 3.9


MOMENTS = {
    "adam": (optax.adam(1e-3), {"mu": jnp.int8, "nu": jnp.uint8}),
    "amsgrad": (optax.amsgrad(1e-3), {"mu": jnp.int8, "nu": jnp.uint8, "nu_max": jnp.uint8}),
    "narrow": (optax.adam(1e-3, mu_dtype="bfloat16"), {"mu": jnp.int8, "nu": jnp.uint8}),
    "rmsprop": (optax.rmsprop(1e-3), {"nu": jnp.uint8}),
    "adagrad": (optax.adagrad(1e-3), {"sum_of_squares": jnp.uint8}),
    "momentum": (optax.sgd(1e-3, momentum=0.9), {"trace": jnp.int8}),
    "lion": (optax.lion(1e-3), {"mu": jnp.int8}),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_large_moments_alone_are_in_8_bits_and_second_moments_are_unsigned(name):
    tx, want = MOMENTS[name]
    state = jax.eval_shape(eight_bit(tx).init, tree(0)).inner
    paths = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_blockwise)[0]
    stored_as = {
        next(entry.name for entry in path if hasattr(entry, "name")): leaf.codes.dtype
        for path, leaf in paths
        if is_blockwise(leaf)
    }
    assert stored_as == want
    large = {jax.tree_util.keystr(p)[-10:] for p, leaf in paths if is_blockwise(leaf)}
    assert large == {"['weight']"}
    plain = jax.eval_shape(lambda p: decoded(eight_bit(tx).init(p).inner), tree(0))
    assert plain == jax.eval_shape(tx.init, tree(0))


def test_moments_that_do_not_start_at_zero_start_where_they_should():
    tx = optax.adagrad(1e-3, initial_accumulator_value=0.1)
    start = jax.jit(lambda p: decoded(eight_bit(tx).init(p).inner))(tree(0))
    jax.tree.map(np.testing.assert_array_equal, start, tx.init(tree(0)))


def test_a_parameter_may_be_named_like_a_second_moment():
    params = {"nu": jnp.ones((64, 72))}
    state = jax.eval_shape(eight_bit(optax.adam(1e-3)).init, params).inner[0]
    assert state.nu["nu"].codes.dtype == jnp.uint8
    assert state.mu["nu"].codes.dtype == jnp.int8


def test_scalars_stay_as_they_are_whatever_min_size():
    tx = eight_bit(optax.adam(1e-3), min_size=1)
    state = jax.eval_shape(tx.init, {"temperature": jnp.ones(())})
    assert not any(map(is_blockwise, jax.tree.leaves(state, is_leaf=is_blockwise)))


def test_small_arrays_are_updated_bit_for_bit_as_optax_does():
    params = tree(9)
    ours, theirs = (
        trained(tx, params, GRADIENTS) for tx in (eight_bit(optax.adam(1e-2)), optax.adam(1e-2))
    )
    for name in ("small", "bias"):
        np.testing.assert_array_equal(ours[0][name], theirs[0][name])
        np.testing.assert_array_equal(ours[1].inner[0].mu[name], theirs[1][0].mu[name])
    moved = np.abs(theirs[0]["weight"] - params["weight"]).max()
    assert 0 < np.abs(ours[0]["weight"] - theirs[0]["weight"]).max() < 0.1 * moved
    large = jax.eval_shape(eight_bit(optax.adam(1e-2), min_size=64 * 72).init, params)
    assert is_blockwise(large.inner[0].mu["weight"])
    all_small = eight_bit(optax.adam(1e-2), min_size=64 * 72 + 1)
    exact, _ = trained(all_small, params, GRADIENTS)
    jax.tree.map(np.testing.assert_array_equal, exact, theirs[0])


def test_integers_and_flags_are_untouched_and_extra_arguments_arrive():
    def init(params):
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), params)
        return {"seen": seen, "odd": jnp.zeros(5000, bool)}

    def update(updates, state, params=None, *, value):
        seen = jax.tree.map(lambda n, g: n + (g > value), state["seen"], updates)
        return updates, {"seen": seen, "odd": ~state["odd"]}

    tx = eight_bit(optax.GradientTransformationExtraArgs(init, update))
    grads = tree(3)
    state = jax.jit(tx.update)(grads, tx.init(grads), value=0.5)[1].inner
    np.testing.assert_array_equal(state["seen"]["weight"], grads["weight"] > 0.5)
    assert state["odd"].all()


def test_a_state_that_is_decoded_and_encoded_again_is_the_same():
    _, state = trained(eight_bit(optax.adam(1e-2)), tree(9), GRADIENTS)
    again = jax.jit(lambda s: encoded_like(s, decoded(s)))(state)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.parametrize("name", MOMENTS)
def test_a_second_update_is_not_traced_and_the_state_keeps_its_form(name):
    tx, traces = eight_bit(MOMENTS[name][0]), []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(9)
    state = first = tx.init(params)
    for i in range(3):
        params, state = step(params, state, tree(i))
    assert len(traces) == 1
    assert jax.tree.structure(state) == jax.tree.structure(first)
    forms = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, first)]
    assert forms[0] == forms[1]


# Training.


def least_squares(seed, decades):
    """Returns 64 rows [64, 256], whose features fall over some decades, and targets [64, 16].

    The gradients of one block differ by as much, and second moments by twice as many decades.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 256)) * np.logspace(0, -decades, 256)
    y = x @ rng.normal(size=(256, 16))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


@functools.lru_cache
def losses_of(tx):
    """Returns a function from rows and targets to the losses of 120 steps from weights of zero."""

    @jax.jit
    def losses(x, y):
        def step(carry, _):
            w, state = carry
            value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w.T - y) ** 2))(w)
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), value

        w = jnp.zeros((16, 256))
        return jax.lax.scan(step, (w, tx.init(w)), length=120)[1]

    return losses


EXACT = optax.adam(1e-2)
DYNAMIC, SHORT_BLOCKS = eight_bit(EXACT), eight_bit(EXACT, block=64)
LINEAR = eight_bit(EXACT, levels="linear")


@pytest.mark.parametrize("tx", [DYNAMIC, SHORT_BLOCKS], ids=["256", "64"])
@pytest.mark.parametrize("decades", [0, 1.5])
def test_training_in_8_bits_stays_close_to_adam(decades, tx):
    problem = least_squares(0, decades)
    want, got = (np.asarray(losses_of(t)(*problem)) for t in (EXACT, tx))
    assert want[-1] < 0.04 * want[0]
    np.testing.assert_allclose(got, want, rtol=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_the_linear_map_diverges_where_the_dynamic_does_not(seed):
    problem = least_squares(seed, 1.5)
    linear, dynamic = (np.asarray(losses_of(tx)(*problem)) for tx in (LINEAR, DYNAMIC))
    assert dynamic.argmax() == 0
    assert dynamic[-1] < 0.04 * dynamic[0]
    assert linear[-1] > 5 * linear[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_linear_map_fails_where_all_features_are_of_one_scale_too(seed):
    problem = least_squares(seed, 0)
    linear, dynamic = (np.asarray(losses_of(tx)(*problem)) for tx in (LINEAR, DYNAMIC))
    assert dynamic[-1] < 0.01 * dynamic[0]
    assert linear[-1] > 20 * dynamic[-1]


def test_the_linear_map_loses_second_moments_and_keeps_the_first():
    # Why it diverges: the step of what was lost is `mu / (sqrt(1 - b2) |g| + eps)`, not `mu / |g|`.
    g = jnp.asarray(np.logspace(0, -2, 4096)[None], jnp.float32)

    def after_one_step(levels):
        tx = eight_bit(optax.adam(1e-2), block=4096, levels=levels)
        state = jax.jit(lambda g: decoded(tx.update(g, tx.init(g), g)[1].inner)[0])(g)
        return (np.asarray(state.mu) == 0).mean(), (np.asarray(state.nu) == 0).mean()

    # Half a level is 1 / 254 of the largest `g`, and 1 / 510 of the largest `g²`.
    np.testing.assert_allclose(after_one_step("linear"), (0, 1 - np.log10(510) / 4), atol=1e-3)
    assert after_one_step("dynamic") == (0, 0)


# Where states live.

ADAMW = eight_bit(optax.adamw(1e-2, weight_decay=0.1))
STEP = step_of(ADAMW)


def like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.mark.parametrize("mesh", ["", "fsdp=4"])
def test_a_state_comes_back_from_a_checkpoint_bit_for_bit(tmp_path, mesh):
    params, state = trained(ADAMW, tree(9), GRADIENTS, STEP)
    state = jax.device_put(state, state_shardings(state, make_mesh(mesh)))
    first = Checkpoints(tmp_path, keep=1)
    first.save(3, state, {}, {})
    first.close()
    again = Checkpoints(tmp_path, keep=1)
    restored, _ = again.restore(3, like(state), {})
    again.close()
    assert like(restored) == like(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    following = [STEP(params, jax.device_get(s), GRADIENTS[0]) for s in (restored, state)]
    jax.tree.map(np.testing.assert_array_equal, *following)


def assert_alike(state, other):
    """Holds arrays to be the same but for rounding, after which a tie may take the other code."""
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.mean(~np.isclose(got, want, rtol=1e-6, atol=1e-7)) < 1e-3


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp")], ids=["rows", "columns"])
def test_four_devices_hold_what_one_does(spec):
    mesh, shapes = make_mesh("fsdp=4"), {"cut blocks": (16, 512), "ragged": (16, 600)}
    start, gradients = tree(9, shapes=shapes), [tree(seed, shapes=shapes) for seed in range(3)]
    alone = trained(ADAMW, start, gradients, STEP)
    split = NamedSharding(mesh, PartitionSpec(*spec))
    params, state = jax.device_put(start, split), jax.jit(ADAMW.init)(start)
    state = jax.device_put(state, state_shardings(state, mesh))
    for grads in gradients:
        params, state = STEP(params, state, jax.device_put(grads, split))
    assert len(params["ragged"].sharding.device_set) == 4
    assert_alike((params, state), alone)


def test_stacked_layers_are_updated_each_as_if_alone():
    # 2048 values a layer stay float32, although the stack has 6144.
    shapes, head = {"weight": (3, 64, 72), "small": (3, 32, 64)}, {"weight": (70, 64)}
    start, *gradients = (
        {"layers": tree(seed, shapes=shapes), "head": tree(10 + seed, shapes=head)}
        for seed in range(4)
    )
    params, state = start, jax.jit(lambda p: actjax.optim.init(ADAMW, p))(start)
    first = state.layers.inner[0].mu["layers"]
    assert first["weight"].codes.shape == (3, 64, 72)
    assert first["small"].dtype == jnp.float32
    apply = jax.jit(lambda g, s, p: actjax.optim.apply(ADAMW, g, s, p))
    for grads in gradients:
        params, state = apply(grads, state, params)
    alone = trained(ADAMW, start["head"], [g["head"] for g in gradients], STEP)
    assert_alike((params["head"], state.rest), alone)
    for i in range(3):
        own, own_state, *own_gradients = (
            jax.tree.map(lambda x: x[i], t)
            for t in (
                params["layers"],
                state.layers,
                start["layers"],
                *(g["layers"] for g in gradients),
            )
        )
        alone = trained(ADAMW, own_gradients[0], own_gradients[1:], STEP)
        assert_alike((own, own_state), alone)


# Arguments.


@pytest.mark.parametrize("name", ["block", "min_size"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "8"])
def test_sizes_are_positive_integers(name, value):
    message = f"`{name}` of eight_bit must be an integer >= 1, got {value!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        eight_bit(optax.adam(1e-3), **{name: value})


def test_unknown_levels_are_refused():
    message = "`levels` of eight_bit must be one of ('dynamic', 'linear'), got 'log'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        eight_bit(optax.adam(1e-3), levels="log")


@pytest.mark.parametrize("inner", [None, optax.adam, 1e-3])
def test_what_is_no_transform_is_refused(inner):
    with pytest.raises(TypeError, match="`inner` must be an optax transform"):
        eight_bit(inner)


# Which arrays of a state are moments.

SHAPES = {"weight": (70, 64)}


@pytest.mark.parametrize(
    "inner",
    [
        optax.sm3(1e-2, 0.9),
        optax.rmsprop(1e-2, centered=True),
        optax.adan(1e-2),
        optax.contrib.prodigy(),
        optax.contrib.dadapt_adamw(),
        optax.contrib.cocob(),
        optax.adafactor(1e-2),
    ],
    ids=["sm3", "centred rmsprop", "adan", "prodigy", "dadapt", "cocob", "adafactor"],
)
def test_what_8_bits_cannot_hold_stays_as_it_is(inner):
    # Weights, sums, and differences of nearly equal moments.
    params = tree(0, shapes=SHAPES)
    state = eight_bit(inner).init(params).inner
    assert jax.tree.structure(state) == jax.tree.structure(inner.init(params))


def test_weights_that_a_transform_keeps_stay_while_its_moments_do_not():
    params = tree(0, shapes=SHAPES)
    state = eight_bit(optax.contrib.schedule_free_adamw(1e-2)).init(params).inner
    assert state.z["weight"].dtype == jnp.float32
    moments = [x for x in jax.tree.leaves(state, is_leaf=is_blockwise) if is_blockwise(x)]
    assert [x.codes.dtype for x in moments] == [jnp.uint8]


def test_a_parameter_may_be_called_what_moments_are():
    params = {"weight": tree(0, shapes=SHAPES)["weight"]}
    params["nu"] = {"weight": params["weight"]}
    state = eight_bit(optax.adam(1e-2)).init(params).inner[0]
    assert {x.codes.dtype for x in (state.mu["weight"], state.mu["nu"]["weight"])} == {
        jnp.dtype("int8")
    }
    assert {x.codes.dtype for x in (state.nu["weight"], state.nu["nu"]["weight"])} == {
        jnp.dtype("uint8")
    }


def test_names_of_moments_can_be_given():
    params = tree(0, shapes=SHAPES)
    state = eight_bit(optax.adan(1e-2), signed=("m",), unsigned=("n",)).init(params).inner[0]
    assert state.m["weight"].codes.dtype == jnp.int8
    assert state.n["weight"].codes.dtype == jnp.uint8
    assert state.v["weight"].dtype == jnp.float32


def test_what_is_negative_is_zero_where_nothing_should_be():
    code = stored(jnp.asarray([1.0, -0.5, -1e-9, 0.25]), unsigned=True)
    np.testing.assert_allclose(decode(code), [1, 0, 0, 0.25], rtol=0.02)
