"""AdamW through optax, with moments in a chosen dtype and, if chosen, in a subspace."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import actjax
from actjax.optim import SubspaceTransformation
from train.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns linear warm-up to the peak, then a cosine to its final share at `steps`."""
    warmup = max(1, min(config.warmup_steps, steps // 2))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / warmup,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    subspace: Callable[..., SubspaceTransformation] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
) -> optax.GradientTransformation:
    """Returns AdamW with weight decay of matrices, for `actjax.optim.apply`.

    It does not clip: the global norm takes all layers, and the transform sees one at a time.

    Args:
      config: its settings, with a resolved `moment_dtype`.
      steps: length of the run.
      subspace: `actjax.optim.subspace` without its transforms; None for full-rank moments.
      rounding: of the weights, as in a resolved `weight_rounding`.
      seed: of stochastic rounding.
    """
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2)
    moments = {
        "float32": store_states_as(adam, jnp.dtype("float32")),
        "bfloat16": store_states_as(adam, jnp.dtype("bfloat16")),
        "8bit": actjax.optim.scale_by_adam_8bit(
            b1=config.beta1, b2=config.beta2, block=moment_block
        ),
    }[config.moment_dtype]
    outer = full_space_updates(config, steps)
    tx = optax.chain(moments, outer) if subspace is None else subspace(moments, outer=outer)
    round_weights = {
        "nearest": lambda tx: tx,
        "stochastic": functools.partial(actjax.optim.stochastic_rounding, seed=seed),
        "compensated": functools.partial(actjax.optim.compensated, seed=seed),
    }[rounding]
    return round_weights(tx)


_BLOCKS, _DEVICES = (256, 128, 64, 32), 64


def moment_block(shape: tuple[int, ...]) -> int:
    """Returns how many values of a moment in 8 bits share a scale: 256 if possible.

    Devices divide the rows of a matrix, or its columns between blocks. Rows that few devices can
    divide (5461 in `llama_1b`) get shorter blocks, if more devices can divide the columns then.
    """
    rows, columns = (1, *shape)[-2:]

    def devices(block: int) -> int:
        return max(math.gcd(rows, _DEVICES), math.gcd(columns // block, _DEVICES)
                   if columns % block == 0 else 1)  # fmt: skip

    return max(_BLOCKS, key=lambda block: (devices(block), block))


def full_space_updates(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the transform after Adam's moments: weight decay of matrices, and learning rate."""
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
        optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
    )


def store_states_as(
    inner: optax.GradientTransformation, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Wraps a transform so that its floating point arrays are stored in `dtype` between steps.

    The update is computed in float32 for all dtypes of gradients and weights: optax would compute
    the second moment of a bfloat16 gradient in bfloat16, whose 8 bits of precision cannot represent
    a decay of 0.999.

    Args:
      inner: the transform.
      dtype: dtype of its states between steps.
    """

    def init(params: optax.Params) -> optax.OptState:
        return _cast(inner.init(params), dtype)

    def update(updates, state, params=None):
        wide = (_cast(tree, jnp.dtype(jnp.float32)) for tree in (updates, state, params))
        updates, state = inner.update(*wide)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(tree, dtype: jnp.dtype):
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _is_matrix(params: optax.Params):
    """Returns a mask of the matrices of a layer or of the other parameters."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
