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
from actjax.optim.pieces import count_pieces
from models import Decoder, ModelConfig, Storage, StorageChoice
from models.block import Positions
from models.layers import layer_function, layer_keys
from models.lora import LoRAConfig, attach, init_adapters, quantize_layers
from models.sharding import fetch_first
from train.run.calibration import calibrated, calibration_zeros
from train.run.optimizer import make_optimizer, moment_block, moment_group, remainder_of
from train.run.padding import inputs_of
from train.settings.config import FinetuneConfig, PretrainConfig, RunConfig
from train.settings.methods import Method
from train.settings.options import ANY_FULL_RANK
from train.settings.resolve import ResolvedConfig, resolve

Batch = dict[str, jax.Array]
"""`inputs` and `targets` [B, S] int32, and `mask` [B, S] float32. With packed examples also
`segments` [B, S] int32: the example that each token belongs to."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes. Plain arrays: the contents of a checkpoint.

    Attributes:
      step: steps done, int32 scalar. The keys of the next step are folded from it.
      model: what is trained: a `Decoder`, or its adapters.
      optimizer: the state of the optax transform.
      frozen: the `Decoder` that the adapters belong to; None without adapters. It never changes and
        is not saved: a resumed run reads it from the pretrained checkpoint.
      calibration: measured statistics of channels (`train.run.calibration`); None if none are needed.
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
    """The resolved settings of a run, with the storage and the optimizer that follow from them.

    Attributes:
      config: the settings.
      storage: what each site stores.
      optimizer: the transform, for `actjax.optim.apply`.
      bits: of the sites whose bits were chosen by `train.run.adapt`.
    """

    config: ResolvedConfig
    storage: StorageChoice
    optimizer: optax.GradientTransformation
    bits: Mapping[str, int]

    @property
    def model_config(self) -> ModelConfig:
        """Dimensions of the model."""
        return self.config.model_config

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters; None if all weights are trained."""
        return self.config.lora

    @property
    def method(self) -> Method:
        """The method."""
        return self.config.info

    @property
    def subspace(self) -> actjax.optim.SubspaceTransformation | None:
        """The transform if some steps are refresh steps, else None."""
        tx = self.optimizer
        return tx if isinstance(tx, actjax.optim.SubspaceTransformation) else None

    def _short_blocks(self) -> list[int]:
        """Returns the sizes of shared scales of moments that are not the usual one."""
        rules = {"8bit": (moment_block, 256), "4bit": (moment_group, 128)}
        if self.config.optimizer.moment_dtype not in rules:
            return []
        rule, usual = rules[self.config.optimizer.moment_dtype]
        one = self.model_config
        d, keys = one.hidden_size, one.num_kv_heads * one.head_size
        sides = (one.ffn_size, one.num_heads * one.head_size, keys, one.vocab_size)
        shapes = [shape for n in sides for shape in ((d, n), (n, d))]
        return sorted({rule(shape) for shape in shapes} - {usual})

    @property
    def _pieces(self) -> list[int]:
        """The numbers of pieces of the embedding and the head, if these are updated in pieces."""
        if self.lora is not None:
            return []
        one = self.model_config
        shapes = (one.vocab_size, one.hidden_size), (one.hidden_size, one.vocab_size)
        counts = [count_pieces(shape) for shape in shapes]
        return [] if counts == [1, 1] else counts

    @property
    def _update_form(self) -> dict[str, Any]:
        """The part of the form that differs from that of AdamW with both moments."""
        given = self.config.optimizer
        form: dict[str, Any] = {}
        if given.optimizer != "adamw":
            form["name"] = given.optimizer
        if given.projects:
            form["projection_rank"] = given.projection_rank
        if given.factored_second_moment:
            form["factored_second_moment"] = True
            form |= {} if given.betas[0] else {"first_moment": "none"}
        return form

    @property
    def optimizer_form(self) -> dict[str, Any]:
        """Settings that shape the optimizer state: a checkpoint must agree with them."""
        config, is_full = self.config, self.method.subspace is None
        return {
            "moment_dtype": config.optimizer.moment_dtype,
            "weight_rounding": config.weight_rounding,
            "in_backward": config.in_backward,
            # A run may change from one full-rank method to another.
            "method": ANY_FULL_RANK if is_full else config.method,
            "rank": None if is_full else config.options.rank,
            **({"norm_estimate": "parts"} if config.in_backward else {}),
            **self._update_form,
            **({"pieces": pieces} if (pieces := self._pieces) else {}),
            **({"moment_blocks": blocks} if (blocks := self._short_blocks()) else {}),
            **({} if self.lora is None else {"adapters": dataclasses.asdict(self.lora)}),
        }

    @property
    def calibration_form(self) -> dict[str, Any]:
        """Settings that give calibrated statistics their meaning: a checkpoint must agree too."""
        options = self.config.options
        if not self.method.calibrates:
            return {}
        # Means and spreads are those of the activations, whatever they are stored in.
        names = ("bits", "same_bits", "levels", "rounding") if options.scaling == "channel" else ()
        return {name: getattr(options, name) for name in ("scaling", *names)}

    def due_layers(self, step: int) -> np.ndarray | None:
        """Returns the layers whose subspace is refreshed at a step, [layers] of bool, or None.

        The first step refreshes all layers. Staggered, layer `i` of `L` is refreshed again
        `i gap / L` steps later.
        """
        if self.subspace is None:
            return None
        options, count = self.config.options, self.model_config.num_layers
        gap = self.subspace.gap
        delay = np.arange(count) * gap // count if options.stagger else np.zeros(count, int)
        due = ((step - delay) % gap == 0) | (step == 0)
        return due if due.any() else None


