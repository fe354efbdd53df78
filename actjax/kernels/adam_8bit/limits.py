"""Arguments that the programs of `adam_8bit` for NVIDIA GPUs cannot take."""

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import Blockwise

LARGEST_BLOCK = 4096
"""Values that share a scale at most: registers hold all of them."""


def refuses(
    grad: jax.Array, mu: Blockwise, nu: Blockwise, corrections: jax.Array, **hyper: float
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del corrections, hyper
    if grad.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes gradients of 16 or 32 bits, got {grad.dtype}"
    if mu.block != nu.block or mu.block > LARGEST_BLOCK:
        return f"takes blocks of one size up to {LARGEST_BLOCK}, got {mu.block}, {nu.block}"
    if (mu.codes.dtype, nu.codes.dtype) != (jnp.int8, jnp.uint8):
        return f"takes `mu` in int8 and `nu` in uint8, got {mu.codes.dtype} and {nu.codes.dtype}"
    if {jnp.dtype(mu.dtype), jnp.dtype(nu.dtype)} != {jnp.dtype(jnp.float32)}:
        return f"takes moments of float32, got {mu.dtype} and {nu.dtype}"
    return f"takes arrays that are not empty, got {grad.shape}" if grad.size == 0 else None
