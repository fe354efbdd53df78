"""Runs of the training step on a tiny model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets

from actjax import RandomizedSVD
from models import Storage
from train.run.recipe import Recipe, make_recipe
from train.run.step import init_state, make_refresh_step, make_train_step
from train.settings.config import PretrainConfig
from train.settings.options import MethodOptions, used_options

CONFIG = PretrainConfig(
    method="exact",
    batch_size=4,
    seq_len=16,
    weight_dtype="float32",
    compute_dtype="float32",
    steps=10,
)
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
        state, metrics = (refresh if one.refreshes(i) else step)(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def with_method(method: str, **changes) -> PretrainConfig:
    options = used_options(method, OPTIONS)
    return dataclasses.replace(CONFIG, method=method, options=options, **changes)