def make_recipe(
    config: PretrainConfig | FinetuneConfig,
    model_config: ModelConfig,
    bits: Mapping[str, int] | None = None,
) -> Recipe:
    """Resolves settings and returns their recipe.

    Args:
      config: settings as the user gave them.
      model_config: dimensions.
      bits: as for `build_recipe`.

    Raises:
      ValueError: an unknown method, or options out of range.
    """
    return build_recipe(resolve(config, model_config), bits)


def build_recipe(config: ResolvedConfig, bits: Mapping[str, int] | None = None) -> Recipe:
    """Returns the recipe of resolved settings.

    Args:
      config: the settings.
      bits: of sites whose bits were chosen (`train.run.adapt`); None for those of the method.

    Raises:
      ValueError: options out of range.
    """
    longest = max(config.seq_len, config.model_config.max_seq_len)
    model_config = dataclasses.replace(config.model_config, max_seq_len=longest)
    config = dataclasses.replace(config, model_config=model_config)
    storage = config.info.storage_of(config.options, bits or {})
    optimizer = make_optimizer(
        config.optimizer,
        config.steps,
        _subspace(config, storage),
        config.weight_rounding,
        config.seed,
    )
    return Recipe(config, storage, optimizer, bits or {})


def _subspace(
    config: ResolvedConfig, storage: StorageChoice
) -> Callable[..., actjax.optim.SubspaceTransformation] | None:
    """Returns `actjax.optim.subspace` without its transforms; None without a subspace."""
    options, subspace = config.options, config.info.subspace
    if subspace is None:
        remainder = remainder_of(config.optimizer)
        if remainder is None:
            return None
        return functools.partial(remainder, groups=_input_groups(config, storage), seed=config.seed)
    # Where inputs are rebuilt from codes, so are their coordinates, and none are stored.
    is_rebuilt = isinstance(storage, Storage) and storage.attention_in is None
    return functools.partial(
        actjax.optim.subspace,
        rank=options.rank,
        gap=options.gap,
        scale=options.scale,
        moments=options.moments,
        source=subspace.source,
        side=subspace.side,
        groups=_input_groups(config, storage),
        bits=16 if is_rebuilt else options.bits,
        seed=config.seed,
    )


