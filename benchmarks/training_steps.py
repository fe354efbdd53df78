"""Whole training steps to compare: plain JAX, optax and every method."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import actjax
from actjax.optim.layers import layers_of, merge, split
from benchmarks import plain_jax
from benchmarks.plain_jax import PlainJax
from benchmarks.variants import VARIANTS, Variant
from models import Decoder
from models.config import ModelConfig
from train.run.loss import Batch, batch_shapes
from train.run.optimizer import full_space_updates, make_optimizer, store_states_as
from train.run.recipe import make_recipe
from train.run.report import StepMemory, explain_step, step_memory, tree_bytes
from train.run.sharding import make_mesh
from train.run.state import first_state, shardings_of_run
from train.run.step import (
    TrainState,
    gradient_function,
    init_state,
    make_refresh_step,
    make_train_step,
    step_key,
)
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.resolve import ResolvedConfig, dimensions, resolve


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step to compare. Rows of results name it under `rival`, as the committed ones."""

    init: Callable[[], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    """From state and batch to state and metrics; `loss` is one of the metrics."""
    gradient: Callable[[TrainState, Batch], Any] | None
    """From state and batch to loss and gradient; None if there is no separate gradient."""
    memory: Callable[[], StepMemory]
    """Returns the part of the step's memory that is known before compilation."""
    refresh: Callable[[TrainState, Batch], Any] | None = None
    on_host: Callable[[], tuple[TrainState, Callable[[], TrainState]]] | None = None
    """Returns the shardings of the state, and a function that draws it there; None if all of it is
    on the device."""


PLAIN_JAX = {
    "plain": PlainJax(),
    "plain, naive loss and attention": PlainJax(naive=True),
    "jax.checkpoint, dots": PlainJax("dots"),
    "jax.checkpoint, dots_saveable": PlainJax("dots_saveable"),
    "jax.checkpoint, q, k, v, gate and up": PlainJax("names"),
    "jax.checkpoint, full": PlainJax("full"),
    "jax.checkpoint, dots offloaded": PlainJax("offload_dots"),
    "jax.checkpoint, full, inputs offloaded": PlainJax("offload_inputs"),
}
OPTAX_GALORE = {"optax.contrib.galore d/4": 4, "optax.contrib.galore d/16": 16}
"""By name, the width divided by the rank."""
STEPS = (*PLAIN_JAX, *OPTAX_GALORE, *VARIANTS)
"""Names of all steps: baselines and methods. Ratios are to `plain`."""
ON_DEVICE = tuple(
    name for name in STEPS if name not in VARIANTS or not VARIANTS[name].optimizer.offload_states
)
"""Steps whose state is where `TrainingStep.init` returns it. The others need `on_host`."""


def training_step(
    name: str, config: PretrainConfig, model_config: ModelConfig | None = None
) -> TrainingStep:
    """Returns a step."""
    model_config = model_config or dimensions(config)
    if name in VARIANTS:
        return method_step(VARIANTS[name], config, model_config)
    settings = resolve(dataclasses.replace(config, method="exact"), model_config)
    transform = make_optimizer(settings.optimizer, settings.steps)
    if name in OPTAX_GALORE:
        rank = model_config.hidden_size // OPTAX_GALORE[name]
        transform = _optax_galore(settings, rank, transform)
    form = PLAIN_JAX.get(name, PLAIN_JAX["plain"])
    return _baseline_step(form, settings, model_config, transform)


def method_step(
    variant: Variant, config: PretrainConfig | FinetuneConfig, model_config: ModelConfig
) -> TrainingStep:
    """Returns a method as the programs of `train` run it."""
    recipe = make_recipe(variant.configure(config), model_config)
    init = functools.partial(init_state, recipe)

    def gradient(state: TrainState, batch: Batch) -> Any:
        loss_and_grad = gradient_function(recipe, state, refresh=False)
        return loss_and_grad(state.model, batch, step_key(recipe.config, state.step), state.context)

    def memory() -> StepMemory:
        shapes = jax.eval_shape(init)
        return step_memory(recipe, shapes, explain_step(recipe, shapes))

    def on_host() -> tuple[TrainState, Callable[[], TrainState]]:
        shardings = shardings_of_run(recipe, jax.eval_shape(init), make_mesh(""))
        return shardings, functools.partial(first_state, recipe, shardings)

    return TrainingStep(
        init,
        make_train_step(recipe),
        None if recipe.config.in_backward else gradient,
        memory,
        make_refresh_step(recipe) if recipe.refreshes(0) else None,
        on_host if recipe.config.optimizer.offload_states else None,
    )


def plain_step(
    form: PlainJax,
    compute_dtype: str,
    tx: Any,
    model_of: Callable[[TrainState, Any], Decoder] = lambda state, trained: trained,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the gradient and the step that a user would write: all weights, one optax update.

    `model_of` returns the model of a state and of the weights that are trained.
    """
    loss_of_model = plain_jax.loss_function(form, compute_dtype)

    def gradient(state: TrainState, batch: Batch) -> Any:
        def loss(trained: Any) -> jax.Array:
            return loss_of_model(model_of(state, trained), batch["inputs"], batch["targets"])

        return jax.value_and_grad(loss)(state.model)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        value, grads = gradient(state, batch)
        updates, optimizer = tx.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        state = dataclasses.replace(state, step=state.step + 1, model=model, optimizer=optimizer)
        return state, {"loss": value}

    return gradient, step


def _baseline_step(
    form: PlainJax,
    config: ResolvedConfig,
    model_config: ModelConfig,
    transform: optax.GradientTransformation,
) -> TrainingStep:
    tx: Any = optax.chain(optax.clip_by_global_norm(config.optimizer.clip), transform)

    def init() -> TrainState:
        key = jax.random.fold_in(jax.random.key(config.seed), 0)
        model = Decoder(model_config, key, dtype=config.weight_dtype)
        return TrainState(jnp.zeros((), jnp.int32), model, tx.init(model))

    def memory() -> StepMemory:
        shapes, batch = jax.eval_shape(init), batch_shapes(config)
        loss = plain_jax.loss_function(form, config.compute_dtype)
        stored = actjax.explain(loss, shapes.model, batch["inputs"], batch["targets"]).stored_bytes
        weights = tree_bytes(shapes.model)
        return StepMemory(weights, weights, tree_bytes(shapes.optimizer), 0, stored)

    gradient, step = plain_step(form, config.compute_dtype, tx)
    return TrainingStep(init, step, gradient, memory)


def _optax_galore(
    config: ResolvedConfig, rank: int, adamw: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns `optax.contrib.galore` on the matrices of the layers, AdamW on the rest.

    It does not support stacked weights, so it runs on one layer after the other. That also limits
    the workspace of its singular value decompositions to that of one layer.
    """
    settings = config.optimizer
    adam = store_states_as(optax.scale_by_adam(*settings.betas), jnp.dtype("float32"))
    galore = optax.chain(
        optax.contrib.scale_by_galore(rank, update_proj_gap=200, scale=0.25, base_optimizer=adam),
        full_space_updates(settings, config.steps),
    )

    def init(params: Any) -> Any:
        stacked, rest = split(params, layers_of)
        return jax.lax.map(galore.init, jax.tree.leaves(stacked)), adamw.init(rest)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        stacked, rest = split(params, layers_of)
        stacked_grads, rest_grads = split(updates, layers_of)
        # It does not support `None` in a tree, so it gets lists of arrays.
        leaves = jax.tree.leaves(stacked_grads), state[0], jax.tree.leaves(stacked)
        layers, layers_state = jax.lax.map(lambda layer: galore.update(*layer), leaves)
        layers = jax.tree.unflatten(jax.tree.structure(stacked), layers)
        rest_updates, rest_state = adamw.update(rest_grads, state[1], rest)
        return merge(layers, rest_updates, params), (layers_state, rest_state)

    return optax.GradientTransformation(init, update)


def compiled_memory(program: Any) -> dict[str, int]:
    """Returns temporaries and peak of a compiled program, in bytes."""
    stats = program.memory_analysis()
    peak = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return {"temporaries": stats.temp_size_in_bytes, "peak": peak}


def random_batch(config: PretrainConfig, vocab_size: int) -> Batch:
    """Returns a batch of random tokens without a mask."""
    shape = (config.batch_size, config.seq_len + 1)
    rows = jax.random.randint(jax.random.key(0), shape, 0, vocab_size)
    mask = jnp.ones((config.batch_size, config.seq_len), jnp.float32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:], "mask": mask}
