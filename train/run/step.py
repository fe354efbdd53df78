"""The steps of a run as pure functions of arrays, and the state that they change."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax.optim.stepping import in_place
from actjax.optim.stepping.gradients import value_and_grad
from actjax.optim.stepping.passes import Layered
from models import Decoder, Storage
from models.block import Positions
from models.layers import layer_function, layer_keys
from models.lora import attach, init_adapters, quantize_layers
from models.sharding import fetch_first
from train.run.calibration import calibration_zeros
from train.run.loss import (
    Batch,
    Context,
    inputs_of,
    loss_after,
    loss_function,
    preferences,
    response_log_probs,
    run_layers,
    weight_of,
)
from train.run.loss_scale import LossScale, update_if
from train.run.recipe import Recipe
from train.settings.config import RunConfig
from train.settings.resolve import ResolvedConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes. Plain arrays: the contents of a checkpoint.

    Attributes:
      step: steps done, int32 scalar. The keys of the next step are folded from it.
      model: what is trained: a `Decoder`, or its adapters.
      optimizer: the state of the optax transform, a `LayerwiseState`.
      frozen: the `Decoder` that the adapters belong to; None without adapters. It never changes and
        is not saved: a resumed run reads it from the pretrained checkpoint.
      calibration: measured statistics of channels (`train.run.calibration`), or None.
      norms: norms of gradients, by field of `actjax.optim.InBackwardState`, from which updates in
        the backward pass estimate the next; None without such updates.
      loss_scale: the `LossScale` of a run in float16, else None.
    """

    step: Any
    model: Any
    optimizer: Any
    frozen: Any = None
    calibration: Any = None
    norms: Any = None
    loss_scale: Any = None

    @property
    def context(self) -> Context:
        """The arrays that a loss reads beside the trained ones."""
        scale = None if self.loss_scale is None else self.loss_scale.value
        return Context(self.frozen, self.calibration, scale)


def init_state(recipe: Recipe, model: Decoder | None = None) -> TrainState:
    """Returns the state before the first step.

    Args:
      recipe: the run.
      model: the pretrained decoder, which is trained or whose adapters are; None draws one.
    """
    config = recipe.config
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    if model is None:
        model = Decoder(config.model_config, key, dtype=config.weight_dtype)
        if recipe.method.four_bit:
            model = quantize_layers(model)
    trained: Any = model
    if config.lora is not None:
        trained = init_adapters(config.model_config, config.lora, key)
    if config.in_backward:
        optimizer, norms = _without_norms(_in_backward(recipe).init(trained))
    else:
        optimizer, norms = actjax.optim.init(recipe.optimizer, trained), None
    frozen = None if config.lora is None else model
    calibration = None
    if recipe.method.calibrates:
        calibration = calibration_zeros(config.model_config, recipe.storage)
    scale = LossScale.first() if config.compute_dtype == "float16" else None
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, trained, optimizer, frozen, calibration, norms, scale)


def model_of(recipe: Recipe, state: TrainState) -> Decoder:
    """Returns the decoder that is trained, with its adapters, without dropout, if it has any."""
    if recipe.config.lora is None:
        return state.model
    return attach(state.frozen, state.model, recipe.config.lora, None)


TrainStep = Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(recipe: Recipe, *, refresh: bool = False) -> TrainStep:
    """Returns a function from state and batch to the next state and metrics.

    Metrics are float32 scalars: `loss` (nats per token), `grad_norm` (before clipping) and
    `update_norm` (norm of the change of the weights, of matrices with 1,024 rows or more estimated
    from every sixteenth row). If all are finite, so is the next state. In
    float16 also those of `LossScale`; a step whose loss or gradient is not finite is skipped.

    Args:
      recipe: the run.
      refresh: whether the subspaces of the layers are taken anew from the gradient.
    """
    config, optimizer = recipe.config, recipe.optimizer
    if config.in_backward:
        return _in_backward_step(recipe, refresh)

    def step(state: TrainState, batch: Batch):
        loss_and_grad = gradient_function(recipe, state, refresh=refresh)
        key = step_key(config, state.step)
        loss, grads = loss_and_grad(state.model, batch, key, state.context)
        scale, before = state.loss_scale, (state.model, state.optimizer)
        if scale is not None:
            loss, grads = scale.removed(loss, grads)
        grad_norm = actjax.global_norm(grads)

        def update(model: Any, optimizer_state: Any) -> tuple[Any, Any, jax.Array]:
            return actjax.optim.apply(
                *(optimizer, grads, optimizer_state, model),
                refresh=refresh,
                with_norm=True,
                clip=config.optimizer.clip,
            )

        if scale is None:
            model, optimizer_state, update_norm = update(*before)
        else:
            is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
            model, optimizer_state, update_norm = update_if(is_finite, update, *before)
            scale = scale.after(is_finite)
        metrics = {"loss": loss, "grad_norm": grad_norm, "update_norm": update_norm}
        metrics |= {} if scale is None else scale.metrics()
        new = {"model": model, "optimizer": optimizer_state, "loss_scale": scale}
        return dataclasses.replace(state, step=state.step + 1, **new), metrics

    return step


