"""The definition of `adam_8bit`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import Blockwise


def adam_8bit(
    grad: jax.Array,
    mu: Blockwise,
    nu: Blockwise,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> tuple[jax.Array, Blockwise, Blockwise]:
    """As `actjax.kernels.adam_8bit.api.adam_8bit`."""
    g = grad.astype(jnp.float32)
    first = b1 * mu.decode().astype(jnp.float32) + (1 - b1) * g
    second = b2 * nu.decode().astype(jnp.float32) + (1 - b2) * (g * g)
    root = jnp.sqrt(second / corrections[1] + eps_root)
    update = (first / corrections[0]) / (root + eps)
    return update, mu.encode(first), nu.encode(second)
