"""The embedding of tokens, on one device and divided over several."""

import jax
import jax.numpy as jnp

from models.sharding import BATCH, WEIGHTS, constrain, split_residual

_ON_THE_WAY = (("data", None, ("tensor", *WEIGHTS)), (BATCH, None, ("tensor", "seq")),
               (BATCH, "seq", "tensor"))  # fmt: skip
"""Divisions of looked up rows: first as the table is, so that each device has some features of all
tokens. From there to `split_residual`, and back, XLA moves one mesh axis at a time."""


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of tokens, [B, S, d]; zeros for a token outside the vocabulary, such as -1.

    On several devices the table is divided by features, and is not gathered: each device looks up
    its features of all tokens, and then gives features away for the tokens of others. The backward
    pass goes the same way back. Both move an activation of a device, whatever the vocabulary.

    Args:
      table: [V, d].
      tokens: [B, S] integers.
    """
    return split_residual(_rows(table, tokens))


@jax.custom_vjp
def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    tokens = constrain(tokens, "data", None)
    rows = table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    for division in _ON_THE_WAY:
        rows = constrain(rows, *division)
    return rows


def _rows_fwd(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple]:
    return _rows(table, tokens), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _rows_bwd(residuals: tuple, dx: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = residuals
    dx = split_residual(dx)
    for division in reversed(_ON_THE_WAY):
        dx = constrain(dx, *division)
    tokens = constrain(tokens, "data", None)
    zeros = jnp.zeros((like.shape[0], dx.shape[-1]), like.dtype)
    return zeros.at[tokens].add(dx, mode="drop", wrap_negative_indices=False), None


_rows.defvjp(_rows_fwd, _rows_bwd)
