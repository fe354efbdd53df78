"""The definition of `point_assignment`: plain JAX, never tuned."""

import math

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, matmul

_MAX_SCORES = 2**22
"""Largest number of entries of the [tokens, points] score matrix; tokens are cut into blocks."""


def point_assignment(
    x: jax.Array, points: jax.Array, *, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `actjax.kernels.point_assignment.api.point_assignment`."""
    dtype = accumulation_dtype(x.dtype)
    scaled, exponent, inverse_norm = normalized(points, x.dtype)

    def assign_token(token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        products = matmul(scaled, token)
        index = jnp.argmax(jnp.abs(products) * inverse_norm).astype(jnp.int32)
        alpha = products[index] * inverse_norm[index] ** 2
        if math.isinf(tolerance):
            kept = jnp.bool_(True)
        else:
            size = jnp.max(jnp.abs(token)).astype(dtype)
            unit = token.astype(dtype) / jnp.where(size > 0, size, 1)
            rest = unit - (alpha / jnp.where(size > 0, size, 1)) * scaled[index].astype(dtype)
            # A token that is not finite is kept, so that it is seen: it compares as false.
            kept = ~(jnp.linalg.norm(rest) > tolerance * jnp.linalg.norm(unit))
        return index, jnp.ldexp(alpha, -exponent[index]), kept

    tokens = x.reshape(-1, x.shape[-1])
    block = max(1, _MAX_SCORES // points.shape[0])
    results = jax.lax.map(assign_token, tokens, batch_size=min(block, tokens.shape[0]))
    return tuple(result.reshape(x.shape[:-1]) for result in results)  # type: ignore[return-value]


def normalized(points: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns points scaled to a largest entry in [0.5, 1), their exponents, and inverse norms.

    The scale is a power of two, so it is exact; the norms of huge or tiny points stay finite.

    Args:
      points: [k, d].
      dtype: dtype of the first result.

    Returns:
      [k, d], [k] and [k]; the inverse norm of a point of zeros is zero.
    """
    wide = accumulation_dtype(points.dtype)
    largest = jnp.max(jnp.abs(points), axis=-1).astype(wide)
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1], 0)
    scaled = jnp.ldexp(points.astype(wide), -exponent[:, None])
    square = jnp.sum(scaled**2, axis=-1)
    inverse_norm = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    return scaled.astype(dtype), exponent, inverse_norm
