"""Runs of the training step on a tiny model."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets

from train.run.recipe import Recipe, make_recipe
from train.run.step import init_state, make_refresh_step, make_train_step
from train.settings.config import FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions, used_options

CONFIG = PretrainConfig(
    method="exact",
    batch_size=4,
    seq_len=16,
    weight_dtype="float32",
    compute_dtype="float32",
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
    steps=10,
)
OPTIONS = MethodOptions(rank=4, gap=2)


@functools.cache
def batch():
    tokens, targets = map(np.asarray, tokens_and_targets(rows=4, length=16))
    # The rows have different numbers of counted tokens.
    mask = (np.arange(16) < np.array([16, 3, 9, 1])[:, None]).astype(np.float32)
    return {"inputs": tokens, "targets": targets, "mask": mask}


def with_method(method: str, **changes) -> PretrainConfig:
    options = used_options(method, OPTIONS)
    return dataclasses.replace(CONFIG, method=method, options=options, **changes)


def recipe(config: PretrainConfig | FinetuneConfig = CONFIG) -> Recipe:
    return make_recipe(config, MODEL)


def first_state(one: Recipe):
    """Returns the state before the first step, made by one program."""
    return jax.jit(functools.partial(init_state, one))()


class Programs(NamedTuple):
    """The first state of a run, and its steps, which JAX traces once."""

    recipe: Recipe
    state: Any
    step: Any
    refresh: Any

    def after(self, steps: int):
        """Returns the state after some steps, and their losses."""
        state, losses = self.state, []
        for i in range(steps):
            take = self.refresh if self.recipe.refreshes(i) else self.step
            state, metrics = take(state, batch())
            losses.append(float(metrics["loss"]))
        return state, losses


@functools.cache
def programs(config: PretrainConfig = CONFIG) -> Programs:
    made = recipe(config)
    step, refresh = jax.jit(make_train_step(made)), jax.jit(make_refresh_step(made))
    return Programs(made, first_state(made), step, refresh)
