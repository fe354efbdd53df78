"""Steps: losses, keys, optimizers, refreshes, accumulation, sharding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets

from actjax import RandomizedSVD
from models import Storage
from train.config import OptimizerConfig, PretrainConfig
from train.optimizer import learning_rate_schedule
from train.options import MethodOptions, used_options
from train.sharding import batch_sharding, make_mesh, state_shardings
from train.step import (
    Recipe,
    init_state,
    loss_function,
    make_eval_step,
    make_recipe,
    make_refresh_step,
    make_train_step,
    step_key,
)

CONFIG = PretrainConfig(batch_size=4, seq_len=16, compute_dtype="float32", steps=10)
LOSSY = Storage(mlp_in=RandomizedSVD(4))
OPTIONS = MethodOptions(rank=4, gap=2)


@functools.cache
def batch():
    tokens, targets = tokens_and_targets(rows=4, length=16)
    # The rows have different numbers of counted tokens.
    mask = (jnp.arange(16) < jnp.array([16, 3, 9, 1])[:, None]).astype(jnp.float32)
    return {"inputs": tokens, "targets": targets, "mask": mask}


def recipe(config: PretrainConfig = CONFIG, storage: Storage | None = None) -> Recipe:
    made = make_recipe(config, MODEL)
    return made if storage is None else dataclasses.replace(made, storage=storage)


def first_state(one: Recipe):
    """Returns the state before the first step, made by one program."""
    return jax.jit(functools.partial(init_state, one))()


def compiled(one: Recipe):
    """Returns the compiled step and refresh step."""
    return jax.jit(make_train_step(one)), jax.jit(make_refresh_step(one))


def after(one: Recipe, steps: int = 3, programs=None):
    """Returns the state after some steps of a run, and their losses."""
    step, refresh = programs or compiled(one)
    state, losses = first_state(one), []
    for i in range(steps):
        due = one.due_layers(i)
        state, metrics = step(state, batch()) if due is None else refresh(state, batch(), due)
        losses.append(float(metrics["loss"]))
    return state, losses


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


def test_refreshes_are_due_at_the_gap_together_or_staggered():
    config = dataclasses.replace(CONFIG, method="subspace", options=MethodOptions(rank=4, gap=6))
    due = [recipe(config).due_layers(i) for i in range(8)]
    assert [None if d is None else d.tolist() for d in due] == [
        [True] * 3, None, None, None, None, None, [True] * 3, None
    ]  # fmt: skip
    options = dataclasses.replace(config.options, stagger=True)
    staggered = recipe(dataclasses.replace(config, options=options))
    due = [staggered.due_layers(i) for i in range(7)]
    assert [None if d is None else d.nonzero()[0].tolist() for d in due] == [
        [0, 1, 2], None, [1], None, [2], None, [0]
    ]  # fmt: skip
    assert recipe().due_layers(0) is None


def with_method(method: str, **changes) -> PretrainConfig:
    options = used_options(method, OPTIONS)
    return dataclasses.replace(CONFIG, method=method, options=options, **changes)


EIGHT_BIT = OptimizerConfig(moment_dtype="8bit")


@pytest.mark.parametrize(
    "config",
    [
        with_method("low_rank"),
        with_method("subspace"),
        with_method("galore"),
        with_method("random_projection"),
        with_method("subspace", in_backward=True),
        with_method("exact", in_backward=True, optimizer=EIGHT_BIT),
        with_method("remat", in_backward=True),
    ],
    ids=lambda c: f"{c.method}{' in backward' if c.in_backward else ''}",
)
def test_every_method_learns_and_is_deterministic(config):
    fast = dataclasses.replace(config.optimizer, learning_rate=2e-2, warmup_steps=1)
    one = recipe(dataclasses.replace(config, optimizer=fast))
    programs = compiled(one)
    state, losses = after(one, 5, programs)
    assert losses[-1] < losses[0]
    again, _ = after(one, 5, programs)
    jax.tree.map(np.testing.assert_array_equal, state, again)


def test_an_in_backward_update_equals_an_ordinary_one():
    # The first in-backward step is not clipped, so the ordinary one is not either.
    free = OptimizerConfig(clip=float("inf"))
    ordinary, losses = after(recipe(dataclasses.replace(CONFIG, optimizer=free)), 4)
    config = dataclasses.replace(CONFIG, optimizer=free, in_backward=True)
    inside, inside_losses = after(recipe(config), 4)
    np.testing.assert_allclose(inside_losses, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(inside.model), jax.tree.leaves(ordinary.model), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * CONFIG.optimizer.learning_rate)


@pytest.mark.parametrize(("method", "count"), [("exact", 2), ("subspace", 4)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(method, count):
    # Also in a subspace, whose basis is the same in all micro-batches. Except for refresh steps,
    # which take the basis from the factors of each micro-batch.
    config = with_method(method)
    one, parts = recipe(config), recipe(dataclasses.replace(config, accumulate=count))
    programs = compiled(one)
    state, data = after(one, 1, programs)[0], batch()
    whole_state, whole = programs[0](state, data)
    part_state, part = jax.jit(make_train_step(parts))(state, data)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(part[name], whole[name], rtol=1e-5)
    # Adam divides by the size of the gradient, so errors are relative to the learning rate.
    for a, b in zip(
        jax.tree.leaves(part_state.model), jax.tree.leaves(whole_state.model), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-2 * CONFIG.optimizer.learning_rate)


def test_factors_of_micro_batches_are_concatenated():
    _, losses = after(recipe(with_method("low_rank", accumulate=2)))
    assert losses[-1] < losses[0]


def test_evaluation_sums_over_the_tokens_that_count():
    state = first_state(recipe())
    data = batch()
    total = make_eval_step(recipe(dataclasses.replace(CONFIG, z_loss=1.0)))(state.model, data)
    alone = [
        make_eval_step(recipe())(state.model, {k: v[i : i + 1] for k, v in data.items()})
        for i in range(4)
    ]
    np.testing.assert_allclose(total, sum(alone), rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        with_method("subspace"),
        with_method("subspace", in_backward=True, optimizer=EIGHT_BIT),
    ],
    ids=["subspace", "in backward"],
)
def test_four_devices_give_the_loss_of_one(config):
    one, mesh = recipe(config), make_mesh("fsdp=4")
    state = first_state(one)
    shardings = state_shardings(state, mesh)
    sharded = jax.device_put(state, shardings)
    data = jax.device_put(batch(), batch_sharding(mesh))
    losses = []
    with jax.set_mesh(mesh):
        jit = functools.partial(jax.jit, out_shardings=(shardings, None))
        step, refresh = jit(make_train_step(one)), jit(make_refresh_step(one))
        for i in range(3):
            due = one.due_layers(i)
            sharded, metrics = step(sharded, data) if due is None else refresh(sharded, data, due)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, after(one)[1], rtol=1e-5)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), sharded, shardings)
    assert all(jax.tree.leaves(same))
