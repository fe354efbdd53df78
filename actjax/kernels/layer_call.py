"""Programs of Pallas whose operands and results may be layers of stacks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from actjax.kernels.layers import Layer, Result


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
