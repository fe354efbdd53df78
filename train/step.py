"""What a run does, and its steps as pure functions of arrays."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import actjax
from models import Decoder, ModelConfig, Storage, StorageChoice
from models.block import Positions
from models.layers import layer_function, layer_keys
from models.lora import LoRAConfig, attach, init_adapters, quantize_layers
from train import methods
from train.calibration import calibrated, calibrated_sites, calibration_zeros
from train.config import RunConfig
from train.optimizer import make_optimizer

Batch = dict[str, jax.Array]
"""`inputs` and `targets`, [B, S] int32, and `mask`, [B, S]. Where examples share a sequence, also
`segments`, [B, S] int32: which of them a token is of."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes. Plain arrays: what a checkpoint holds.

    Attributes:
      step: steps done, int32 scalar; also what the keys of the next step are folded from.
      model: what is trained: a `Decoder`, or the adapters of one.
      optimizer: the state of the optax transform.
      frozen: the `Decoder` that adapters belong to, which no step changes; None without adapters.
        Not saved: it is read where the run found it.
      calibration: scales of channels that `train.calibration` measured; None if none are needed.
    """

    step: Any
    model: Any
    optimizer: Any
    frozen: Any = None
    calibration: Any = None

    @property
    def context(self) -> "Context":
        """What a loss reads beside what is trained."""
        return Context(self.frozen, self.calibration)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a loss reads beside what is trained; as in `TrainState`."""

    frozen: Any = None
    calibration: Any = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run's settings, with all that follows from its model and method.

    Attributes:
      config: the settings.
      model_config: dimensions.
      storage: what each site stores.
      optimizer: the transform, for `actjax.optim.apply`.
      bits: of the sites whose bits were chosen.
      lora: the adapters; None if the model itself is trained.
      recalibrate_every: steps between two measurements of what is calibrated; 0 for none.
    """

    config: RunConfig
    model_config: ModelConfig
    storage: StorageChoice
    optimizer: optax.GradientTransformation
    bits: Mapping[str, int]
    lora: LoRAConfig | None = None
    recalibrate_every: int = 0

    @property
    def method(self) -> methods.Method:
        """The method by its name."""
        return methods.method(self.config.method)

    @property
    def subspace(self) -> actjax.optim.SubspaceTransformation | None:
        """The transform if some steps are refresh steps, else None."""
        tx = self.optimizer
        return tx if isinstance(tx, actjax.optim.SubspaceTransformation) else None

    @property
    def optimizer_form(self) -> dict[str, Any]:
        """Settings that shape the optimizer's state: a checkpoint must agree with them."""
        config, is_full = self.config, self.subspace is None
        return {
            "moment_dtype": config.optimizer.moment_dtype,
            "in_backward": config.in_backward,
            # Methods with full moments may follow one another.
            "method": "one of full rank" if is_full else config.method,
            "rank": None if is_full else config.options.rank,
            **({} if self.lora is None else {"adapters": dataclasses.asdict(self.lora)}),
        }

    def due_layers(self, step: int) -> np.ndarray | None:
        """Returns the layers whose subspace changes at a step, [layers] of bool; None if none.

        All do at the first step. Staggered, layer `i` of `L` does so again `i gap / L` steps later.
        """
        if self.subspace is None:
            return None
        options, count = self.config.options, self.model_config.num_layers
        delay = np.arange(count) * options.gap // count if options.stagger else np.zeros(count, int)
        due = ((step - delay) % options.gap == 0) | (step == 0)
        return due if due.any() else None


