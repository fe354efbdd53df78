"""One training step and one evaluation step, as pure functions of arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models import Decoder, ModelConfig, Storage
from train.config import PretrainConfig
from train.optimizer import make_optimizer

Batch = dict[str, jax.Array]
"""`inputs` and `targets`, [B, S] int32, and `mask`, [B, S]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes. Plain arrays: what a checkpoint holds.

    Attributes:
      step: steps done, int32 scalar; also what the keys of the next step are folded from.
      model: a `Decoder`.
      optimizer: the state of the optax transform.
    """

    step: Any
    model: Any
    optimizer: Any


def init_state(config: PretrainConfig, model_config: ModelConfig) -> TrainState:
    """Returns the state before the first step."""
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    model = Decoder(model_config, key, dtype=config.weight_dtype)
    # A module is a pytree, which optax takes for parameters without saying so in its types.
    parameters: Any = model
    optimizer = make_optimizer(config.optimizer, config.steps).init(parameters)
    return TrainState(jnp.zeros((), jnp.int32), model, optimizer)


def loss_function(
    config: PretrainConfig, storage: Storage
) -> Callable[[Decoder, Batch, jax.Array], jax.Array]:
    """Returns the loss of a batch as a function of model, batch and key."""

    def loss(model: Decoder, batch: Batch, key: jax.Array) -> jax.Array:
        return model.loss(
            batch["inputs"],
            batch["targets"],
            mask=batch["mask"],
            storage=storage,
            key=key,
            compute_dtype=config.compute_dtype,
            z_loss=config.z_loss,
        )

    return loss


def make_train_step(
    config: PretrainConfig, storage: Storage
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a function of state and batch to the next state and metrics.

    Metrics are `loss` (nats a token), `grad_norm` (before clipping) and `update_norm` (of what is
    added to the weights), float32 scalars. If all are finite, so is the next state.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    loss_and_grad = _accumulated(
        jax.value_and_grad(loss_function(config, storage)), config.accumulate
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        run_key = jax.random.fold_in(jax.random.key(config.seed), 1)
        loss, grads = loss_and_grad(state.model, batch, jax.random.fold_in(run_key, state.step))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return TrainState(state.step + 1, model, optimizer_state), {"loss": loss, **norms}

    return train_step


def _accumulated(loss_and_grad: Callable, count: int) -> Callable:
    """Returns `loss_and_grad` as the mean over `count` micro-batches, run one after the other.

    Each micro-batch is weighted by its unmasked tokens, so that the result is that of the whole
    batch. Gradients are summed in float32.
    """
    if count == 1:
        return loss_and_grad

    def run(model: Decoder, batch: Batch, key: jax.Array):
        micro = jax.tree.map(lambda x: _split_interleaved(x, count), batch)
        keys = jax.random.split(key, count)
        total = jnp.maximum(batch["mask"].astype(jnp.float32).sum(), 1)

        def add(carry, slices):
            one, key = slices
            weight = one["mask"].astype(jnp.float32).sum() / total
            loss, grads = loss_and_grad(model, one, key)
            carry_loss, carry_grads = carry
            grads = jax.tree.map(
                lambda g, s: s + weight * g.astype(jnp.float32), grads, carry_grads
            )
            return (carry_loss + weight * loss, grads), None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), model)
        return jax.lax.scan(add, (jnp.zeros(()), zeros), (micro, keys))[0]

    return run


def _split_interleaved(x: jax.Array, count: int) -> jax.Array:
    """[B, ...] to [count, B / count, ...], each part with rows of every device's shard."""
    return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)


def make_eval_step(config: PretrainConfig) -> Callable[[Decoder, Batch], jax.Array]:
    """Returns a function of model and batch to the summed loss of its unmasked tokens, in nats."""
    exact = dataclasses.replace(config, z_loss=0.0)
    loss = loss_function(exact, Storage())

    def eval_step(model: Decoder, batch: Batch) -> jax.Array:
        return loss(model, batch, jax.random.key(0)) * batch["mask"].astype(jnp.float32).sum()

    return eval_step
