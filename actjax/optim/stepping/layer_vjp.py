"""The vector-Jacobian product of one layer, with its two passes in two separate loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import row_major
from actjax._shards import is_partitioned
from actjax.factored.taps import plan_taps


def shape_structs(tree: Any) -> Any:
    """Returns the shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


class LayerVjp:
    """The vector-Jacobian product of one layer: one loop stores what another loop reads.

    The arguments of the layer, such as its weights, are available in the backward loop and are not
    stored again. `backward` relies on what `forward` recorded while it was traced, so trace
    `forward` first.
    """

    def __init__(self, layer: Callable[[Any, Any, Any, Any], Any]) -> None:
        """Takes a function `layer(params, x, inputs, sliced)`.

        Args:
          layer: from the parameters of one layer, in the structure of all parameters, its input,
            arrays that are the same in every layer, and its slice of `per_layer`, to its output.
        """
        self._layer = layer

    def forward(self, inputs: Any, x: Any, arguments: Any) -> tuple[Any, list[jax.Array]]:
        """Returns the output, and the residuals that are not arguments; a body of `lax.scan`.

        Args:
          inputs: arrays that are the same in every layer.
          x: input of the layer.
          arguments: parameters of the layer, bases, and its slice of `per_layer`.

        Raises:
          ValueError: the output has another form than the input.
        """
        block, bases, sliced = arguments
        if not is_partitioned(block):
            # Or TPUs copy the stacks into another layout. A partitioned stack would be gathered.
            block = jax.tree.map(row_major, block)
            arguments = block, bases, sliced
        self._taps = taps = plan_taps(lambda p: self._layer(p, x, inputs, sliced), block, bases)
        y, vjp = jax.vjp(
            lambda d, x: self._layer(taps.merge(block, d, bases), x, inputs, sliced),
            taps.split(block),
            x,
        )
        if jax.tree.flatten(shape_structs(y)) != jax.tree.flatten(shape_structs(x)):
            raise ValueError(
                "the output of `layer` is the input of the next layer, so both must have one shape"
                f" and dtype: it got {shape_structs(x)} and returned {shape_structs(y)}."
            )
        residuals, self._treedef = jax.tree.flatten(vjp)
        places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((arguments, inputs)))}
        self._places = [places.get(id(residual)) for residual in residuals]
        return y, [r for r, i in zip(residuals, self._places, strict=True) if i is None]

    def backward(
        self, inputs: Any, arguments: Any, kept: list[jax.Array], dy: Any
    ) -> tuple[Any, Any]:
        """Returns the gradient of the layer's parameters, and the cotangent of its input.

        Args:
          inputs: as for `forward`.
          arguments: as for `forward`.
          kept: residuals that `forward` returned.
          dy: cotangent of the output.
        """
        leaves, stored = jax.tree.leaves((arguments, inputs)), iter(kept)
        residuals = [next(stored) if i is None else leaves[i] for i in self._places]
        gradient, dx = jax.tree.unflatten(self._treedef, residuals)(dy)
        return self._taps.join(gradient, arguments[1]), dx
