"""AdamW through optax, its moments in a dtype of the user's choice."""

import jax
import jax.numpy as jnp
import optax

from train.config import OptimizerConfig
from train.sharding import entry_name


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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping by global norm, then AdamW, with decay on matrices alone."""
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )
    clip = optax.clip_by_global_norm(config.clip)
    return store_states_as(optax.chain(clip, adamw), jnp.dtype(config.moment_dtype))


def store_states_as(
    inner: optax.GradientTransformation, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Wraps a transform so that its floating point arrays are stored in `dtype` between steps.

    The update itself is computed in float32, whatever the dtype of gradients and weights: optax
    would take the second moment of a bfloat16 gradient in bfloat16, whose 8 bits of precision
    cannot hold a decay of 0.999.

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
    """Marks what decays. The scales of norms, stacked over layers, have a leading axis too."""

    def decays(path: tuple, leaf: jax.Array) -> bool:
        stacked = any(entry_name(entry) == "layers" for entry in path)
        return leaf.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(decays, params)
