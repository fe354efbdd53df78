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
from benchmarks import plain
from benchmarks.variants import VARIANTS, Variant
from models import Decoder
from models.config import ModelConfig
from train.run.begin import first_state, shardings_of_run
from train.run.loss import Batch, batch_shapes
from train.run.optimizer import full_space_updates, make_optimizer, store_states_as
from train.run.recipe import make_recipe
from train.run.report import (
    StepMemory,
    explain_step,
    gradient_bytes,
    step_memory,
    tree_bytes,
)
from train.run.sharding import make_mesh
from train.run.step import (
    TrainState,
    gradient_function,
    init_state,
    make_refresh_step,
    make_train_step,
    step_key,
)
from train.settings.config import PretrainConfig
from train.settings.resolve import ResolvedConfig, dimensions, resolve


@dataclasses.dataclass(frozen=True)
class Rival:
    """A training step to compare.

    Attributes:
      init: returns the state before the first step.
      step: from state and batch to state and metrics; `loss` is one of the metrics.
      gradient: from state and batch to loss and gradient; None if there is no separate gradient.
      refresh: as `step`, for refresh steps; None if there are none.
      memory: returns the part of the step's memory that is known before compilation.
      of_layers: returns the bytes of the gradients and of the optimizer states of all layers.
      on_host: returns the shardings of the state, and a function that draws it there; None if all
        of it is on the device.
    """

    init: Callable[[], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    gradient: Callable[[TrainState, Batch], Any] | None
    refresh: Callable[[TrainState, Batch], Any] | None
    memory: Callable[[], StepMemory]
    of_layers: Callable[[], tuple[int, int]]
    on_host: Callable[[], tuple[TrainState, Callable[[], TrainState]]] | None = None


PLAIN = {
    "plain": plain.PlainConfig(),
    "plain, naive loss and attention": plain.PlainConfig(naive=True),
    "jax.checkpoint, dots": plain.PlainConfig(remat="dots"),
    "jax.checkpoint, dots_saveable": plain.PlainConfig(remat="dots_saveable"),
    "jax.checkpoint, q, k, v, gate and up": plain.PlainConfig(remat="names"),
    "jax.checkpoint, full": plain.PlainConfig(remat="full"),
    "jax.checkpoint, dots offloaded": plain.PlainConfig(remat="offload_dots"),
    "jax.checkpoint, full, inputs offloaded": plain.PlainConfig(remat="offload_inputs"),
}
OPTAX_GALORE = {"optax.contrib.galore d/4": 4, "optax.contrib.galore d/16": 16}
RIVALS = (*PLAIN, *OPTAX_GALORE, *VARIANTS)
"""Names of all rivals; ratios are to `plain`."""
_ON_HOST = {name for name, variant in VARIANTS.items() if variant.optimizer.offload_states}
ON_DEVICE = tuple(name for name in RIVALS if name not in _ON_HOST)
"""Rivals whose state is where `Rival.init` returns it. The others need `Rival.on_host`."""


def rival(name: str, config: PretrainConfig, model_config: ModelConfig | None = None) -> Rival:
    """Returns a rival.

    Args:
      name: one of `RIVALS`.
      config: model, batch, dtypes and optimizer.
      model_config: dimensions; those of the preset `config.model` if None.
    """
    model_config = model_config or dimensions(config)
    if name in VARIANTS:
        return method_rival(VARIANTS[name], config, model_config)
    settings = resolve(dataclasses.replace(config, method="exact"), model_config)
    adamw = make_optimizer(settings.optimizer, settings.steps)
    if name in PLAIN:
        return _plain(PLAIN[name], settings, model_config, adamw)
    rank = model_config.hidden_size // OPTAX_GALORE[name]
    return _plain(PLAIN["plain"], settings, model_config, _optax_galore(settings, rank, adamw))


def method_rival(variant: Variant, config: PretrainConfig, model_config: ModelConfig) -> Rival:
    """Returns a method as `train.pretrain` runs it."""
    recipe = make_recipe(variant.configure(config), model_config)
    init = functools.partial(init_state, recipe)

    def gradient(state: TrainState, batch: Batch) -> Any:
        loss_and_grad = gradient_function(recipe, state, refresh=False)
        return loss_and_grad(state.model, batch, step_key(recipe.config, state.step))

    def memory() -> StepMemory:
        shapes = jax.eval_shape(init)
        return step_memory(recipe, shapes, explain_step(recipe, shapes))

    def of_layers() -> tuple[int, int]:
        shapes = jax.eval_shape(init)
        gradients = gradient_bytes(recipe, shapes)
        states = shapes.optimizer.layers
        return sum(n for p, n in gradients.items() if p.startswith("layers.")), tree_bytes(states)

    def on_host() -> tuple[TrainState, Callable[[], TrainState]]:
        shardings = shardings_of_run(recipe, jax.eval_shape(init), make_mesh(""))
        return shardings, functools.partial(first_state, recipe, shardings)

    return Rival(
        init,
        make_train_step(recipe),
        None if recipe.config.in_backward else gradient,
        make_refresh_step(recipe) if recipe.refreshes(0) else None,
        memory,
        of_layers,
        on_host if recipe.config.optimizer.offload_states else None,
    )


def _plain(
    form: plain.PlainConfig,
    config: ResolvedConfig,
    model_config: ModelConfig,
    transform: optax.GradientTransformation,
) -> Rival:
    """Returns what a user would write: the gradient of all weights, then one optax update."""
    whole_loss = plain.loss_function(form, config.compute_dtype)
    tx: Any = optax.chain(optax.clip_by_global_norm(config.optimizer.clip), transform)

    def loss(model: Decoder, batch: Batch) -> jax.Array:
        return whole_loss(model, batch["inputs"], batch["targets"])

    def init() -> TrainState:
        key = jax.random.fold_in(jax.random.key(config.seed), 0)
        model = Decoder(model_config, key, dtype=config.weight_dtype)
        return TrainState(jnp.zeros((), jnp.int32), model, tx.init(model))

    def gradient(state: TrainState, batch: Batch) -> Any:
        return jax.value_and_grad(loss)(state.model, batch)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        value, grads = gradient(state, batch)
        updates, optimizer = tx.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        return TrainState(state.step + 1, model, optimizer), {"loss": value}

    def memory() -> StepMemory:
        shapes = jax.eval_shape(init)
        kept = actjax.explain(loss, shapes.model, batch_shapes(config)).stored_bytes
        weights = tree_bytes(shapes.model)
        return StepMemory(weights, weights, tree_bytes(shapes.optimizer), 0, kept)

    def of_layers() -> tuple[int, int]:
        stacked = split(jax.eval_shape(init).model, layers_of)[0]
        return tree_bytes(stacked), tree_bytes(jax.eval_shape(tx.init, stacked))

    return Rival(init, step, gradient, None, memory, of_layers)


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
        others, rest_state = adamw.update(rest_grads, state[1], rest)
        return merge(layers, others, params), (layers_state, rest_state)

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
