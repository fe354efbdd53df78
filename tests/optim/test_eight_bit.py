"""Optimizer states in 8 bits: which arrays, bytes and values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import nbytes

from actjax.optim import EightBitState, eight_bit
from actjax.optim.states.stored import decoded, encoded_like, is_code

SHAPES = {"weight": (64, 72), "small": (63, 65), "bias": (5,)}
"""4608, 4095 and 5 values: only the first is large enough."""


def tree(seed: int, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}


def state_shapes(tx, params):
    return jax.eval_shape(eight_bit(tx).init, params).inner


# Which arrays are moments.

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
def test_only_large_moments_are_in_8_bits_and_second_moments_are_unsigned(name):
    tx, want = MOMENTS[name]
    state = state_shapes(tx, tree(0))
    paths = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_code)[0]
    stored_as = {
        next(entry.name for entry in path if hasattr(entry, "name")): leaf.codes.dtype
        for path, leaf in paths
        if is_code(leaf)
    }
    assert stored_as == want
    large = {jax.tree_util.keystr(p)[-10:] for p, leaf in paths if is_code(leaf)}
    assert large == {"['weight']"}
    plain = jax.eval_shape(lambda p: decoded(eight_bit(tx).init(p).inner), tree(0))
    assert plain == jax.eval_shape(tx.init, tree(0))
    # A second update is not traced again.
    whole = EightBitState(state)
    assert jax.eval_shape(eight_bit(tx).update, tree(0), whole, tree(0))[1] == whole


def test_arrays_that_8_bits_cannot_represent_stay_as_they_are():
    # Weights, sums, and differences of nearly equal moments.
    params = {"weight": np.ones((70, 64), "float32")}
    for inner in (
        optax.sm3(1e-2, 0.9),
        optax.rmsprop(1e-2, centered=True),
        optax.adan(1e-2),
        optax.contrib.prodigy(),
        optax.contrib.dadapt_adamw(),
        optax.contrib.cocob(),
        optax.contrib.sophia(1e-2),
        optax.adafactor(1e-2),
    ):
        plain = jax.eval_shape(inner.init, params)
        assert jax.tree.structure(state_shapes(inner, params)) == jax.tree.structure(plain)
    state = state_shapes(optax.contrib.schedule_free_adamw(1e-2), params)
    assert state.z["weight"].dtype == jnp.float32
    moments = [x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x)]
    assert [x.codes.dtype for x in moments] == [jnp.uint8]


def test_a_parameter_may_be_named_like_a_moment_and_moments_may_have_other_names():
    weight = np.ones((64, 72), "float32")
    state = state_shapes(optax.adam(1e-3), {"weight": weight, "nu": {"weight": weight}})[0]
    for moments, dtype in ((state.mu, jnp.int8), (state.nu, jnp.uint8)):
        assert moments["weight"].codes.dtype == moments["nu"]["weight"].codes.dtype == dtype
    tx = eight_bit(optax.adan(1e-2), signed=("m",), unsigned=("n",))
    state = jax.eval_shape(tx.init, {"weight": weight}).inner[0]
    assert state.m["weight"].codes.dtype == jnp.int8
    assert state.n["weight"].codes.dtype == jnp.uint8
    assert state.v["weight"].dtype == jnp.float32


def test_min_size_is_the_size_of_the_smallest_array_in_8_bits():
    for min_size, expected in ((64 * 72, True), (64 * 72 + 1, False)):
        tx = eight_bit(optax.adam(1e-2), min_size=min_size)
        assert is_code(jax.eval_shape(tx.init, tree(9)).inner[0].mu["weight"]) == expected
    tx = eight_bit(optax.adam(1e-3), min_size=1)
    state = jax.eval_shape(tx.init, {"temperature": np.ones((), "float32")})
    assert not any(map(is_code, jax.tree.leaves(state, is_leaf=is_code)))


def test_adamw_takes_one_byte_per_moment_and_four_per_block():
    weight = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    state = jax.eval_shape(eight_bit(optax.adamw(1e-3)).init, weight)
    assert isinstance(state, EightBitState)
    assert nbytes(state) == 2 * (512 * 1024 + 4 * 512 * 4) + 4  # And a counter.
    assert nbytes(jax.eval_shape(optax.adamw(1e-3).init, weight)) / nbytes(state) > 3.9


# Values.


def test_moments_keep_an_initial_value_other_than_zero():
    tx = optax.adagrad(1e-3, initial_accumulator_value=0.1)
    start, want = jax.jit(lambda p: (decoded(eight_bit(tx).init(p).inner), tx.init(p)))(tree(0))
    jax.tree.map(np.testing.assert_array_equal, start, want)


def test_small_arrays_are_updated_bit_for_bit_as_in_optax():
    params, adam = tree(9), optax.adam(1e-2)
    grads = jax.tree.map(lambda *x: np.stack(x), *map(tree, range(3)))

    @jax.jit
    def run(params, grads):
        def trained(tx):
            def step(carry, g):
                updates, state = tx.update(g, carry[1], carry[0])
                return (optax.apply_updates(carry[0], updates), state), None

            return jax.lax.scan(step, (params, tx.init(params)), grads)[0]

        ours, theirs = trained(eight_bit(adam)), trained(adam)
        return ours, theirs, encoded_like(ours[1], decoded(ours[1]))

    ours, theirs, again = run(params, grads)
    for name in ("small", "bias"):
        np.testing.assert_array_equal(ours[0][name], theirs[0][name])
        np.testing.assert_array_equal(ours[1].inner[0].mu[name], theirs[1][0].mu[name])
    moved = np.abs(theirs[0]["weight"] - params["weight"]).max()
    assert 0 < np.abs(ours[0]["weight"] - theirs[0]["weight"]).max() < 0.1 * moved
    jax.tree.map(np.testing.assert_array_equal, again, ours[1])


def test_integers_and_flags_are_untouched_and_extra_arguments_are_passed_on():
    def init(params):
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), params)
        return {"seen": seen, "odd": jnp.zeros(5000, bool)}

    def update(updates, state, params=None, *, value):
        seen = jax.tree.map(lambda n, g: n + (g > value), state["seen"], updates)
        return updates, {"seen": seen, "odd": ~state["odd"]}

    tx = eight_bit(optax.GradientTransformationExtraArgs(init, update))
    grads = tree(3)
    state = jax.jit(lambda g: tx.update(g, tx.init(g), value=0.5)[1].inner)(grads)
    np.testing.assert_array_equal(state["seen"]["weight"], grads["weight"] > 0.5)
    assert state["odd"].all()
