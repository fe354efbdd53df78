"""Steps of every method: losses, keys, optimizers, refreshes, accumulation, evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from actjax.optim.stepping import in_place, tails
from tests.train.steps import CONFIG, batch, first_state, programs, recipe, with_method
from train.run.loss import loss_function
from train.run.optimizer import learning_rate_schedule
from train.run.step import make_eval_step, make_train_step, step_key
from train.settings.config import FinetuneConfig, OptimizerConfig

EIGHT_BIT = dataclasses.replace(CONFIG.optimizer, moment_dtype="8bit")
FREE = dataclasses.replace(CONFIG.optimizer, clip=float("inf"))
"""Without clipping, since the first update in the backward pass is not clipped."""
WHOLE, INSIDE = (with_method("exact", in_backward=x, optimizer=FREE) for x in (False, True))
LOW_RANK = with_method("low_rank", accumulate=2)
"""The factors of its micro-batches are concatenated."""


def assert_equal_weights(got, want, learning_rate: float) -> None:
    # Adam divides by the size of the gradient, so errors are relative to the learning rate.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * learning_rate)


@pytest.mark.parametrize(
    "config",
    [
        WHOLE,
        LOW_RANK,
        with_method("exact", in_backward=True, optimizer=EIGHT_BIT),
        with_method("remat", in_backward=True),
        with_method("exact", weight_dtype="bfloat16"),
        *(
            pytest.param(config, marks=pytest.mark.slow)
            for config in (
                with_method("low_rank"),
                with_method("subspace"),
                with_method("galore"),
                with_method("random_projection"),
                with_method("subspace", in_backward=True),
                with_method("random_projection", weight_dtype="bfloat16"),
            )
        ),
    ],
    ids=lambda c: (
        f"{c.method}{' in backward' if c.in_backward else ''}"
        f"{f', {c.weight_dtype}' if c.weight_dtype != 'float32' else ''}"
    ),
)
def test_every_method_learns_and_is_deterministic(config):
    state, losses = programs(config).after(5)
    assert losses[-1] < losses[0]
    assert int(state.step) == 5
    jax.tree.map(np.testing.assert_array_equal, programs(config).after(5)[0], state)


def test_keys_differ_from_step_to_step():
    run = programs(LOW_RANK)
    later = dataclasses.replace(run.state, step=run.state.step + 1)
    (_, first), (_, second) = run.step(run.state, batch()), run.step(later, batch())
    assert first["loss"] == second["loss"]
    assert first["grad_norm"] != second["grad_norm"]


def test_a_step_is_that_of_optax_with_clipping():
    # Below the norm of every gradient here. Adam's second step depends on the clipping.
    settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, clip=0.05)
    run = programs(dataclasses.replace(CONFIG, optimizer=settings))
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
    loss, data = loss_function(run.recipe.config, run.recipe.storage), batch()

    @jax.jit
    def reference(model):
        def step(carry, i):
            model, moments = carry
            grads = jax.grad(loss)(model, data, step_key(run.recipe.config, i))
            updates, moments = tx.update(grads, moments, model)
            return (optax.apply_updates(model, updates), moments), optax.tree.norm(grads)

        (model, _), norms = jax.lax.scan(step, (model, tx.init(model)), jnp.arange(3))
        return model, norms

    model, norms = reference(run.state.model)
    assert np.all(norms > settings.clip)
    assert_equal_weights(run.after(3)[0].model, model, settings.learning_rate)


def test_an_in_backward_update_equals_an_ordinary_one():
    (ordinary, losses), (inside, inside_losses) = (programs(x).after(4) for x in (WHOLE, INSIDE))
    np.testing.assert_allclose(inside_losses, losses, rtol=1e-5)
    assert_equal_weights(inside.model, ordinary.model, FREE.learning_rate)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (WHOLE, 2),
        (INSIDE, 2),
        pytest.param(with_method("subspace"), 4, marks=pytest.mark.slow),
    ],
    ids=["exact", "exact in backward", "subspace"],
)
def test_accumulation_gives_the_gradient_of_the_whole_batch(config, count):
    # Also in a subspace, whose basis is the same in all micro-batches. Except for refresh steps,
    # which take the basis from the factors of each micro-batch.
    whole, parts = programs(config), programs(dataclasses.replace(config, accumulate=count))
    state, _ = whole.after(1)
    (whole_state, want), (part_state, got) = (run.step(state, batch()) for run in (whole, parts))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
    assert_equal_weights(part_state.model, whole_state.model, CONFIG.optimizer.learning_rate)


def test_the_two_rows_of_a_pair_are_in_one_micro_batch():
    # Log-probabilities before training that differ from pair to pair: so do the losses.
    reference = np.zeros((4, 16), np.float32)
    reference[:, 0] = [-80, -20, -10, -60]
    rows = batch() | {"reference": reference, "segments": np.ones((4, 16), np.int32)}
    pairs = FinetuneConfig(
        checkpoint="none",
        loss="dpo",
        **{name: getattr(CONFIG, name) for name in ("method", "batch_size", "seq_len")},
    )
    losses = []
    for count in (1, 2):
        one = recipe(dataclasses.replace(pairs, accumulate=count))
        _, metrics = jax.jit(make_train_step(one))(programs().state, rows)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_refreshes_are_due_at_the_gap():
    subspace = with_method("subspace")
    options = dataclasses.replace(subspace.options, gap=6)
    one = recipe(dataclasses.replace(subspace, options=options))
    assert [i for i in range(14) if one.refreshes(i)] == [0, 6, 12]
    assert not recipe().refreshes(0)


def test_evaluation_sums_over_the_tokens_that_count():
    model = programs(WHOLE).state.model
    run = with_method("exact", z_loss=1.0)
    whole, parts = (
        jax.jit(make_eval_step(recipe(dataclasses.replace(run, accumulate=count))))
        for count in (1, 2)
    )
    alone = jax.jit(jax.vmap(make_eval_step(recipe()), (None, 0)))
    rows = {name: x[:, None] for name, x in batch().items()}
    want = alone(model, rows)["nats"].sum()
    for evaluate in (whole, parts):
        np.testing.assert_allclose(evaluate(model, batch())["nats"], want, rtol=1e-5)


IN_PLACE = {
    "exact": {"weight_dtype": "bfloat16"},
    "lean": {"in_backward": True, "weight_dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "method",
    ["exact", "lean", *(pytest.param(m, marks=pytest.mark.slow) for m in ("low_rank", "galore"))],
)
def test_loops_that_write_in_place_take_the_same_steps(monkeypatch, method):
    made, taken = recipe(with_method(method, **IN_PLACE.get(method, {}))), []
    monkeypatch.setattr(tails, "_LEAST", 1)
    for wanted in (False, True):
        monkeypatch.setattr(in_place, "applies", lambda *_, wanted=wanted: wanted)
        state, step = first_state(made), jax.jit(make_train_step(made))
        metrics = []
        for _ in range(3):
            state, values = step(state, batch())
            metrics.append([values[name] for name in ("loss", "grad_norm", "update_norm")])
        taken.append((metrics, state.model))
    (metrics, model), (other_metrics, other) = taken
    np.testing.assert_allclose(metrics, other_metrics, rtol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (model, other)), strict=True):
        # Weights in 16 bits are rounded by the same random numbers: few to their other neighbor.
        atol = 2e-2 * made.config.optimizer.learning_rate
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        rtol = 2.0**-7 * (made.config.weight_dtype == "bfloat16")
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
