"""Limits of the programs for GPUs that read and write activations."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def refuses_array(dtype: Any, shape: Sequence[int]) -> str | None:
    """Returns why programs cannot take an array; None if they can."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes floating point numbers of 16 or 32 bits, got {dtype}"
    return f"takes arrays that are not empty, got shape {tuple(shape)}" if 0 in shape else None
