"""Steps: losses, keys, optimizers, refreshes, evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.train.steps import (
    CONFIG,
    LOSSY,
    after,
    batch,
    first_state,
    recipe,
)
from train.run.loss import loss_function
from train.run.optimizer import learning_rate_schedule
from train.run.step import make_eval_step, make_train_step, step_key
from train.settings.config import OptimizerConfig
from train.settings.options import MethodOptions


def test_a_step_lowers_the_loss_and_counts():
    state, losses = after(recipe(), steps=6)
    assert losses[-1] < losses[0]
    assert int(state.step) == 6


def test_the_same_run_gives_the_same_bits():
    one, other = after(recipe(storage=LOSSY))[0], after(recipe(storage=LOSSY))[0]
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_keys_differ_from_step_to_step_and_from_seed_to_seed():
    # With a learning rate of zero only the keys change.
    still = dataclasses.replace(
        CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=0.0, warmup_steps=1)
    )
    one = recipe(still, LOSSY)
    step = jax.jit(make_train_step(one))
    state, first = step(first_state(one), batch())
    _, second = step(state, batch())
    assert first["loss"] == second["loss"]
    assert first["grad_norm"] != second["grad_norm"]


def test_a_step_is_that_of_optax_with_clipping():
    # Below the norm of every gradient here. Adam's second step depends on the clipping.
    settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, clip=0.05)
    one = recipe(dataclasses.replace(CONFIG, optimizer=settings))
    state, _ = after(one, 3)
    tx = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            learning_rate_schedule(settings, CONFIG.steps),
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=lambda m: jax.tree_util.tree_map_with_path(
                lambda path, _: "norm" not in jax.tree_util.keystr(path), m
            ),
        ),
    )
    loss, data = loss_function(one.config, one.storage), batch()

    @jax.jit
    def reference(model):
        moments, norms = tx.init(model), []
        for i in range(3):
            grads = jax.grad(loss)(model, data, step_key(one.config, jnp.int32(i)))
            norms.append(optax.tree.norm(grads))
            updates, moments = tx.update(grads, moments, model)
            model = optax.apply_updates(model, updates)
        return model, jnp.stack(norms)

    model, norms = reference(first_state(one).model)
    assert np.all(norms > settings.clip)
    # Adam divides by the size of the gradient, so errors are relative to the learning rate.
    for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * settings.learning_rate)


def test_refreshes_are_due_at_the_gap():
    config = dataclasses.replace(CONFIG, method="subspace", options=MethodOptions(rank=4, gap=6))
    one = recipe(config)
    assert [i for i in range(14) if one.refreshes(i)] == [0, 6, 12]
    assert not recipe().refreshes(0)


def test_evaluation_sums_over_the_tokens_that_count():
    state = first_state(recipe())
    data = batch()
    total = make_eval_step(recipe(dataclasses.replace(CONFIG, z_loss=1.0)))(state.model, data)
    alone = [
        make_eval_step(recipe())(state.model, {k: v[i : i + 1] for k, v in data.items()})
        for i in range(4)
    ]
    np.testing.assert_allclose(total, sum(alone), rtol=1e-5)
