"""Arguments that the programs of `adam_4bit` for NVIDIA GPUs cannot take."""

from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels.adam_4bit.reference import TILE, Second


def refuses(
    grad: jax.Array, mu: SignedFourBit, nu: Second | None, *args: Any, **hyper: float
) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del args, hyper
    if grad.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes gradients of 16 or 32 bits, got {grad.dtype}"
    if isinstance(nu, RankOneFourBit) and mu.group != nu.group:
        return f"takes groups of one size, got {mu.group} and {nu.group}"
    if mu.group & (mu.group - 1) or not 32 <= mu.group <= TILE:
        return f"takes groups of 32, 64, ... {TILE} values, got {mu.group}"
    for moment in (mu, nu):
        if moment is not None and jnp.dtype(moment.dtype) != jnp.float32:
            return f"takes moments of float32, got {moment.dtype}"
    return f"takes arrays that are not empty, got {grad.shape}" if grad.size == 0 else None
