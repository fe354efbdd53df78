"""Steps of every method: determinism, in-backward updates, accumulation, sharding."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.train.steps import (
    CONFIG,
    after,
    batch,
    compiled,
    recipe,
    with_method,
)
from train.run.step import (
    make_train_step,
)
from train.settings.config import OptimizerConfig

EIGHT_BIT = OptimizerConfig(moment_dtype="8bit")


@pytest.mark.parametrize(
    "config",
    [
        with_method("low_rank"),
        pytest.param(with_method("subspace"), marks=pytest.mark.slow),
        pytest.param(with_method("galore"), marks=pytest.mark.slow),
        pytest.param(with_method("random_projection"), marks=pytest.mark.slow),
        pytest.param(with_method("subspace", in_backward=True), marks=pytest.mark.slow),
        with_method("exact", in_backward=True, optimizer=EIGHT_BIT),
        with_method("remat", in_backward=True),
        with_method("exact", weight_dtype="bfloat16"),
        pytest.param(
            with_method("random_projection", weight_dtype="bfloat16"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda c: (
        f"{c.method}{' in backward' if c.in_backward else ''}"
        f"{f', {c.weight_dtype}' if c.weight_dtype != 'float32' else ''}"
    ),
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


@pytest.mark.parametrize(
    ("method", "count", "in_backward"),
    [
        ("exact", 2, False),
        ("exact", 2, True),
        pytest.param("subspace", 4, False, marks=pytest.mark.slow),
    ],
)
def test_accumulation_gives_the_gradient_of_the_whole_batch(method, count, in_backward):
    # Also in a subspace, whose basis is the same in all micro-batches. Except for refresh steps,
    # which take the basis from the factors of each micro-batch.
    config = with_method(method, in_backward=in_backward)
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
