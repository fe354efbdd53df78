"""Arrays that are one layer of a stack, which kernels read and write where they are.

A loop over layers would otherwise copy each layer out of its stack before a kernel reads it, and
into its stack after a kernel has written it: XLA does not look into a kernel.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


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
        """Returns the layer as an array of its own."""
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


class _Ref:
    """A reference to a whole stack, which a kernel reads as one to its layer.

    A stack has the shape [layers * n, ...] for layers of shape [n, ...].
    """

    def __init__(self, ref: Any, layer: Layer, index: Any) -> None:
        self._ref, self._first = ref, index * layer.shape[0]
        self.shape, self.dtype = layer.shape, layer.dtype

    @property
    def at(self) -> "_Ref":
        return self

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        first, *others = place
        return self._ref.at[(first + self._first, *others)]


Result = jax.ShapeDtypeStruct | Layer


def result_like(x: Any) -> Result:
    """Returns the shape of a result that replaces an operand, or its `Layer`."""
    return x if isinstance(x, Layer) else jax.ShapeDtypeStruct(x.shape, x.dtype)


def pallas_call(
    kernel: Callable[..., None], *, out_shape: Sequence[Result], **options: Any
) -> Callable[..., list[Any]]:
    """Returns `pl.pallas_call(kernel, ...)`, whose operands and results may be layers of stacks.

    The kernel gets a reference to each layer, of which it uses `shape`, `dtype` and `at[...]` with
    an index for each axis.

    Args:
      kernel: as for `pl.pallas_call`.
      out_shape: shapes of the results; for a `Layer`, the result is written in its place, and is a
        `Layer` of the stack after that.
      **options: as for `pl.pallas_call`.
    """

    def call(*operands: Any) -> list[Any]:
        layers = [x for x in (*operands, *out_shape) if isinstance(x, Layer)]
        if not layers:
            return list(pl.pallas_call(kernel, out_shape=tuple(out_shape), **options)(*operands))
        arrays = [_flat(x) for x in operands]
        aliases = {}
        for number, result in enumerate(out_shape):
            if isinstance(result, Layer):
                place = _position(result, operands)
                if place is None:
                    place = len(arrays)
                    arrays.append(_flat(result))
                # The first operand is the index.
                aliases[1 + place] = number
        unread = len(arrays) - len(operands)

        def on_layers(index_ref: Any, *refs: Any) -> None:
            index = index_ref[0]
            inputs, outputs = refs[: len(operands)], refs[len(operands) + unread :]
            pairs = zip((*inputs, *outputs), (*operands, *out_shape), strict=True)
            kernel(*(_Ref(r, x, index) if isinstance(x, Layer) else r for r, x in pairs))

        shapes = [jax.ShapeDtypeStruct(_flat_shape(x), x.dtype) for x in out_shape]
        run = pl.pallas_call(
            on_layers, out_shape=tuple(shapes), input_output_aliases=aliases, **options
        )
        results = run(jnp.asarray(layers[0].index, jnp.int32)[None], *arrays)
        return [
            dataclasses.replace(x, stack=y.reshape(x.stack.shape)) if isinstance(x, Layer) else y
            for x, y in zip(out_shape, results, strict=True)
        ]

    return call


def _flat_shape(x: Any) -> tuple[int, ...]:
    if not isinstance(x, Layer):
        return x.shape
    first, *others = x.shape
    return len(x.stack) * first, *others


def _flat(x: Any) -> jax.Array:
    return x.stack.reshape(_flat_shape(x)) if isinstance(x, Layer) else x


def _position(result: Layer, operands: Sequence[Any]) -> int | None:
    """Returns which operand is the layer of a result; None if none is."""
    return next((i for i, x in enumerate(operands) if x is result), None)
