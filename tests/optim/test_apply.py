"""Updates of stacked layers, one at a time: the values of optax, without its copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import nbytes

import actjax
from actjax import optim

ADAMW = optax.adamw(1e-2, weight_decay=0.1)


def parameters(seed: int = 0):
    """Returns three layers with two arrays each, and two arrays outside the layers."""
    rng = np.random.default_rng(seed)
    shapes = {"layers": {"w": (3, 8, 6), "scale": (3, 8)}, "head": (6, 5), "norm": (5,)}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype("float32"),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def layers_and_rest(params):
    """Returns separate trees: each layer, and the rest."""
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(3)]
    return [*layers, {name: x for name, x in params.items() if name != "layers"}]


def assert_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


TRANSFORMS = {
    "adamw": ADAMW,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-2),
    "schedule and mask": optax.adamw(
        optax.linear_schedule(1e-2, 0, 4), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_three_steps_equal_those_of_optax(name):
    tx = TRANSFORMS[name]

    def step(carry, grads):
        (params, state), (parts, states) = carry
        *applied, norm = optim.apply(tx, grads, state, params, with_norm=True)
        updates, states = zip(*map(tx.update, layers_and_rest(grads), states, parts), strict=True)
        parts = list(map(optax.apply_updates, parts, updates))
        return (tuple(applied), (parts, list(states))), (norm, optax.global_norm(updates))

    @jax.jit
    def run(params, grads):
        parts = layers_and_rest(params)
        carry = (params, optim.init(tx, params)), (parts, list(map(tx.init, parts)))
        return jax.lax.scan(step, carry, grads)

    grads = jax.tree.map(lambda g: np.stack([(i + 1) * g for i in range(3)]), parameters(1))
    ((params, _), (parts, _)), norms = run(parameters(), grads)
    np.testing.assert_allclose(*norms, rtol=1e-4)
    assert_close(layers_and_rest(jax.device_get(params)), parts, rtol=1e-5, atol=1e-6)


def test_a_clipped_update_is_that_of_a_gradient_clipped_before():
    params, grads = parameters(), parameters(1)
    # Of 302 normal numbers: about 17.
    assert 2 * 5 < optax.global_norm(grads) < 100

    @jax.jit
    def both(params, grads):
        state = optim.init(ADAMW, params)
        results = []
        for clip in (5.0, 100.0):
            clipped = optax.clip_by_global_norm(clip).update(grads, optax.EmptyState())[0]
            results.append(
                (
                    optim.apply(ADAMW, grads, state, params, clip=clip, with_norm=True),
                    optim.apply(ADAMW, clipped, state, params, with_norm=True),
                )
            )
        return results

    for ours, theirs in both(params, grads):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), "1", None])
def test_a_clip_that_is_no_number_above_0_is_refused(clip):
    params = parameters()
    state = jax.eval_shape(functools.partial(optim.init, ADAMW), params)
    with pytest.raises(ValueError, match=r"`clip` of apply must be a number above 0, got "):
        optim.apply(ADAMW, params, state, params, clip=clip)


def test_factored_gradients_are_multiplied_out_one_layer_at_a_time():
    rng = np.random.default_rng(0)
    params = {"layers": (0.3 * rng.normal(size=(5, 16, 16))).astype("float32")}
    x, codec = rng.normal(size=(64, 16)).astype("float32"), actjax.RandomizedSVD(3)

    def loss(params):
        def layer(x, w):
            return x + jnp.tanh(actjax.linear(x, w, codec=codec, key=jax.random.key(1))), None

        return jnp.sum(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    @jax.jit
    def both(params):
        _, factored = actjax.value_and_grad(loss)(params)
        assert factored["layers"].shape == (5, 16, 16)
        dense = {"layers": factored["layers"].dense()}
        state = optim.init(ADAMW, params)
        return [optim.apply(ADAMW, grads, state, params)[0] for grads in (factored, dense)]

    ours, theirs = both(params)
    np.testing.assert_allclose(ours["layers"], theirs["layers"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tx", "dtype", "bound"),
    [
        (ADAMW, "float32", 8),
        (optim.eight_bit(ADAMW), "float32", 10),
        (optim.stochastic_rounding(ADAMW), "bfloat16", 9),
    ],
    ids=["float32", "8 bits", "rounded"],
)
def test_no_update_of_all_layers_and_no_second_copy_exists(tx, dtype, bound):
    sizes = []
    for count in (8, 24):
        params = {"layers": jax.ShapeDtypeStruct((count, 256, 256), dtype)}
        state = jax.eval_shape(functools.partial(optim.init, tx), params)
        step = jax.jit(lambda p, s, g: optim.apply(tx, g, s, p), donate_argnums=(0, 1))
        stats = step.lower(params, state, params).compile().memory_analysis()
        sizes.append(stats.temp_size_in_bytes)
        assert stats.alias_size_in_bytes >= nbytes((state, params))
    one_layer = 256 * 256 * 4
    # The temporaries do not grow with the number of layers.
    assert abs(sizes[1] - sizes[0]) < one_layer / 10
    # For one layer: gradient, weight and moments, the new ones, and the update; for 8-bit moments
    # also the levels that they are rounded to, and for rounded weights the sum in float32.
    assert sizes[0] < bound * one_layer


def test_layers_may_have_another_name_and_parameters_may_be_absent():
    params = {"blocks": {"w": np.ones((3, 4, 4)), "bias": None}, "head": np.ones((4, 2))}
    where = lambda p: p["blocks"]  # noqa: E731
    state = jax.eval_shape(functools.partial(optim.init, ADAMW, layers=where), params)
    update = functools.partial(optim.apply, ADAMW, layers=where)
    new, _ = jax.eval_shape(update, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert jax.tree.leaves(state.layers)[0].shape[0] == 3


def test_parameters_without_stacked_layers_are_updated_as_in_optax():
    tx = optim.stochastic_rounding(optim.eight_bit(optax.adamw(0.1), min_size=16))
    without = [
        {"w": np.ones((8, 8)), "b": np.ones(8)},
        # A tree for each layer, one dense layer, and a list.
        {"layers": {str(i): {"w": np.full((8, 8), i)} for i in range(2)}},
        {"layers": {"up": {"w": np.ones((8, 4)), "b": np.ones(4)}}, "norm": np.ones(8)},
        [np.ones((8, 8))],
    ]
    without = jax.tree.map(lambda x: x.astype("bfloat16"), without)

    @jax.jit
    def both(without):
        results = []
        for params in without:
            grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
            state = optim.init(tx, params)
            assert state.layers == ()
            updates, _ = tx.update(grads, tx.init(params), params)
            got, _ = optim.apply(tx, grads, state, params)
            results.append((got, optax.apply_updates(params, updates)))
        return results

    for got, want in both(without):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_subspace_without_stacked_layers_is_refreshed():
    tx, params = optim.subspace(optax.sgd(1.0), 2, scale=1.0), {"w": np.zeros((8, 8), "float32")}
    grads = {"w": np.diag(np.arange(8, dtype="float32"))}
    step = jax.jit(lambda g, p: optim.apply(tx, g, optim.init(tx, p), p, refresh=True)[0])
    # The gradient within the span of its two largest directions.
    expected = -np.diag(np.where(np.arange(8) > 5, np.arange(8.0), 0))
    # Float32, of numbers up to 7.
    np.testing.assert_allclose(step(grads, params)["w"], expected, atol=1e-5)
