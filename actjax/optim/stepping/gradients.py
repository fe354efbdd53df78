"""The gradient of a model of stacked layers, with loops whose kernels work on stacks in place.

The loop that JAX differentiates fills stacks of residuals and gradients with zeros, and copies each
layer out of its stack before a kernel reads it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from actjax.factored.taps import Bases
from actjax.optim.layers import count_layers, merge, split
from actjax.optim.states.host_states import downwards
from actjax.optim.stepping import in_place
from actjax.optim.stepping.passes import Layered, Passes, sum_of_parts


def value_and_grad(
    model: Layered, params: Any, inputs: Any, per_layer: Any
) -> tuple[jax.Array, Any]:
    """Returns the loss and its gradient, on one GPU.

    Args:
      model: the model, with one micro-batch.
      params: the parameters.
      inputs: as for `InBackward.step`.
      per_layer: as for `InBackward.step`.
    """
    passes = Passes(model, inputs, per_layer, jnp.ones((), jnp.float32))
    stacked, rest = split(params, model.layers)
    loss, of_after, residuals = passes.forward(stacked, rest, Bases({}))
    read = stacked, per_layer, residuals.layers
    count = count_layers(stacked)

    def backward(dx: Any, block: Any, per_layer: Any, kept: Any) -> tuple[Any, Any]:
        return passes.differentiate_layer(block, Bases({}), per_layer, kept, dx)

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), read)
    shapes, _ = jax.eval_shape(backward, residuals.dx, *first)
    empty = jax.tree.map(lambda x: jax.lax.empty((count, *x.shape), x.dtype), shapes)

    def body(i: jax.Array, carry: Any) -> Any:
        grads, dx = carry
        return in_place.update(lambda _, read, dx: backward(dx, *read), i, grads, read, dx)

    grads, dx = downwards(count, body, (empty, residuals.dx), read)
    of_before = passes.gradient_of_before(rest, residuals.before, dx)
    return loss, merge(grads, sum_of_parts(rest, of_after, of_before), params)
