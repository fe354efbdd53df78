"""Optimizers that round bfloat16 weights: values, random numbers, and where they work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxprs import nbytes
from optim.rounded import (
    ADAMW,
    GRADIENTS,
    assert_same_bits,
    loop,
    parameters,
    widened,
)

from actjax import optim

# Values.


def test_stochastic_rounding_is_unbiased_over_keys():
    tx, count = optim.stochastic_rounding(optax.sgd(1.0)), 2000
    rng = np.random.default_rng(0)
    weights = rng.normal(size=64).astype("bfloat16")
    # From a thousandth of the spacing to several spacings.
    grads = np.float32(rng.normal(size=64) * 10 ** rng.uniform(-5, -1, 64))

    @jax.jit
    @jax.vmap
    def new(key):
        state = tx.init(weights)._replace(key=jax.random.key_data(key))
        return tx.rounding.apply(grads, state, weights)[0]

    samples = np.asarray(new(jax.random.split(jax.random.key(0), count)), np.float64)
    exact = np.asarray(weights, np.float64) - np.asarray(grads, np.float64)
    spacing = np.exp2(np.frexp(np.abs(exact))[1] - 8)
    share = np.abs(exact) / spacing % 1
    # The mean of a few rare events is not normally distributed.
    standard_error = spacing * np.sqrt(np.maximum(share * (1 - share), 0.01) / count)
    assert np.all(np.abs(samples.mean(0) - exact) <= 5 * standard_error)
    np.testing.assert_array_equal(np.unique(np.abs(samples - exact) > spacing), False)


def test_small_updates_add_up_where_nearest_loses_them():
    # 4,096 updates of 2^-14 of the weight: rounded to nearest, none changes it.
    weights, update = np.ones(256, "bfloat16"), np.full(256, 2.0**-14, "float32")
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
    layer = np.ones((16, 64), "bfloat16")
    params = {"layers": {"a": np.stack([layer] * 3), "b": np.stack([layer] * 3)}, "head": layer}
    grads = jax.tree.map(lambda x: np.full(x.shape, 2.0**-9, "float32"), params)

    @jax.jit
    def run(params, grads):
        outcomes = []
        for seed in (0, 1, 0):
            tx = optim.stochastic_rounding(optax.sgd(1.0), seed=seed)
            new, state = optim.apply(tx, grads, optim.init(tx, params), params)
            outcomes.append(new)
        # The same weights again, at the next step.
        return optim.apply(tx, grads, state, params)[0], *outcomes

    *trees, again = run(params, grads)
    samples = [
        np.asarray(x).reshape(-1, layer.size) for tree in trees for x in jax.tree.leaves(tree)
    ]
    patterns = np.concatenate(samples) != 1
    assert len(patterns) == 3 * 7
    agreement = np.mean(patterns[:, None] == patterns[None], axis=-1)
    # Updates of half a spacing: independent patterns agree in a half of the 1,024 places.
    np.fill_diagonal(agreement, 0.5)
    assert np.abs(agreement - 0.5).max() < 5 * 0.5 / np.sqrt(layer.size)
    assert_same_bits(again, trees[1])


# Ways to apply it.


def test_an_in_backward_step_gives_the_same_bits_as_apply():
    # The gradient of every weight is a sign, exactly, however it is computed.
    rng = np.random.default_rng(0)
    layers, head = (rng.normal(size=s).astype("bfloat16") for s in ((3, 256), 256))
    params = {"layers": layers, "head": head}
    signs = rng.choice([-1.0, 1.0], 256).astype("bfloat16")
    tx = optim.stochastic_rounding(optax.adam(1e-4))
    update = optim.in_backward(
        lambda p, x: x,
        lambda p, x, inputs, own: x + p,
        lambda p, x, inputs: jnp.sum(((x + p["head"]) * signs).astype(jnp.float32)),
        tx,
    )

    @jax.jit
    def run(params):
        grads = jax.tree.map(lambda w: jnp.broadcast_to(signs, w.shape), params)
        inside = update.step(params, update.init(params), jnp.zeros(256, jnp.bfloat16))
        return inside[:2], optim.apply(tx, grads, optim.init(tx, params), params)

    (ours, ours_state), (theirs, theirs_state) = run(params)
    assert_same_bits((ours, ours_state.optimizer), (theirs, theirs_state))
    assert np.mean(np.asarray(ours["head"]) != np.asarray(params["head"])) > 0.01


def test_it_is_the_last_part_of_a_chain_and_takes_other_transforms_inside():
    params = parameters()
    mask = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
    for inner in (
        optax.chain(optim.scale_by_adam_8bit(min_size=8), optax.scale(-1e-3)),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.masked(ADAMW, mask),
        optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    ):
        tx = optim.stochastic_rounding(inner)
        state = jax.eval_shape(tx.init, params)
        assert jax.eval_shape(tx.update, GRADIENTS[0], state, params)[1] == state
        new, *_ = jax.eval_shape(tx.rounding.apply, GRADIENTS[0], state, params)
        assert new == jax.eval_shape(lambda: params)
    clipped = optax.chain(optax.clip(0.01), optim.stochastic_rounding(ADAMW))
    new, _ = loop(clipped, params)
    moved = np.asarray(new["head"], np.float64) - np.asarray(params["head"], np.float64)
    assert np.mean(moved != 0) > 0.1


# Subspaces.

SUBSPACE = optim.subspace(
    optax.scale_by_adam(), 4, outer=optax.scale_by_learning_rate(0.1), gap=2,
    groups={"layers.w": "layers.w"},
)  # fmt: skip


def test_a_subspace_inside_is_refreshed_and_gives_its_bases():
    tx = optim.stochastic_rounding(SUBSPACE)
    assert isinstance(tx, optim.SubspaceTransformation)
    assert (tx.gap, tx.source) == (2, "gradient")
    params = parameters()

    @jax.jit
    def trained(params, gradients):
        results = []
        for inner in (tx, SUBSPACE):
            new, state = params, optim.init(inner, params)
            for i, grads in enumerate(gradients):
                new, state = optim.apply(inner, grads, state, new, refresh=i == 0)
            results.append((new, state))
        # As a plain transform, it refreshes itself.
        first = tx.init(params)
        plain = tx.refresh(grads, first, params), tx.update(grads, first, params)[1]
        return *results, [tx.bases(state).arrays for state in plain]

    (ours, state), (theirs, want), plain = trained(params, GRADIENTS[:2])
    # Bases depend on gradients alone; the plain subspace rounds to nearest.
    assert_same_bits(tx.bases(state).arrays, SUBSPACE.bases(want).arrays)
    got, nearest = (np.asarray(p["layers"]["w"], np.float64) for p in (ours, theirs))
    np.testing.assert_allclose(got, nearest, atol=1e-3, rtol=3 * 2**-7)
    assert_same_bits(*plain)


def test_a_random_subspace_inside_is_redrawn():
    tx = optim.stochastic_rounding(optim.subspace(optax.scale_by_adam(), 4, source="random"))
    params = {"layers": parameters()["layers"]}

    @jax.jit
    def drawn(params):
        state = optim.init(tx, params)
        return [tx.bases(s).arrays for s in (state, optim.redraw(tx, state, params))]

    old, new = (np.asarray(x, np.float32) for arrays in drawn(params) for x in arrays.values())
    assert np.all(np.any(old != new, axis=(1, 2)))


# States.


def test_the_state_has_twelve_bytes_for_each_layer():
    params, tx = parameters(), optim.stochastic_rounding(optax.sgd(1.0))
    assert nbytes(jax.eval_shape(tx.init, params)) == 12
    assert nbytes(jax.eval_shape(lambda p: optim.init(tx, p), params)) == 4 * 12
