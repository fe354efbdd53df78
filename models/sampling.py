"""Drawing the next token: temperature, top-k and nucleus (top-p) sampling."""

import math

import jax
import jax.numpy as jnp

Sampling = tuple[jax.Array, jax.Array, jax.Array]
"""Temperature, `top_p` and `top_k`, scalars."""


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling, limited: bool) -> jax.Array:
    """Returns a token for each row of logits, [B] int32.

    Args:
      logits: [B, V] in float32.
      keys: a key for each row, [B]; consumed.
      sampling: temperature, `top_p` and `top_k`.
      limited: whether `top_p` or `top_k` leave out any token. Static.
    """
    temperature, top_p, top_k = sampling
    logits = logits / temperature
    categorical = jax.vmap(jax.random.categorical)
    if not limited:
        return categorical(keys, logits).astype(jnp.int32)
    # By rank, not by a threshold: of equal logits the first are kept, and no more than asked for.
    order = jnp.argsort(-logits, axis=-1)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    size = logits.shape[-1]
    within = jnp.arange(size) < jnp.where(top_k > 0, top_k, size)
    logits = jnp.where(within, logits, -jnp.inf)
    probabilities = jax.nn.softmax(logits, axis=-1)
    above = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest token is always kept, whatever the rounding.
    allowed = (above < top_p) | (jnp.arange(size) == 0)
    ranks = categorical(keys, jnp.where(allowed, logits, -jnp.inf))
    return jnp.take_along_axis(order, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)


def keys_of_prompts(key: jax.Array | None, count: int) -> jax.Array:
    """Returns a key for each prompt, [count]. None gives keys that must not be drawn from."""
    key = jax.random.key(0) if key is None else key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim:
        if key.shape != (count,):
            raise ValueError(
                f"`key` must be one key, or one for each of the {count} `prompts`, got keys of"
                f" shape {key.shape}."
            )
        return key
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def keys_at_step(keys: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the keys of prompts, [B], folded with the number of a new token."""
    return jax.vmap(lambda key: jax.random.fold_in(key, step))(keys)


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    key: jax.Array | None,
) -> None:
    """Raises a ValueError for an argument of `generate` that is out of range."""
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(
            "`temperature` must be at least 0 and finite (0 takes the likeliest token), got"
            f" {temperature}."
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1, got {top_p}.")
    if top_k < 0:
        raise ValueError(f"`top_k` must be at least 0 (0 is no limit), got {top_k}.")
    if temperature > 0 and key is None:
        raise ValueError(
            f"`temperature` {temperature} draws random numbers, but got key=None: pass `key`, or"
            " temperature=0."
        )
