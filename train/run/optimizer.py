"""The optimizers of the programs: moments in a chosen dtype and, if chosen, in a subspace."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import actjax
from actjax._core.paths import map_named
from actjax.optim import SubspaceTransformation
from actjax.optim.paths import map_state
from actjax.optim.states.stored import FIRST_MOMENTS, SECOND_MOMENTS
from models.config import ModelConfig
from models.padding import keeps_padding
from train.settings.config import OptimizerConfig

_LAST_RATE = 0.1
"""Learning rate of the last step, as a share of the peak."""


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns linear warm-up to the peak, then a cosine to a tenth of it at `steps`."""
    warmup = warmup_of(config.warmup_steps, steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / warmup,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.learning_rate * _LAST_RATE,
    )


def warmup_of(asked: int, steps: int) -> int:
    """Returns the steps of warm-up: those that are asked for, at most half of the run."""
    return max(1, min(asked, steps // 2))


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    subspace: Callable[..., SubspaceTransformation] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    model: ModelConfig | None = None,
) -> optax.GradientTransformation:
    """Returns an optimizer with weight decay of matrices, for `actjax.optim.apply`.

    It does not clip: the global norm takes all layers, and the transform sees one at a time.

    Args:
      config: its settings, with a resolved `moment_dtype`.
      steps: length of the run.
      subspace: `actjax.optim.subspace` without its transforms; None for full-rank moments.
      rounding: of the weights, as in a resolved `weight_rounding`.
      seed: of stochastic rounding.
      model: dimensions of the model, whose padding stays zero; None for weights without padding.
    """
    outer = full_space_updates(config, steps, model)
    if subspace is not None:
        tx = subspace(_moments(config), outer=outer)
    else:
        tx = optax.chain(_moments(config), outer)
    return actjax.optim.stochastic_rounding(tx, seed=seed) if rounding == "stochastic" else tx


def _moments(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transform of a gradient, before weight decay and learning rate."""
    b1, b2 = config.betas
    if config.optimizer == "lion":
        return _stored(optax.scale_by_lion(b1, b2), config.stored_dtype)
    if config.optimizer == "sgd":
        return _stored(optax.trace(b1), config.stored_dtype)
    if config.optimizer == "adafactor":
        adafactor = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )
        return _stored(adafactor, "float32")
    if config.optimizer == "muon":
        # All matrices are [in, out].
        numbers = functools.partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers())
        muon = optax.contrib.scale_by_muon(beta=b1, weight_dimension_numbers=numbers)
        orthogonal = optax.chain(
            _stored(muon, config.stored_dtype),
            # Updates get the mean square of those of AdamW (Liu et al., 2025).
            optax.stateless(
                lambda u, _: jax.tree.map(lambda x: 0.2 * math.sqrt(max(x.shape[-2:])) * x, u)
            ),
        )

        def label(name: str, x: jax.Array) -> str:
            return "muon" if name.startswith("layers.") and x.ndim >= 2 else "adam"

        adam = _adam(0.9, b2, config)
        labels = functools.partial(map_named, label)
        return optax.partition({"muon": orthogonal, "adam": adam}, labels)
    return _adam(b1, b2, config)


def _adam(b1: float, b2: float, config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the moments of Adam."""
    if config.factored_second_moment and config.stored_dtype == "4bit":
        return actjax.optim.scale_by_factored_adam_4bit(b1=b1, b2=b2, group=moment_group)
    if config.factored_second_moment:
        return _stored(actjax.optim.scale_by_factored_adam(b1, b2), config.stored_dtype)
    if config.stored_dtype == "8bit":
        return actjax.optim.scale_by_adam_8bit(b1=b1, b2=b2, block=moment_block)
    if config.stored_dtype == "4bit":
        return actjax.optim.scale_by_adam_4bit(b1=b1, b2=b2, group=moment_group)
    return _stored(optax.scale_by_adam(b1=b1, b2=b2), config.stored_dtype)


def _stored(inner: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """Returns a transform whose moments are stored in a `moment_dtype` between steps."""
    if dtype == "8bit":
        return actjax.optim.eight_bit(inner, block=moment_block)
    if dtype == "4bit":
        return actjax.optim.four_bit(inner, group=moment_group)
    return store_states_as(inner, jnp.dtype(dtype))


_BLOCKS, _GROUPS, _DEVICES = (256, 128, 64, 32), (128, 64, 32), 64


def moment_group(shape: tuple[int, ...]) -> int:
    """Returns how many values of a moment in 4 bits share a scale: 128 if possible."""
    return _most_divisible(shape, _GROUPS)


def moment_block(shape: tuple[int, ...]) -> int:
    """Returns how many values of a moment in 8 bits share a scale: 256 if possible."""
    return _most_divisible(shape, _BLOCKS)


def _most_divisible(shape: tuple[int, ...], blocks: tuple[int, ...]) -> int:
    """Returns the block with which most devices can divide a moment; of several, the largest.

    Devices divide the rows of a matrix, or its columns between blocks. Rows that few devices can
    divide (an odd vocabulary) get shorter blocks, if more devices can divide the columns then.
    """
    rows, columns = (1, *shape)[-2:]

    def devices(block: int) -> int:
        return max(math.gcd(rows, _DEVICES), math.gcd(columns // block, _DEVICES)
                   if columns % block == 0 else 1)  # fmt: skip

    return max(blocks, key=lambda block: (devices(block), block))


def full_space_updates(
    config: OptimizerConfig, steps: int, model: ModelConfig | None = None
) -> optax.GradientTransformation:
    """Returns the transform after Adam's moments: weight decay of matrices, and learning rate.

    Args:
      config: settings.
      steps: length of the run.
      model: as for `make_optimizer`.
    """
    kept = []
    if model is not None and model.stored_ffn_size != model.ffn_size:
        kept = [keeps_padding(model)]
    return optax.chain(
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params)
        ),
        optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
        *kept,
    )


def store_states_as(
    inner: optax.GradientTransformation, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Wraps a transform so that its moments are stored in `dtype` between steps.

    The update is computed in float32 for all dtypes of gradients and weights: optax would compute
    the second moment of a bfloat16 gradient in bfloat16, whose 8 bits of precision cannot represent
    a decay of 0.999.

    Args:
      inner: the transform.
      dtype: dtype of its moments between steps; the rest of its state is not cast.
    """

    def narrow(state: optax.OptState, params: optax.Params) -> optax.OptState:
        def cast(fields: list[str], _: str | None, x: jax.Array) -> jax.Array:
            is_moment = any(field in (*FIRST_MOMENTS, *SECOND_MOMENTS) for field in fields)
            return x.astype(dtype) if is_moment and jnp.issubdtype(x.dtype, jnp.floating) else x

        return map_state(cast, state, params)

    def init(params: optax.Params) -> optax.OptState:
        return narrow(inner.init(_wide(params)), params)

    def update(updates, state, params=None):
        shapes = updates
        updates, state, params = (_wide(tree) for tree in (updates, state, params))
        updates, state = inner.update(updates, state, params)
        return updates, narrow(state, shapes)

    return optax.GradientTransformation(init, update)


def _wide(tree):
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