def make_recipe(
    config: RunConfig, model_config: ModelConfig, bits: Mapping[str, int] | None = None
) -> Recipe:
    """Returns what a run does.

    Args:
      config: its settings.
      model_config: dimensions.
      bits: of sites whose bits were chosen (`train.adapt`); those of the method if None.

    Raises:
      ValueError: an unknown method, or options out of range.
    """
    method = methods.method(config.method)
    if method.adapters and config.adapters is None:
        raise ValueError(
            f"`--method` {config.method} trains adapters of a checkpoint: use train.finetune."
        )
    options = method.resolve(config.options, model_config)
    dtype = config.optimizer.moment_dtype
    if dtype == "auto":
        dtype = "8bit" if method.frugal else "float32"
    config = dataclasses.replace(
        config,
        options=options,
        optimizer=dataclasses.replace(config.optimizer, moment_dtype=dtype),
        weight_dtype="float32" if config.weight_dtype == "auto" else config.weight_dtype,
        in_backward=config.in_backward or method.frugal,
    )
    if method.adapters and config.in_backward:
        raise ValueError(
            f"`--in-backward` is for methods that train all weights, and {config.method} trains"
            " adapters, whose gradients take next to nothing: leave it out."
        )
    storage = method.storage_of(options, bits or {})
    subspace = None
    if method.subspace is not None:
        largest = method.subspace.largest_rank(model_config)
        if options.rank > largest:
            raise ValueError(
                f"`--rank` {options.rank} of {config.method} is above {largest}, the smallest side"
                f" that it projects of a weight of {config.title}: lower it."
            )
        subspace = functools.partial(
            actjax.optim.subspace,
            rank=options.rank,
            gap=options.gap,
            scale=options.scale,
            moments=options.moments,
            source=method.subspace.source,
            side=method.subspace.side,
            groups=_input_groups(config, model_config, storage),
            # Where inputs are rebuilt from codes, so are their coordinates, and nothing of these is
            # stored.
            bits=16
            if isinstance(storage, Storage) and storage.attention_in is None
            else options.bits,
            seed=config.seed,
        )
    optimizer = make_optimizer(config.optimizer, config.steps, subspace)
    lora = config.adapters if method.adapters else None
    every = config.recalibrate_every if calibrated_sites(storage) else 0
    return Recipe(config, model_config, storage, optimizer, bits or {}, lora, every)


