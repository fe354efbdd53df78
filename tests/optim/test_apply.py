"""Updates of stacked layers, one at a time: the same values as optax, without its copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import actjax
from actjax import optim

ADAMW = optax.adamw(1e-2, weight_decay=0.1)


def layers_and_rest(model):
    """A model as trees of its own: each layer, and what is in none."""
    stacked = jax.tree.leaves(model.layers)
    rest = [model.embedding[...], model.norm[...], model.output[...]]
    return [[x[i] for x in stacked] for i in range(len(stacked[0]))] + [rest]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    "tx",
    [
        ADAMW,
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-3),
        optax.adamw(optax.linear_schedule(1e-2, 0, 4), mask=lambda p: jax.tree.map(
            lambda x: x.ndim > 1, p)),
    ],
    ids=["adamw", "momentum", "lion", "schedule and mask"],
)  # fmt: skip
def test_three_steps_are_those_of_optax(tx):
    model, parts = tiny.decoder(), [*layers_and_rest(tiny.decoder())]
    state, states = optim.init(tx, model), [tx.init(part) for part in parts]
    step = jax.jit(functools.partial(optim.apply, tx))
    for i in range(3):
        grads = tiny.gradients(model, i + 1.0)
        model, state = step(grads, state, model)
        for j, part in enumerate(layers_and_rest(grads)):
            updates, states[j] = tx.update(part, states[j], parts[j])
            parts[j] = optax.apply_updates(parts[j], updates)
    for ours, theirs in zip(layers_and_rest(model), parts, strict=True):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("quick_compile")
def test_the_norm_is_that_of_what_was_added():
    model = tiny.decoder()
    state = optim.init(ADAMW, model)
    new, _, norm = optim.apply(ADAMW, tiny.gradients(model), state, model, with_norm=True)
    added = jax.tree.map(jnp.subtract, new, model)
    np.testing.assert_allclose(norm, optax.global_norm(added), rtol=1e-4)


@pytest.mark.usefixtures("quick_compile")
def test_factored_gradients_are_made_dense_a_layer_at_a_time():
    codec = actjax.RandomizedSVD(3)
    w = 0.3 * jax.random.normal(jax.random.key(0), (5, 16, 16))

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(actjax.linear(x, w, codec=codec, key=jax.random.key(1))), None

        return jnp.sum(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    params, x = {"layers": w}, jax.random.normal(jax.random.key(2), (64, 16))
    _, factored = actjax.value_and_grad(loss)(params, x)
    assert factored["layers"].shape == (5, 16, 16)
    dense = {"layers": factored["layers"].dense()}
    state = optim.init(ADAMW, params)
    ours, _ = optim.apply(ADAMW, factored, state, params)
    theirs, _ = optim.apply(ADAMW, dense, state, params)
    np.testing.assert_allclose(ours["layers"], theirs["layers"], rtol=1e-6, atol=1e-7)


def big_params(layers: int = 8, width: int = 256):
    keys = jax.random.split(jax.random.key(0), layers)
    return {"layers": jax.vmap(lambda k: jax.random.normal(k, (width, width)))(keys)}


@pytest.mark.parametrize(
    ("tx", "bound"), [(ADAMW, 8), (optim.eight_bit(ADAMW), 10)], ids=["float32", "8 bits"]
)
def test_no_update_of_all_layers_and_no_second_copy_exists(tx, bound):
    def step(params, state, grads):
        return optim.apply(tx, grads, state, params)

    sizes = []
    for count in (8, 24):
        params = big_params(count)
        state = optim.init(tx, params)
        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
        stats = program.memory_analysis()
        sizes.append(stats.temp_size_in_bytes)
        assert stats.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves((state, params)))
    one_layer = 256 * 256 * 4
    # However many there are: nothing but one layer's.
    assert abs(sizes[1] - sizes[0]) < one_layer / 10
    # A layer's gradient, weight and moments, the new ones, and the update; of moments in 8 bits the
    # levels that they are rounded to as well.
    assert sizes[0] < bound * one_layer


@pytest.mark.usefixtures("quick_compile")
def test_a_second_update_is_not_compiled_again():
    model = tiny.decoder()
    tx = optim.subspace(optim.eight_bit(optax.scale_by_adam(), min_size=64), 4)
    state = optim.init(tx, model)
    step = jax.jit(functools.partial(optim.apply, tx))
    for _ in range(3):
        model, state = step(tiny.gradients(model), state, model)
    assert step._cache_size() == 1


def test_layers_may_be_anywhere_and_parameters_absent():
    params = {"blocks": {"w": jnp.ones((3, 4, 4)), "bias": None}, "head": jnp.ones((4, 2))}
    where = lambda p: p["blocks"]  # noqa: E731
    state = optim.init(ADAMW, params, layers=where)
    new, _ = optim.apply(ADAMW, params, state, params, layers=where)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert jax.tree.leaves(state.layers)[0].shape[0] == 3


def test_bad_input_is_named():
    params = {"layers": {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 4))}}
    with pytest.raises(ValueError, match=r"must share their leading axis.* are 2, 3\."):
        optim.init(ADAMW, params)
    with pytest.raises(ValueError, match=r"dict has no `layers`: pass `layers`, a function"):
        optim.init(ADAMW, {"blocks": jnp.ones((3, 4))})
    good = {"layers": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 4))}
    state = optim.init(ADAMW, good)
    with pytest.raises(ValueError, match=r"`refresh` is for actjax.optim.subspace"):
        optim.apply(ADAMW, good, state, good, refresh=True)
    with pytest.raises(ValueError, match=r"`grads` must have the structure of `params`"):
        optim.apply(ADAMW, {"layers": good["layers"]}, state, good)
    tx = optim.subspace(optax.scale_by_adam(), 2)
    with pytest.raises(ValueError, match=r"`refresh` must be a bool that.* for the 3 layers: got"):
        optim.apply(tx, good, optim.init(tx, good), good, refresh=np.ones(2, bool))
    with pytest.raises(ValueError, match=r'static_argnames="refresh"'):
        jax.jit(lambda r: optim.apply(tx, good, optim.init(tx, good), good, refresh=r))(True)
    for bad in (optax.adam, None, 0.1):
        with pytest.raises(TypeError, match=r"`tx` must be an optax transform"):
            optim.init(bad, good)
    with pytest.raises(TypeError, match=r"`layers` must be a function, got 'layers'"):
        optim.init(ADAMW, good, layers="layers")


@pytest.mark.parametrize("wrap", [optim.eight_bit, lambda tx: optax.chain(tx, optax.scale(-1.0))])
def test_a_subspace_within_another_transform_is_refused(wrap):
    tx = wrap(optim.subspace(optax.scale_by_adam(), 2))
    with pytest.raises(ValueError, match=r"`tx` has a subspace within another transform.*`inner`"):
        optim.init(tx, {"layers": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 4))})


def test_a_basis_is_not_for_layers_and_others():
    params = {"layers": {"w": jnp.ones((3, 4, 4))}, "head": jnp.ones((4, 4))}
    tx = optim.subspace(optax.scale_by_adam(), 2, groups={"layers.w": "g", "head": "g"})
    with pytest.raises(ValueError, match=r"`groups` of subspace has \['g'\] for weights of the"):
        optim.init(tx, params)


def stacked_params(count):
    return {"layers": {"w": jnp.ones((count, 4, 4))}, "head": jnp.ones((4, 4))}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda p: ADAMW.init(p), "got tuple"),
        (lambda _: None, "got NoneType"),
        (lambda p: optim.init(optax.sgd(1.0, 0.9), p), r"is not there, expected \(3,\)"),
        (lambda _: optim.init(ADAMW, stacked_params(2)), r"is \(2,\), expected \(3,\)"),
    ],
    ids=["of optax", "none", "of another transform", "of two layers"],
)
def test_a_state_that_is_not_of_these_parameters_is_refused(state, message):
    # JAX clamps an index: layers that are not there would share the moments of the last.
    params = stacked_params(3)
    with pytest.raises(ValueError, match=rf"`state` must be what `actjax.optim.init.*{message}"):
        optim.apply(ADAMW, params, state(params), params)
    tx = optim.subspace(optax.scale_by_adam(), 2, source="random")
    with pytest.raises(ValueError, match=r"`state` must be what `actjax.optim.init"):
        optim.redraw(tx, state(params), params)