def _input_groups(config: ResolvedConfig, storage: StorageChoice) -> dict[str, str]:
    """Returns the input group of each weight of the layers."""
    make = functools.partial(Decoder, config.model_config, dtype=config.weight_dtype)
    model = jax.eval_shape(make, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = batch_shapes(config, packed=config.packed)
    return actjax.input_groups(loss_function(config, storage), model, batch, key)


def batch_shapes(config: RunConfig, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one micro-batch.

    Args:
      config: the settings.
      packed: whether several examples share a sequence.
    """
    shape = (config.batch_size // config.accumulate, config.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(shape, "float32")}
    return {**batch, "segments": tokens} if packed else batch


def whole_batch_shapes(config: ResolvedConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batch of a step, over all micro-batches."""
    return batch_shapes(dataclasses.replace(config, accumulate=1), packed=config.packed)


def init_state(recipe: Recipe, model: Decoder | None = None) -> TrainState:
    """Returns the state before the first step.

    Args:
      recipe: the run.
      model: the pretrained decoder, which is trained or whose adapters are; None draws one.
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
    calibration = None
    if recipe.method.calibrates:
        calibration = calibration_zeros(recipe.model_config, recipe.storage)
    return TrainState(jnp.zeros((), jnp.int32), trained, optimizer, frozen, calibration)


def model_of(recipe: Recipe, state: TrainState, key: jax.Array | None = None) -> Decoder:
    """Returns the decoder that is trained, with its adapters if there are any.

    Args:
      recipe: the run.
      state: the training state.
      key: randomness of the adapters' dropout; None for no dropout.
    """
    if recipe.lora is None:
        return state.model
    return attach(state.frozen, state.model, recipe.lora, key)


Loss = Callable[..., jax.Array]
"""From what is trained, a batch, a key and a `Context` (optional if empty) to a float32 scalar."""


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
      lora: the adapters; None if all weights are trained.
      dropout: whether the adapters' dropout is applied.
    """

    def loss(trained: Any, batch: Batch, key: jax.Array, context: Context = Context()) -> jax.Array:
        model: Decoder = trained
        if lora is not None:
            dropout_key = jax.random.fold_in(key, _DROPOUT) if dropout else None
            model = attach(context.frozen, trained, lora, dropout_key)
        return model.loss(
            inputs_of(batch, config.method),
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
"""Folded into the key of a step for the adapters' dropout; above every site and layer number."""

TrainStep = Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(recipe: Recipe) -> TrainStep:
    """Returns a function from state and batch to the next state and metrics.

    Metrics are float32 scalars: `loss` (nats per token), `grad_norm` (before clipping) and
    `update_norm` (norm of the change of the weights). If all are finite, so is the next state.
    """
    step = _step(recipe)
    return lambda state, batch: step(state, batch, None)


def make_refresh_step(recipe: Recipe) -> TrainStep:
    """Returns a function from state, batch and due layers to the next state and metrics.

    It refreshes the subspace of the due layers (`Recipe.due_layers`) and takes a step. It is a
    separate program, so that the workspace of a refresh is not part of every step's.
    """
    step, subspace = _step(recipe), recipe.subspace
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
    """Returns the key of a step's codecs. A resumed run gets the same keys."""
    run_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return jax.random.fold_in(run_key, step)


def _step(recipe: Recipe) -> Callable:
    """Returns a function from state, batch and due layers (None: no refresh) to state, metrics."""
    return _in_backward_step(recipe) if recipe.config.in_backward else _ordinary_step(recipe)


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
        return _advanced(state, model, optimizer_state), metrics

    return step


def _advanced(state: TrainState, model: Any, optimizer: Any) -> TrainState:
    return dataclasses.replace(state, step=state.step + 1, model=model, optimizer=optimizer)


def gradient_function(recipe: Recipe, state: TrainState, refresh: bool) -> Callable:
    """Returns a function from the arguments of a `Loss` to loss and gradient.

    Args:
      recipe: the run.
      state: holds the bases in which inputs are stored between refreshes.
      refresh: whether inputs are stored so that new bases can be taken from the gradient.
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
        return model.embed(inputs_of(inputs["batch"], config.method), config.compute_dtype)

    def layer(block: Any, x: jax.Array, inputs: dict[str, Any], key: jax.Array) -> jax.Array:
        return run_layer(block, x, inputs["positions"], key)

    def after(model: Decoder, x: jax.Array, inputs: dict[str, Any]) -> jax.Array:
        batch = inputs["batch"]
        return model.loss_after(x, batch["targets"], mask=batch["mask"], z_loss=config.z_loss)

    clip = config.optimizer.clip
    return actjax.optim.in_backward(
        *(before, layer, after, recipe.optimizer),
        clip=clip,
        fetch=fetch_first,
        accumulate=config.accumulate,
    )


def _in_backward_step(recipe: Recipe) -> Callable:
    config = recipe.config
    update = _in_backward(recipe)

    def step(state: TrainState, batch: Batch, due: jax.Array | None):
        inputs, keys, weights = _micro_batches(config, batch, step_key(config, state.step))
        refresh = False if due is None else due
        model, optimizer_state, loss, update_norm = update.step(
            state.model, state.optimizer, inputs, keys, refresh, weights
        )
        metrics = {
            "loss": loss,
            "grad_norm": optimizer_state.grad_norm,
            "update_norm": update_norm,
            "clip_error": optimizer_state.clip_error,
        }
        return _advanced(state, model, optimizer_state), metrics

    return step


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
    micro = jax.tree.map(lambda x: _split_interleaved(x, count), batch)
    keys = jax.vmap(lambda key: layer_keys(model, key))(jax.random.split(key, count))
    return jax.vmap(inputs_of_one)(micro), keys, _shares_of_tokens(micro)


def _shares_of_tokens(micro: Batch) -> jax.Array:
    """Returns the share of the unmasked tokens that each micro-batch has, [count]."""
    tokens = micro["mask"].astype(jnp.float32).sum((1, 2))
    return tokens / jnp.maximum(tokens.sum(), 1)


def _accumulated(loss_and_grad: Callable, count: int) -> Callable:
    """Returns `loss_and_grad` as the mean over `count` micro-batches, run one after the other.

    Micro-batches are weighted by their unmasked tokens, which gives the result of the whole batch.
    """
    if count == 1:
        return loss_and_grad

    def run(model: Any, batch: Batch, key: jax.Array, context: Context = Context()):
        micro = jax.tree.map(lambda x: _split_interleaved(x, count), batch)
        keys = jax.random.split(key, count)
        return actjax.accumulate(
            lambda model, slices: loss_and_grad(model, *slices, context),
            model,
            (micro, keys),
            weights=_shares_of_tokens(micro),
        )

    return run


def _split_interleaved(x: jax.Array, count: int) -> jax.Array:
    """Splits [B, ...] into [count, B / count, ...]; each part has rows of every device's shard."""
    return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)


def make_eval_step(recipe: Recipe) -> Callable[..., jax.Array]:
    """Returns a function from what is trained, a batch and a `Context` to the loss in nats.

    The loss is exact, without dropout, and summed over the unmasked tokens.
    """
    exact = dataclasses.replace(recipe.config, z_loss=0.0)
    loss = loss_function(exact, Storage(), recipe.lora, dropout=False)

    def eval_step(model: Any, batch: Batch, context: Context = Context()) -> jax.Array:
        exact = dataclasses.replace(context, calibration=None)
        mean = loss(model, batch, jax.random.key(0), exact)
        return mean * batch["mask"].astype(jnp.float32).sum()

    return eval_step