def make_refresh_step(recipe: Recipe) -> TrainStep:
    """Returns a function from state and batch to the next state and metrics.

    It refreshes the subspaces of the layers (`Recipe.refreshes`) and takes a step. It is a separate
    program, so that the workspace of a refresh is not part of every step's.
    """
    subspace = recipe.subspace
    if subspace is None or subspace.source != "random":
        return make_train_step(recipe, refresh=True)
    step = make_train_step(recipe)

    def redraw_and_step(state: TrainState, batch: Batch):
        drawn = actjax.optim.redraw(subspace, state.optimizer, state.model)
        return step(dataclasses.replace(state, optimizer=drawn), batch)

    return redraw_and_step


def step_key(config: RunConfig, step: jax.Array) -> jax.Array:
    """Returns the key of a step's codecs. A resumed run gets the same keys."""
    run_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return jax.random.fold_in(run_key, step)


def gradient_function(recipe: Recipe, state: TrainState, refresh: bool) -> Callable:
    """Returns a function from the arguments of a `BatchLoss` to loss and gradient.

    Micro-batches run one after the other.

    Args:
      recipe: the run.
      state: holds the bases in which inputs are stored between refreshes.
      refresh: whether inputs are stored so that new bases can be taken from the gradient.
    """
    config, bases = recipe.config, None
    is_plain = config.lora is None and recipe.subspace is None and config.accumulate == 1
    if is_plain and in_place.applies(state.model):
        return functools.partial(_by_layer, recipe)
    if recipe.subspace is not None and not refresh:
        bases = recipe.subspace.bases(state.optimizer)
    loss = loss_function(config, recipe.storage, config.lora)
    loss_and_grad, count = actjax.value_and_grad(loss, bases=bases), config.accumulate
    if count == 1:
        return loss_and_grad

    def accumulated(model: Any, batch: Batch, key: jax.Array, context: Context = Context()):
        # Weighted by their unmasked tokens, micro-batches give the result of the whole batch.
        micro, shares = _split(batch, count)
        return actjax.accumulate(
            lambda model, slices: loss_and_grad(model, *slices, context),
            model,
            (micro, jax.random.split(key, count)),
            weights=shares,
        )

    return accumulated


def _by_layer(
    recipe: Recipe, model: Decoder, batch: Batch, key: jax.Array, context: Context
) -> tuple[jax.Array, Any]:
    """Returns loss and gradient, from loops over the layers in which kernels work in place."""
    layered, scale = _layered(recipe), context.loss_scale

    def after(model: Decoder, x: jax.Array, inputs: dict[str, Any]) -> jax.Array:
        loss = layered.after(model, x, inputs)
        return loss if scale is None else loss * scale

    inputs, keys, _ = _micro_batches(recipe.config, batch, key)
    return value_and_grad(dataclasses.replace(layered, after=after), model, inputs, keys)


def _in_backward(recipe: Recipe) -> actjax.optim.InBackward:
    config, model = recipe.config, _layered(recipe)
    return actjax.optim.in_backward(
        *(model.before, model.layer, model.after, recipe.optimizer),
        clip=config.optimizer.clip,
        fetch=fetch_first,
        accumulate=config.accumulate,
    )


def _layered(recipe: Recipe) -> Layered:
    """Returns the functions of the model. `inputs` are those of `_micro_batches`."""
    config = recipe.config
    run_layer = layer_function(recipe.config.model_config, recipe.storage)

    def before(model: Decoder, inputs: dict[str, Any]) -> jax.Array:
        return model.embed(inputs_of(inputs["batch"], config.method), config.compute_dtype)

    def layer(block: Any, x: jax.Array, inputs: dict[str, Any], key: jax.Array) -> jax.Array:
        return run_layer(block, x, inputs["positions"], key)

    def after(model: Decoder, x: jax.Array, inputs: dict[str, Any]) -> jax.Array:
        return loss_after(config, model, x, inputs["batch"])

    return Layered(before, layer, after, lambda model: model.layers, config.accumulate)


