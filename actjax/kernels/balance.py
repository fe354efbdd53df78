"""Means and deviations of channels, which make the values of a token alike before it is encoded.

In a trained transformer some channels of keys, gates and residual streams have means and deviations
many times those of others. A group then spends its levels on the difference between its channels.
`y = (x - mean) / spread` removes it. With the spread `sqrt(deviation)` and white noise in `y`, as a
rotation gives it, the squared error of `x` is least: noise of power `mean(y²)` in each channel of
`y` is an error of `Σ spread² · Σ deviation² / spread²`, least by the inequality of Cauchy and
Schwarz if `spread²` is proportional to `deviation`.
"""

import math
from typing import cast

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype
from actjax.kernels.format import ScaleDtype

_LEAST = 2.0**-12
"""Least deviation of a channel, relative to the largest: dividing by less only adds noise."""


def balance_of(x: jax.Array, dtype: ScaleDtype) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the spread of each channel of `x` [..., d], in stored form [d] each.

    The first tokens of a sequence can be a thousand times larger than all others. Tokens are
    therefore weighted by the inverse of their norm (a step of Weiszfeld's algorithm for the
    geometric median, 1937), so that no token counts for more than its direction.

    Args:
      x: activations.
      dtype: dtype of the results; bfloat16 is returned as its bits, uint16.
    """
    tokens = x.astype(accumulation_dtype(x.dtype)).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    # Numbers within one, so that no square overflows.
    largest = jnp.max(jnp.abs(tokens), initial=0)
    tokens = tokens / jnp.where(largest > 0, largest, 1)
    mean = _weights(tokens) @ tokens
    apart = tokens - mean
    deviation = jnp.sqrt(_weights(apart) @ jnp.square(apart))
    widest = jnp.max(deviation, initial=0)
    # At most one, so that only numbers near the largest of the dtype overflow when divided.
    relative = jnp.where(widest > 0, deviation / jnp.where(widest > 0, widest, 1), 1)
    spread = jnp.sqrt(jnp.maximum(relative, _LEAST))
    return _stored(mean * largest, dtype), _stored(spread, dtype)


def _weights(tokens: jax.Array) -> jax.Array:
    """Returns weights [T] that add up to one, proportional to the inverse norms; 0 for zeros."""
    norms = jnp.sqrt(jnp.sum(jnp.square(tokens), axis=-1))
    inverse = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
    total = jnp.sum(inverse)
    return inverse / jnp.where(total > 0, total, 1)


def _stored(x: jax.Array, dtype: ScaleDtype) -> jax.Array:
    rounded = x.astype(dtype)
    # As bits, because XLA for CPUs holds stacks of 16-bit floats in 32 bits.
    return cast(jax.Array, rounded if dtype == "float32" else rounded.view(jnp.uint16))
