"""Weights whose input has dropout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import contract_tokens, matmul, matmul_transposed, product_dtype
from actjax.weights.base import StoredInput, WrappedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DroppedInput(WrappedWeight):
    """A weight [d, n] whose input has dropout: some entries are set to zero.

    The other weights of the same operator read the whole input.

    Attributes:
      weight: an array.
      key: selects the entries that are set to zero; both passes select the same.
      rate: share of the entries that are set to zero. The others are divided by `1 - rate`. Static.
    """

    weight: Any
    key: Any
    rate: float = dataclasses.field(metadata={"static": True})

    def drop(self, x: jax.Array) -> jax.Array:
        """Returns an input, or the cotangent of an input, with dropout applied."""
        is_kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(is_kept, x / (1 - self.rate), 0).astype(x.dtype)

    def times(self, x: jax.Array) -> jax.Array:
        return matmul(self.drop(x), self.weight.astype(x.dtype), dtype=product_dtype(x))

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        dx = matmul_transposed(dz, self.weight.astype(dz.dtype), product_dtype(dz))
        return self.drop(dx)

    def gradient(self, stored: StoredInput, dz: jax.Array) -> "DroppedInput":
        x = stored.value()
        if stored.is_in_basis:
            x = x.astype(dz.dtype)
        gradient = contract_tokens(self.drop(x), dz)
        return dataclasses.replace(self, weight=gradient.astype(self.dtype), key=None)
