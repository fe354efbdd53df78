"""Masks of attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask of attention: the positions that each position sees.

    Attributes:
      causal: as for `attention`.
      window: as for `attention`.
    """

    causal: bool
    window: int | None

    def sees(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Returns whether positions `rows` see positions `columns`; their shapes broadcast."""
        seen = columns <= rows if self.causal else jnp.ones((), bool)
        return seen if self.window is None else seen & (rows - columns < self.window)

    def first_key_block(self, i: jax.Array, block: int) -> jax.Array | int:
        """Returns the first block of keys that block i of queries sees."""
        if self.window is None:
            return 0
        return jnp.maximum(0, i * block - self.window + 1) // block

    def query_blocks(self, j: jax.Array, block: int, count: int) -> tuple[Any, Any]:
        """Returns which of `count` blocks of queries see block j of keys: first and end."""
        first = j if self.causal else 0
        if self.window is None:
            return first, count
        return first, jnp.minimum(count, ((j + 1) * block + self.window - 2) // block + 1)