def _in_backward_step(recipe: Recipe, refresh: bool) -> TrainStep:
    config, update = recipe.config, _in_backward(recipe)

    def step(state: TrainState, batch: Batch):
        inputs, keys, weights = _micro_batches(config, batch, step_key(config, state.step))
        before = actjax.optim.InBackwardState(state.optimizer, **state.norms)
        model, after, loss, update_norm = update.step(
            state.model, before, inputs, keys, refresh, weights
        )
        optimizer, norms = _without_norms(after)
        metrics = {
            "loss": loss,
            "grad_norm": after.grad_norm,
            "update_norm": update_norm,
            "clip_error": after.clip_error,
        }
        new = {"step": state.step + 1, "model": model, "optimizer": optimizer, "norms": norms}
        return dataclasses.replace(state, **new), metrics

    return step


def _without_norms(state: actjax.optim.InBackwardState) -> tuple[Any, dict[str, Any]]:
    """Returns the optimizer's state, and the norms beside it, as `TrainState` holds them."""
    norms = state._asdict()
    return norms.pop("optimizer"), norms


def _micro_batches(config: ResolvedConfig, batch: Batch, key: jax.Array) -> tuple[Any, Any, Any]:
    """Returns inputs of an in-backward step, keys of the layers, and weights of the micro-batches.

    With several micro-batches, inputs and keys have a leading axis of them. Their weights are their
    shares of the unmasked tokens, which gives the loss and the gradient of the whole batch.
    """

    def inputs_of_one(batch: Batch) -> dict[str, Any]:
        segments = batch.get("segments")
        return {"batch": batch, "positions": Positions.of(model, config.seq_len, segments)}

    model, count = config.model_config, config.accumulate
    if count == 1:
        return inputs_of_one(batch), layer_keys(model, key), None
    micro, shares = _split(batch, count)
    keys = jax.vmap(lambda key: layer_keys(model, key))(jax.random.split(key, count))
    return jax.vmap(inputs_of_one)(micro), keys, shares


def _split(batch: Batch, count: int) -> tuple[Batch, jax.Array]:
    """Splits arrays [B, ...] into [count, B / count, ...], with rows of every device's shard each.

    The two rows of a pair stay together. Returns the micro-batches with the share of the unmasked
    tokens, or of the pairs, that each has, [count].
    """
    together = 2 if "reference" in batch else 1

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.swapaxes(x.reshape(-1, count, together, *x.shape[1:]), 0, 1)
        return parts.reshape(count, -1, *x.shape[1:])

    micro = {name: split(x) for name, x in batch.items()}
    weights = weight_of(micro)
    return micro, weights / jnp.maximum(weights.sum(), 1)


def make_eval_step(recipe: Recipe) -> Callable[..., dict[str, jax.Array]]:
    """Returns a function from what is trained, a batch and a `Context` to sums over the batch.

    They are those of `train.run.loss.preferences`, or `nats`: the loss over the unmasked tokens.
    The loss is exact, without dropout. Micro-batches run one after the other.
    """
    config = dataclasses.replace(recipe.config, z_loss=0.0)
    lora = config.lora
    loss = loss_function(config, Storage(), lora, dropout=False)

    def sums_of(trained: Any, batch: Batch, context: Context) -> dict[str, jax.Array]:
        if config.preference is None:
            exact = dataclasses.replace(context, calibration=None, loss_scale=None)
            mean = loss(trained, batch, jax.random.key(0), exact)
            return {"nats": mean * weight_of(batch)}
        model, reference = trained, None
        if lora is not None:
            model = attach(context.frozen, trained, lora, None)
            reference = response_log_probs(config, context.frozen, batch)
        return preferences(config, model, run_layers(config, model, batch), batch, reference)

    def eval_step(trained: Any, batch: Batch, context: Context = Context()) -> dict[str, jax.Array]:
        if config.accumulate == 1:
            return sums_of(trained, batch, context)
        # The whole batch might not fit beside the state.
        micro, _ = _split(batch, config.accumulate)
        sums = jax.lax.map(lambda part: sums_of(trained, part, context), micro)
        return jax.tree.map(lambda x: x.sum(), sums)

    return eval_step
