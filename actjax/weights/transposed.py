"""Weights whose array is the transpose."""

import dataclasses
from typing import Any

import jax

from actjax._math.precision import matmul, matmul_transposed, product_dtype
from actjax.weights.base import StoredInput, Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedWeight(Weight):
    """A weight [d, n] that is held as an array [n, d], as by Equinox.

    A transposed array would be computed in the forward pass, and so be stored for the backward pass
    beside the parameter itself.

    Attributes:
      array: [n, d].
    """

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.array.shape[::-1]

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.array.dtype

    def times(self, x: jax.Array) -> jax.Array:
        return matmul_transposed(x, self.array.astype(x.dtype), product_dtype(x))

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        return matmul(dz, self.array.astype(dz.dtype), dtype=product_dtype(dz))

    def gradient(self, stored: StoredInput, dz: jax.Array) -> "TransposedWeight":
        return TransposedWeight(stored.weight_grad(dz, self.dtype).T)
