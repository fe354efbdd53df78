"""Weights on their way to `actjax.linear` that are more than an array: pytrees around one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


class WrappedWeight:
    """What is asked of a weight, answered by the one that is wrapped.

    Attributes:
      weight: [d, n].
    """

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FrozenWeight(WrappedWeight):
    """A weight [d, n] that has no gradient, and none is computed.

    With plain arrays, whether a gradient is wanted is known to nobody but the compiler.

    Attributes:
      weight: an array, or an `actjax.NF4Weight`, which is decoded next to each of its uses.
    """

    weight: Any

    def __repr__(self) -> str:
        return f"FrozenWeight({shape_text(self.weight)})"

    @property
    def T(self) -> "FrozenWeight":  # noqa: N802
        """The transpose, frozen too."""
        return FrozenWeight(self.weight.T)

    def __getitem__(self, index: Any) -> Any:
        # `param[...]` is how nnx reads the value of a variable; else these are rows of embeddings.
        return self if index is Ellipsis else self.weight[index]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DroppedInput(WrappedWeight):
    """A weight [d, n] before which its input, and no other's, is partly set to zero (dropout).

    Attributes:
      weight: the array.
      key: which entries of the input; the same in both passes.
      rate: share of the entries that are zero; the others are divided by `1 - rate`. Static.
    """

    weight: Any
    key: Any
    rate: float = dataclasses.field(metadata={"static": True})

    def drop(self, x: jax.Array) -> jax.Array:
        """Returns an input, or the cotangent of one, with some entries zero."""
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


def frozen(weight: Any) -> FrozenWeight:
    """Returns a weight that has no gradient, whether it was frozen before or not."""
    return weight if isinstance(weight, FrozenWeight) else FrozenWeight(weight)


def array_of(weight: Any, dtype: Any) -> jax.Array:
    """Returns the numbers of a weight; what is in few bits is decoded here, next to its use."""
    return (weight.weight if isinstance(weight, FrozenWeight) else weight).astype(dtype)


def shape_text(x: Any) -> str:
    """Returns what an array is, for a reader: its dtype and shape, and none of its numbers."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return repr(x)
    return f"{x.dtype}{list(x.shape)}"
