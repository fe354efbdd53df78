"""Steps in float16: the rule of the loss scale, skipped steps, and the loss of a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG as MODEL

from tests.train.steps import batch, first_state, recipe, with_method
from train.run import loss_scale
from train.run.loss import Context
from train.run.loss_scale import LossScale
from train.run.recipe import Recipe, make_recipe
from train.run.step import gradient_function, make_train_step
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig
from train.settings.resolve import resolve

EPS = 2.0**-11
"""Relative error of a number that is rounded to float16."""
TOO_LARGE = 2.0**28
"""A scale with which gradients of the tiny model overflow for some steps."""


@jax.jit
def after(scale: LossScale, are_finite: jax.Array):
    return jax.lax.scan(lambda s, x: (s.after(x), s.after(x)), scale, are_finite)


def test_the_scale_is_halved_by_a_skipped_step_and_doubled_after_2000_others():
    are_finite = np.ones(4005, bool)
    are_finite[[0, 1, 5]] = False
    last, all_of_them = after(LossScale.first(), are_finite)
    values = np.asarray(all_of_them.value)
    assert values[[0, 1, 4, 5]].tolist() == [2.0**15, 2.0**14, 2.0**14, 2.0**13]
    # Step 5 is skipped, and step 2005 is the 2000th after it.
    (changed,) = np.nonzero(np.diff(values[5:]))
    assert (changed + 6).tolist() == [2005]
    assert values[2005] == 2.0**14
    assert int(last.skipped) == 3
    assert np.asarray(all_of_them.in_a_row)[:7].tolist() == [1, 2, 0, 0, 0, 1, 0]


def test_the_scale_has_a_largest_value():
    largest = dataclasses.replace(LossScale.first(), value=jnp.float32(loss_scale.LARGEST))
    assert after(largest, np.ones(2000, bool))[0].value == loss_scale.LARGEST


def finetuning(dtype: str) -> Recipe:
    config = FinetuneConfig(
        checkpoint="x", method="lora", batch_size=4, seq_len=16, compute_dtype=dtype, steps=10,
        adapter=AdapterConfig(lora_rank=2),
        # Ten times as large, the gradient jumps tenfold from step to step, and where it overflows
        # depends on how the compiler of a processor rounds.
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=1, weight_decay=0.0),
    )  # fmt: skip
    return make_recipe(config, MODEL)


def pretraining(method: str, dtype: str, **changes) -> Recipe:
    return recipe(with_method(method, compute_dtype=dtype, in_backward=False, **changes))


def trained(one: Recipe, steps: int, scale: float | None = None):
    """Returns the first state, the state after some steps, and their metrics."""
    data, step = batch(), make_train_step(one)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, _: step(state, data), state, None, length=steps)

    state = first_state(one)
    if scale is not None:
        large = dataclasses.replace(state.loss_scale, value=jnp.float32(scale))
        state = dataclasses.replace(state, loss_scale=large)
    return state, *run(state)


@pytest.mark.parametrize(
    ("make", "rtol"),
    [
        pytest.param(
            functools.partial(pretraining, "exact", accumulate=2), 0.015, marks=pytest.mark.slow
        ),
        (finetuning, EPS),
        # Its codes have the keys of later steps.
        pytest.param(functools.partial(pretraining, "lean"), 0.05, marks=pytest.mark.slow),
    ],
    ids=["exact", "lora", "lean"],
)
def test_a_run_in_float16_skips_until_the_scale_fits_and_learns_as_in_float32(make, rtol):
    _, want_state, want = trained(make("float32"), 60)
    _, state, got = trained(make("float16"), 60, TOO_LARGE)
    skipped = np.diff(np.asarray(got["skipped"]), prepend=0) > 0
    assert skipped[0]
    assert not skipped[-40:].any()
    assert np.all(np.asarray(got["update_norm"])[skipped] == 0)
    losses = np.asarray(got["loss"])[~skipped]
    np.testing.assert_allclose(losses, np.asarray(want["loss"])[: len(losses)], rtol=rtol)
    assert losses[-1] < losses[0]
    assert int(state.step) == int(want_state.step) == 60


def test_a_skipped_step_changes_nothing_but_the_step_and_the_scale():
    one = pretraining("exact", "float16")
    before, state, metrics = trained(one, 1, 2.0**100)
    jax.tree.map(np.testing.assert_array_equal, state.model, before.model)
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, before.optimizer)
    assert (int(state.step), state.loss_scale.value, metrics["skipped"][0]) == (1, 2.0**99, 1)


def test_other_dtypes_have_the_state_that_they_had():
    one = pretraining("exact", "bfloat16")
    assert jax.eval_shape(lambda: first_state(one)).loss_scale is None
    assert "loss_scale" not in one.optimizer_form
    assert pretraining("exact", "float16").optimizer_form["loss_scale"]


def test_a_gradient_in_float16_is_that_of_float32_within_the_rounding():
    # The scale keeps the smallest gradients of activations out of the subnormal numbers.
    def gradient(dtype: str, scale: float):
        one, key = pretraining("exact", dtype), jax.random.key(0)
        state = first_state(one)
        run = jax.jit(gradient_function(one, state, refresh=False))
        return run(state.model, batch(), key, Context(loss_scale=jnp.float32(scale)))

    scale = 2.0**12
    loss, grads = gradient("float16", scale)
    want_loss, want = gradient("float32", 1.0)
    # An array of the network is the result of a few roundings for each of the operators before it.
    depth = 12 * MODEL.num_layers
    np.testing.assert_allclose(loss / scale, want_loss, rtol=EPS * depth**0.5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.asarray(a) / scale - b) / np.linalg.norm(b)
        assert error < 2 * EPS * depth**0.5


def test_a_skipped_refresh_is_made_up_for():
    one = recipe(with_method("subspace", compute_dtype="float16"))
    assert [one.refreshes(done, skipped) for done, skipped in ((1, 0), (1, 1), (3, 2), (4, 0))] == [
        *(False, True, True, True)
    ]
    # Random bases read no gradient.
    assert not recipe(with_method("random_projection", compute_dtype="float16")).refreshes(1, 1)


def test_updates_in_the_backward_pass_are_refused_and_not_the_default():
    lean = with_method("lean", compute_dtype="float16")
    assert not resolve(lean, MODEL).in_backward
    with pytest.raises(ValueError, match="`--in-backward` updates layers before the whole gradie"):
        resolve(dataclasses.replace(lean, in_backward=True), MODEL)