def _input_groups(
    config: RunConfig, model_config: ModelConfig, storage: StorageChoice
) -> dict[str, str]:
    """Returns which of the layers' weights share an input."""
    make = functools.partial(Decoder, model_config, dtype=config.weight_dtype)
    model = jax.eval_shape(make, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return actjax.input_groups(loss_function(config, storage), model, batch_shapes(config), key)


def batch_shapes(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one micro-batch."""
    shape = (config.batch_size // config.accumulate, config.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(shape, "float32")}
    return {**batch, "segments": tokens} if config.packed else batch


def init_state(recipe: Recipe, model: Decoder | None = None) -> TrainState:
    """Returns the state before the first step.

    Args:
      recipe: the run.
      model: what is trained, or what adapters are trained of; drawn at random if None.
    """
    config = recipe.config
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    if model is None:
        model = Decoder(recipe.model_config, key, dtype=config.weight_dtype)
        if recipe.method.four_bit:
            model = quantize_layers(model)
    trained: Any = model
    if recipe.lora is not None:
        trained = init_adapters(recipe.model_config, recipe.lora, key)
    if config.in_backward:
        optimizer = _in_backward(recipe).init(trained)
    else:
        optimizer = actjax.optim.init(recipe.optimizer, trained)
    frozen = None if recipe.lora is None else model
    calibration = calibration_zeros(recipe.model_config, recipe.storage)
    return TrainState(jnp.zeros((), jnp.int32), trained, optimizer, frozen, calibration)


def model_of(recipe: Recipe, state: TrainState, key: jax.Array | None = None) -> Decoder:
    """Returns the decoder that is trained, or whose adapters are.

    Args:
      recipe: the run.
      state: the training state.
      key: randomness of the adapters' dropout; None for none.
    """
    if recipe.lora is None:
        return state.model
    return attach(state.frozen, state.model, recipe.lora, key)


Loss = Callable[..., jax.Array]
"""From what is trained, a batch, a key and a `Context`, which may be left out where it is empty, to
a float32 scalar."""


def loss_function(
    config: RunConfig,
    storage: StorageChoice,
    lora: LoRAConfig | None = None,
    *,
    dropout: bool = True,
) -> Loss:
    """Returns the loss of a batch.

    Args:
      config: the settings.
      storage: what each site stores.
      lora: the adapters, if these are trained.
      dropout: whether their inputs are partly set to zero, if they are to be.
    """

    def loss(trained: Any, batch: Batch, key: jax.Array, context: Context = Context()) -> jax.Array:
        model: Decoder = trained
        if lora is not None:
            dropout_key = jax.random.fold_in(key, _DROPOUT) if dropout else None
            model = attach(context.frozen, trained, lora, dropout_key)
        return model.loss(
            batch["inputs"],
            batch["targets"],
            mask=batch["mask"],
            segments=batch.get("segments"),
            storage=calibrated(storage, context.calibration),
            key=key,
            compute_dtype=config.compute_dtype,
            z_loss=config.z_loss,
        )

    return loss


_DROPOUT = 2**30
"""Folded into the key of a step for the dropout of adapters: no number of a site or layer."""

TrainStep = Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(recipe: Recipe) -> TrainStep:
    """Returns a function of state and batch to the next state and metrics.

    Metrics are `loss` (nats a token), `grad_norm` (before clipping) and `update_norm` (of what is
    added to the weights), float32 scalars. If all are finite, so is the next state.
    """
    step = _in_backward_step(recipe) if recipe.config.in_backward else _ordinary_step(recipe)
    return lambda state, batch: step(state, batch, None)


def make_refresh_step(recipe: Recipe) -> TrainStep:
    """Returns a function of state, batch and the layers that are due, as `make_train_step`.

    It changes the subspace of these layers (`Recipe.due_layers`), then takes a step: a program of
    its own, so that the other has no room for what only this one needs.
    """
    step = _in_backward_step(recipe) if recipe.config.in_backward else _ordinary_step(recipe)
    subspace = recipe.subspace
    if subspace is None or subspace.source != "random":
        return step

    def redraw_and_step(state: TrainState, batch: Batch, due: jax.Array):
        redraw = functools.partial(actjax.optim.redraw, subspace, due=due)
        if recipe.config.in_backward:
            drawn = redraw(state.optimizer.optimizer, state.model)
            optimizer = state.optimizer._replace(optimizer=drawn)
        else:
            optimizer = redraw(state.optimizer, state.model)
        return step(dataclasses.replace(state, optimizer=optimizer), batch, None)

    return redraw_and_step


def step_key(config: RunConfig, step: jax.Array) -> jax.Array:
    """Returns the key of a step's codecs: the same in a run that was resumed."""
    run_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return jax.random.fold_in(run_key, step)


def _ordinary_step(recipe: Recipe) -> Callable:
    config, optimizer = recipe.config, recipe.optimizer

    def step(state: TrainState, batch: Batch, due: jax.Array | None):
        loss_and_grad = gradient_function(recipe, state, refresh=due is not None)
        key = step_key(config, state.step)
        loss, grads = loss_and_grad(state.model, batch, key, state.context)
        grads, grad_norm = actjax.clip_by_global_norm(grads, config.optimizer.clip)
        model, optimizer_state, update_norm = actjax.optim.apply(
            optimizer,
            grads,
            state.optimizer,
            state.model,
            refresh=False if due is None else due,
            with_norm=True,
        )
        metrics = {"loss": loss, "grad_norm": grad_norm, "update_norm": update_norm}
        state = dataclasses.replace(
            state, step=state.step + 1, model=model, optimizer=optimizer_state
        )
        return state, metrics

    return step


def gradient_function(recipe: Recipe, state: TrainState, refresh: bool) -> Callable:
    """Returns loss and gradient as a function of what a `Loss` takes.

    Args:
      recipe: the run.
      state: where the bases are that inputs are stored in between refreshes.
      refresh: whether inputs are stored for new bases to be taken from the gradient.
    """
    bases = None
    if recipe.subspace is not None and not refresh:
        bases = recipe.subspace.bases(state.optimizer)
    loss = loss_function(recipe.config, recipe.storage, recipe.lora)
    return _accumulated(actjax.value_and_grad(loss, bases=bases), recipe.config.accumulate)


def _in_backward(recipe: Recipe) -> actjax.optim.InBackward:
    config = recipe.config
    run_layer = layer_function(recipe.model_config, recipe.storage)

    def before(model: Decoder, inputs: dict[str, Any]) -> jax.Array:
        return model.embed(inputs["batch"]["inputs"], config.compute_dtype)

    def layer(block: Any, x: jax.Array, inputs: dict[str, Any], key: jax.Array) -> jax.Array:
        return run_layer(block, x, inputs["positions"], key)

    def after(model: Decoder, x: jax.Array, inputs: dict[str, Any]) -> jax.Array:
        batch = inputs["batch"]
        return model.loss_after(x, batch["targets"], mask=batch["mask"], z_loss=config.z_loss)

    clip = config.optimizer.clip
    return actjax.optim.in_backward(before, layer, after, recipe.optimizer, clip=clip)


def _in_backward_step(recipe: Recipe) -> Callable:
    config, model_config = recipe.config, recipe.model_config
    update = _in_backward(recipe)

    def step(state: TrainState, batch: Batch, due: jax.Array | None):
        positions = Positions.of(model_config, config.seq_len, batch.get("segments"))
        inputs = {"batch": batch, "positions": positions}
        keys = layer_keys(model_config, step_key(config, state.step))
        refresh = False if due is None else due
        model, optimizer_state, loss, update_norm = update.step(
            state.model, state.optimizer, inputs, keys, refresh
        )
        grad_norm = optimizer_state.grad_norm
        metrics = {"loss": loss, "grad_norm": grad_norm, "update_norm": update_norm}
        state = dataclasses.replace(
            state, step=state.step + 1, model=model, optimizer=optimizer_state
        )
        return state, metrics

    return step


def _accumulated(loss_and_grad: Callable, count: int) -> Callable:
    """Returns `loss_and_grad` as the mean over `count` micro-batches, run one after the other.

    Each micro-batch is weighted by its unmasked tokens, so that the result is that of the whole
    batch.
    """
    if count == 1:
        return loss_and_grad

    def run(model: Any, batch: Batch, key: jax.Array, context: Context = Context()):
        micro = jax.tree.map(lambda x: _split_interleaved(x, count), batch)
        keys = jax.random.split(key, count)
        tokens = micro["mask"].astype(jnp.float32).sum((1, 2))
        weights = tokens / jnp.maximum(tokens.sum(), 1)
        return actjax.accumulate(
            lambda model, slices: loss_and_grad(model, *slices, context),
            model,
            (micro, keys),
            weights=weights,
        )

    return run


def _split_interleaved(x: jax.Array, count: int) -> jax.Array:
    """[B, ...] to [count, B / count, ...], each part with rows of every device's shard."""
    return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)


def make_eval_step(recipe: Recipe) -> Callable[..., jax.Array]:
    """Returns a function of what is trained, a batch and a `Context` to the loss of its tokens.

    Summed over those that are not masked, in nats. Adapters drop nothing out.
    """
    exact = dataclasses.replace(recipe.config, z_loss=0.0)
    loss = loss_function(exact, Storage(), recipe.lora, dropout=False)

    def eval_step(model: Any, batch: Batch, context: Context = Context()) -> jax.Array:
        exact = dataclasses.replace(context, calibration=None)
        mean = loss(model, batch, jax.random.key(0), exact)
        return mean * batch["mask"].astype(jnp.float32).sum()

    return eval_step
