"""Optimizers that round bfloat16 weights: values, random numbers, and where they work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optim.rounded import (
    ADAMW,
    GRADIENTS,
    applied,
    apply_step,
    assert_same_bits,
    loop,
    parameters,
    widened,
)

import actjax
from actjax import optim

# Values.


def test_stochastic_rounding_is_unbiased_over_keys():
    tx, count = optim.stochastic_rounding(optax.sgd(1.0)), 2000
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=64), jnp.bfloat16)
    # From a thousandth of the spacing to several spacings.
    grads = jnp.asarray(rng.normal(size=64) * 10 ** rng.uniform(-5, -1, 64), jnp.float32)
    state = tx.init(weights)

    @jax.jit
    @jax.vmap
    def new(key):
        return tx.rounding.apply(grads, state._replace(key=jax.random.key_data(key)), weights)[0]

    samples = np.asarray(new(jax.random.split(jax.random.key(0), count)), np.float64)
    exact = np.asarray(weights, np.float64) - np.asarray(grads, np.float64)
    spacing = np.exp2(np.frexp(np.abs(exact))[1] - 8)
    share = np.abs(exact) / spacing % 1
    # Of rare events, the standard error of a few is not that of a normal distribution.
    standard_error = spacing * np.sqrt(np.maximum(share * (1 - share), 0.01) / count)
    assert np.all(np.abs(samples.mean(0) - exact) <= 5 * standard_error)
    np.testing.assert_array_equal(np.unique(np.abs(samples - exact) > spacing), False)


def test_small_updates_add_up_where_nearest_loses_them():
    # 4,096 updates of 2^-14 of the weight: rounded to nearest, none changes it.
    weights, update = jnp.ones(256, jnp.bfloat16), jnp.full(256, 2.0**-14)
    tx = optim.stochastic_rounding(optax.identity())

    @jax.jit
    def run():
        body = lambda c, _: (tx.rounding.apply(update, c[1], c[0])[:2], None)  # noqa: E731
        (weights_end, _), _ = jax.lax.scan(body, (weights, tx.init(weights)), None, 4096)
        nearest = lambda w, _: (optax.apply_updates(w, update), None)  # noqa: E731
        return weights_end, jax.lax.scan(nearest, weights, None, 4096)[0]

    new, nearest = run()
    assert np.all(np.asarray(nearest) == 1)
    error = np.asarray(new, np.float64) - 1.25
    # Each update is rounded with a variance below p (1 - p) of the spacing, 2^-7, squared.
    deviation = np.sqrt(4096 * 2**-7 * (1 - 2**-7)) * 2**-7
    assert np.all(np.abs(error) <= 5 * deviation)
    assert abs(error.mean()) <= 5 * deviation / np.sqrt(256)


def test_float32_parameters_among_them_are_updated_as_in_optax():
    params = parameters()
    ours, _ = loop(optim.stochastic_rounding(optax.adam(1e-3)), params)
    theirs, _ = loop(optax.adam(1e-3), widened(params), list(map(widened, GRADIENTS)))
    np.testing.assert_array_equal(ours["norm"], theirs["norm"])


def test_moments_are_float32_and_8_bit_moments_are_decoded_to_float32():
    params = parameters()
    state = jax.eval_shape(optim.stochastic_rounding(ADAMW).init, params)
    assert state.inner[0].nu["head"].dtype == jnp.float32
    stored = optim.stochastic_rounding(optim.eight_bit(ADAMW, min_size=8))
    assert jax.eval_shape(stored.init, params).inner.inner[0].nu["head"].dtype == jnp.float32


# Random numbers.


def test_steps_layers_weights_and_seeds_have_different_random_numbers():
    # Equal layers and gradients, so that only random numbers tell them apart.
    one = jnp.ones((16, 64), jnp.bfloat16)
    params = {"layers": {"a": jnp.stack([one] * 3), "b": jnp.stack([one] * 3)}, "head": one}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9), params)
    tx = optim.stochastic_rounding(optax.sgd(1.0))
    step = apply_step(tx)
    first, state = applied(tx, params, [grads], step)
    # The same weights again, at the next step.
    second, _ = step(grads, state, params)
    other, _ = applied(optim.stochastic_rounding(optax.sgd(1.0), seed=1), params, [grads])
    samples = [
        np.asarray(x).reshape(-1, one.size)
        for tree in (first, second, other)
        for x in jax.tree.leaves(tree)
    ]
    patterns = np.concatenate(samples) != 1
    assert len(patterns) == 3 * 7
    agreement = np.mean(patterns[:, None] == patterns[None], axis=-1)
    # Updates of half a spacing: independent patterns agree in a half of the 1,024 places.
    np.fill_diagonal(agreement, 0.5)
    assert np.abs(agreement - 0.5).max() < 5 * 0.5 / np.sqrt(one.size)
    assert_same_bits(applied(tx, params, [grads], step)[0], first)


# Ways to apply it.


def test_an_in_backward_step_gives_the_same_bits_as_apply():
    # The gradient of every weight is a sign, exactly, however it is computed.
    rng = np.random.default_rng(0)
    params = {"layers": jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)}
    params["head"] = jnp.asarray(rng.normal(size=256), jnp.bfloat16)
    signs = jnp.asarray(rng.choice([-1.0, 1.0], 256), jnp.bfloat16)
    tx = optim.stochastic_rounding(optax.adam(1e-4))
    update = optim.in_backward(
        lambda p, x: x,
        lambda p, x, inputs, own: x + p,
        lambda p, x, inputs: jnp.sum(((x + p["head"]) * signs).astype(jnp.float32)),
        tx,
    )
    state = jax.jit(update.init)(params)
    ours, ours_state, *_ = jax.jit(update.step)(params, state, jnp.zeros(256, jnp.bfloat16))
    grads = jax.tree.map(lambda w: jnp.broadcast_to(signs, w.shape), params)
    theirs, theirs_state = applied(tx, params, [grads])
    assert_same_bits((ours, ours_state.optimizer), (theirs, theirs_state))
    assert np.mean(np.asarray(ours["head"]) != np.asarray(params["head"])) > 0.01


def test_factored_gradients_are_multiplied_out():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(3, 16, 2)), rng.normal(size=(3, 2, 24))
    params = {"layers": {"w": parameters()["layers"]["w"]}}
    factored = actjax.LowRank(jnp.asarray(left, "float32"), jnp.asarray(right, "float32"))
    tx = optim.stochastic_rounding(optax.sgd(1e-3))

    @jax.jit
    def all_three(params):
        state = optim.init(tx, params)
        gradients = factored, factored.dense()
        updates, _ = tx.update({"layers": {"w": factored}}, tx.init(params), params)
        new = [optim.apply(tx, {"layers": {"w": g}}, state, params)[0] for g in gradients]
        return *new, updates

    *applied_to, updates = all_three(params)
    got, want = (np.asarray(p["layers"]["w"], np.float32) for p in applied_to)
    # The products of both programs differ in their last bits, which round a few weights otherwise.
    np.testing.assert_allclose(got, want, rtol=2**-7)
    assert np.mean(got == want) > 0.9
    # In an optax loop as well.
    assert updates["layers"]["w"].shape == (3, 16, 24)


def test_it_is_the_last_part_of_a_chain_and_takes_other_transforms_inside():
    params = parameters()
    mask = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
    for inner in (
        optim.eight_bit(ADAMW, min_size=8),
        optax.chain(optim.scale_by_adam_8bit(min_size=8), optax.scale(-1e-3)),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.masked(ADAMW, mask),
        optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    ):
        tx = optim.stochastic_rounding(inner)

        @jax.jit
        def both(params, grads, tx=tx):
            state = tx.init(params)
            updates, after = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            return new, tx.rounding.apply(grads, state, params)[0], state, after

        new, want, state, after = both(params, GRADIENTS[0])
        assert_same_bits(new, want)
        assert jax.eval_shape(lambda s: s, after) == jax.eval_shape(lambda s: s, state)
    clipped = optax.chain(optax.clip(0.01), optim.stochastic_rounding(ADAMW))
    new, _ = loop(clipped, params)
    moved = np.asarray(new["head"], np.float64) - np.asarray(params["head"], np.float64)
    assert np.mean(moved != 0) > 0.1


def test_an_nnx_optimizer_rounds_the_weights_of_its_model():
    tx = optim.stochastic_rounding(optax.sgd(2.0**-14))
    model = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = np.asarray(model.kernel[...], np.float64)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for _ in range(64):
        step(model, optimizer, grads)
    assert model.kernel.dtype == jnp.bfloat16
    moved = np.asarray(model.kernel[...], np.float64) - before
    # 64 / 2^14 on average. Weights are below 1, and their spacing is at most 2^-8: the variance of
    # 64 updates is below 64 * 2^-14 * 2^-8, and that of their mean over 128 weights 128 times less.
    assert abs(moved.mean() + 2**-8) < 5 * np.sqrt(64 * 2.0**-22 / 128)
