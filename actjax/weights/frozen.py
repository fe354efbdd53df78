"""Weights without a gradient."""

import dataclasses
from typing import Any, ClassVar

import jax

from actjax._math.precision import matmul, matmul_transposed, product_dtype
from actjax.weights.base import StoredInput, Weight, WrappedWeight, shape_text, value_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FrozenWeight(WrappedWeight):
    """A weight [d, n] that has no gradient; none is computed.

    With a plain array only the compiler knows whether a gradient is wanted. If all weights of an
    operator are frozen, it keeps nothing of its input.

    Attributes:
      weight: an array, or an `actjax.NF4Weight`, which is decoded next to each of its uses.
    """

    weight: Any
    needs_input: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"FrozenWeight({shape_text(self.weight)})"

    @property
    def T(self) -> "FrozenWeight":  # noqa: N802
        """The transpose, frozen too."""
        return FrozenWeight(self.weight.T)

    @property
    def at(self) -> Any:
        """As `at` of the array: rows of an embedding."""
        return self.weight.at

    def __getitem__(self, index: Any) -> Any:
        # `param[...]` is how nnx reads the value of a variable. Other indices are rows of an
        # embedding.
        return self if index is Ellipsis else self.weight[index]

    def without_variables(self) -> Weight:
        inner = value_of(self.weight)
        if isinstance(inner, Weight) and len(inner.parts()) > 1:
            raise TypeError(
                f"the weight of a {type(inner).__name__} is frozen already:"
                f" pass the {type(inner).__name__} itself, not in a FrozenWeight."
            )
        return frozen(inner)

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the weight as an array [d, n]; a quantized weight is decoded here."""
        return self.weight.astype(dtype)

    def times(self, x: jax.Array) -> jax.Array:
        return matmul(x, self.astype(x.dtype), dtype=product_dtype(x))

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        # Without the barrier XLA could keep the array that the forward pass decoded.
        weight, dz = jax.lax.optimization_barrier((self.weight, dz))
        return matmul_transposed(dz, weight.astype(dz.dtype), product_dtype(dz))

    def gradient(self, stored: StoredInput, dz: jax.Array) -> None:
        del stored, dz


def frozen(weight: Any) -> FrozenWeight:
    """Returns a weight as a `FrozenWeight`; a `FrozenWeight` unchanged."""
    return weight if isinstance(weight, FrozenWeight) else FrozenWeight(weight)
