"""Division by scales that may be zero, huge or tiny."""

import jax
import jax.numpy as jnp


def over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, and `x` where the scale is zero."""
    factor, inverse = inverse_of(scale)
    return x * factor * inverse


def inverse_of(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two factors whose product is `1 / scale`, or 1 where the scale is zero.

    The inverse of the largest scales underflows, that of the smallest overflows.
    """
    small = jnp.where(scale < 2.0**-64, 2.0**64, 1)
    factor = jnp.where(scale > 2.0**64, 2.0**-64, small).astype(scale.dtype)
    # A factor of 2^64 at zero would not be 1.
    inverse = 1 / jnp.where(scale > 0, scale * factor, factor)
    return factor, inverse
