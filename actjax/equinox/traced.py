"""Convolutions, group norms and recurrent cells of Equinox that store codes.

`actjax.compress_residuals` traces the layer of Equinox and stores what its backward pass reads: the
input of a convolution or a norm; input, state and gates of a cell.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from actjax._core.tokenwise import tokenwise
from actjax.codecs import Codec
from actjax.equinox.layers import Coded
from actjax.residuals.function import compress_residuals


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A layer as a function of examples, each flattened to [d], and of its parameters.

    Attributes:
      call: from a layer and its inputs to its outputs.
      layer: structure of the layer.
      statics: its leaves that are not arrays, with None in the place of arrays.
      inputs: structure of its inputs.
      shapes: their shapes and dtypes.
      codec: how arrays are stored.
      key: name of the random number generator of the key; None without a key.
    """

    call: Callable[..., Any]
    layer: Any
    statics: tuple[Any, ...]
    inputs: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    codec: Codec
    key: Any

    def __call__(self, x: jax.Array, /, *shared: jax.Array) -> jax.Array:
        arrays, key = shared, None
        if self.key:
            *arrays, words = shared
            key = jax.random.wrap_key_data(words, impl=self.key)
        run = compress_residuals(self._run, self.codec, activations=0, key=key)
        y = run(x.reshape(-1, x.shape[-1]), *arrays)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _run(self, examples: jax.Array, *arrays: jax.Array) -> jax.Array:
        left = iter(arrays)
        leaves = [next(left) if x is None else x for x in self.statics]
        layer = jax.tree.unflatten(self.layer, leaves)

        def one(x: jax.Array) -> jax.Array:
            inputs, place = [], 0
            for shape, dtype in self.shapes:
                size = math.prod(shape)
                inputs.append(x[place : place + size].reshape(shape).astype(dtype))
                place += size
            return _flat(self.call(layer, *jax.tree.unflatten(self.inputs, inputs)))

        return jax.vmap(one)(examples)


def _flat(values: Any) -> jax.Array:
    """Returns all numbers of a pytree of arrays as [d]."""
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(values)])


class _TracedLayer(Coded):
    """Mixin of the layers of this module."""

    def _through(self, plain: Any, *inputs: Any, key: Any) -> Any:
        """Returns the result of the layer of Equinox, a class, for one example."""
        layer = object.__new__(plain)
        for field in dataclasses.fields(plain):
            object.__setattr__(layer, field.name, getattr(self, field.name))
        leaves, structure = jax.tree.flatten(layer)
        arrays = [x for x in leaves if eqx.is_array(x)]
        statics = tuple(None if eqx.is_array(x) else x for x in leaves)
        flat, treedef = jax.tree.flatten(inputs)
        shapes = tuple((x.shape, x.dtype) for x in flat)
        key = self._key(key)
        impl = None if key is None else str(jax.random.key_impl(key))
        words = [] if key is None else [jax.random.key_data(key)]
        call: Any = plain.__call__
        traced = _Traced(call, structure, statics, treedef, shapes, self.codec, impl)
        result = jax.eval_shape(lambda layer, inputs: call(layer, *inputs), layer, inputs)
        y = tokenwise(traced, _flat(inputs), *arrays, *words)
        parts, place = [], 0
        for x in jax.tree.leaves(result):
            parts.append(y[place : place + x.size].reshape(x.shape).astype(x.dtype))
            place += x.size
        return jax.tree.unflatten(jax.tree.structure(result), parts)


class Conv(_TracedLayer, eqx.nn.Conv):
    """`equinox.nn.Conv` that stores its input by a codec."""

    def stacked(self) -> tuple[int, ...]:
        """As for all layers."""
        return self.weight.shape[: -2 - self.num_spatial_dims]

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the convolution of [in_channels, *spatial], as in Equinox."""
        return self._through(eqx.nn.Conv, x, key=key)


class Conv1d(Conv, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d` that stores its input by a codec."""


class Conv2d(Conv, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d` that stores its input by a codec."""


class Conv3d(Conv, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d` that stores its input by a codec."""


class GroupNorm(_TracedLayer, eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm` that stores its input, or a code of it, and few statistics."""

    def __call__(self, x: jax.Array, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        """As in Equinox; with a state, which it returns as it is, that is Equinox's layer."""
        if args or kwargs:
            of_equinox: Any = super()
            return of_equinox.__call__(x, *args, key=key, **kwargs)
        return self._through(eqx.nn.GroupNorm, x, key=key)


class GRUCell(_TracedLayer, eqx.nn.GRUCell):
    """`equinox.nn.GRUCell` that stores input, state and gates by a codec."""

    def stacked(self) -> tuple[int, ...]:
        """As for all layers."""
        return self.weight_ih.shape[:-2]

    def __call__(self, input: jax.Array, hidden: jax.Array, *, key: Any = None) -> jax.Array:
        """Returns the next state, as in Equinox."""
        return self._through(eqx.nn.GRUCell, input, hidden, key=key)


class LSTMCell(_TracedLayer, eqx.nn.LSTMCell):
    """`equinox.nn.LSTMCell` that stores input, states and gates by a codec."""

    def stacked(self) -> tuple[int, ...]:
        """As for all layers."""
        return self.weight_ih.shape[:-2]

    def __call__(
        self, input: jax.Array, hidden: tuple[jax.Array, jax.Array], *, key: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the next states, as in Equinox."""
        return self._through(eqx.nn.LSTMCell, input, hidden, key=key)
