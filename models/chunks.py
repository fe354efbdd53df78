"""Runs long sequences in chunks: the memory of a chunk is free when the next one begins."""

import math
from collections.abc import Callable
from typing import Any

import jax

import actjax
from models.sharding import BATCH, automatic_axes, axes_of, constrain, split_residual

TOKENS = 16_384
"""Tokens of a chunk on each device: enough for matrix products at full speed."""


def in_chunks(fun: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """Returns `fun(x)` of a function that treats tokens separately.

    If a device has more than `TOKENS` tokens, `fun` runs on about as many at a time, in the forward
    pass and again in the backward pass, so that only `x` is stored. Adapters with dropout drop the
    same places of each chunk.

    Args:
      fun: from [B, S, d] to a pytree of arrays [B, S, n]. It may close over weights.
      x: a residual stream, divided as by `models.sharding.split_residual`.
    """
    axes = automatic_axes()
    rows = math.prod(axes.get(axis, 1) for axis in axes_of(BATCH))
    shared, parts = axes.get("tensor", 1), axes.get("tensor", 1) * axes.get("seq", 1)
    batch, length = x.shape[:2]
    # Devices along `tensor` compute the same tokens, each some of their features.
    chunk = max(1, TOKENS * rows // (max(batch, rows) * shared))
    if length % parts or length // parts <= chunk:
        return fun(x)

    def run(x: jax.Array) -> Any:
        y = fun(split_residual(x.reshape(batch, -1, x.shape[-1])))
        return jax.tree.map(lambda y: _divided(y, parts), y)

    run = actjax.checkpoint(run, actjax.Exact(), chunk=chunk, axis=2, name="input of chunks")
    return jax.tree.map(
        lambda y: split_residual(y.reshape(batch, length, -1)), run(_divided(x, parts))
    )


def _divided(x: jax.Array, parts: int) -> jax.Array:
    """Returns [B, S, n] as [B, parts, S / parts, n], so that a chunk has tokens of each device."""
    x = x.reshape(x.shape[0], parts, -1, x.shape[-1])
    return constrain(x, BATCH, ("seq", "tensor"), None, None)
