"""Division by scales that may be zero, huge or tiny."""

import jax
import jax.numpy as jnp


def over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, and `x` where the scale is zero."""
    # Two factors: the inverse of the largest scales underflows, that of the smallest overflows.
    small = jnp.where(scale < 2.0**-64, 2.0**64, 1)
    factor = jnp.where(scale > 2.0**64, 2.0**-64, small).astype(scale.dtype)
    inverse = 1 / jnp.where(scale > 0, scale * factor, 1)
    return x * factor * inverse
