"""Arrays that are one layer of a stack, which kernels read and write where they are.

A loop over layers would otherwise copy each layer out of its stack before a kernel reads it, and
into its stack after a kernel has written it: XLA does not look into a kernel.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """Layer `index` of a stack, with the methods of an array that kernels use.

    Attributes:
      stack: [layers, ...].
      index: int32 scalar.
    """

    stack: Any
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of the layer."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the layer."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the stack."""
        return self.stack.dtype

    def reshape(self, *shape: int) -> "Layer":
        """Returns the layer in another shape; no array moves."""
        known = math.prod(n for n in shape if n != -1)
        sizes = [self.size // known if n == -1 else n for n in shape]
        return dataclasses.replace(self, stack=self.stack.reshape(len(self.stack), *sizes))

    def value(self) -> jax.Array:
        """Returns a copy of the layer."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)

    def holding(self, value: "jax.Array | Layer") -> "Layer":
        """Returns the layer in a stack that holds `value` there; a `Layer` does already."""
        if isinstance(value, Layer):
            return value
        value = value.astype(self.dtype)
        stack = jax.lax.dynamic_update_index_in_dim(self.stack, value, self.index, 0)
        return dataclasses.replace(self, stack=stack)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """An array times a scalar, rounded to the dtype of the array: a gradient that is clipped.

    A kernel multiplies what it reads, so that the product is never written.

    Attributes:
      array: of any shape.
      factor: float32 scalar.
    """

    array: Any
    factor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the array."""
        return self.array.ndim

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return self.array.size

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.array.dtype

    def value(self) -> jax.Array:
        """Returns the product."""
        return scaled(value_of(self.array), self.factor)


def rows(x: Any) -> Any:
    """Returns an array or a `Layer` [..., d] as [T, d]."""
    return x.reshape(-1, x.shape[-1])


def split_scaled(x: Any) -> tuple[Any, list[jax.Array]]:
    """Returns the array of a `Scaled` and its factor, [1]; any other array with no factor."""
    return (x.array, [x.factor[None]]) if isinstance(x, Scaled) else (x, [])


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns `x` times a float32 scalar, rounded to the dtype of `x`."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def value_of(x: Any) -> Any:
    """Returns a `Layer` or a `Scaled` as an array, and any other object unchanged."""
    return x.value() if isinstance(x, Layer | Scaled) else x


def values_of(tree: Any) -> Any:
    """Returns a pytree with every `Layer` and `Scaled` in it as an array."""
    return jax.tree.map(value_of, tree, is_leaf=lambda x: isinstance(x, Layer | Scaled))


def is_layer_of_stack(x: Any) -> bool:
    """Returns whether `x` is a `Layer`: for `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Layer)


Result = jax.ShapeDtypeStruct | Layer


def result_like(x: Any) -> Result:
    """Returns the shape of a result that replaces an operand, or its `Layer`."""
    return x if isinstance(x, Layer) else jax.ShapeDtypeStruct(x.shape, x.dtype)
