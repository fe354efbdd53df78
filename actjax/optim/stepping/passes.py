"""The passes of a model of stacked layers, with a loop over layers for each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from actjax._core.paths import named_leaves
from actjax.accumulate import sum_gradients
from actjax.factored.taps import Bases
from actjax.optim.layers import take
from actjax.optim.stepping import in_place
from actjax.optim.stepping.layer_vjp import LayerVjp, shape_structs
from actjax.optim.stepping.pieces import filled, without


@dataclasses.dataclass(frozen=True)
class Layered:
    """A model as three functions, those of `actjax.optim.in_backward`.

    Attributes:
      before: from parameters and inputs to the input of the first layer.
      layer: from the parameters of one layer to the input of the next.
      after: from parameters and the output of the last layer to a scalar loss.
      layers: from the parameters to the subtree of stacked layers.
      accumulate: number of micro-batches.
    """

    before: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    after: Callable[[Any, Any, Any], jax.Array]
    layers: Callable[[Any], Any]
    accumulate: int = 1


class Residuals(NamedTuple):
    """Results of the forward pass that the backward pass reads.

    Attributes:
      dx: cotangent of the output of the last layer.
      layers: residuals of the layers, stacked.
      before: the VJP of `before`; None with several micro-batches, for each of which it might hold
        a copy of the weights.
    """

    dx: Any
    layers: Any
    before: Any


class Passes:
    """The forward and the backward pass over the batch of one step."""

    def __init__(self, model: Layered, inputs: Any, per_layer: Any, weights: jax.Array) -> None:
        """Takes what both read.

        Args:
          model: the model.
          inputs: as for `InBackward.step`.
          per_layer: as for `InBackward.step`.
          weights: of the micro-batches, [accumulate]; a scalar for one.
        """
        self._model, self._inputs = model, inputs
        self._per_layer, self._weights = per_layer, weights
        self._layer = LayerVjp(lambda p, x, i, s: model.layer(model.layers(p), x, i, s))

    def forward(self, stacked: Any, rest: Any, bases: Bases) -> tuple[jax.Array, Any, Residuals]:
        """Returns the loss, the gradient of `after`, and the residuals.

        Args:
          stacked: the stacked weights of the layers.
          rest: the parameters outside the layers.
          bases: the bases in which inputs of the layers are stored.
        """

        def run(batch: Any) -> tuple[Any, Residuals]:
            inputs, per_layer, weight = batch
            x, before = _differentiated(lambda p: self._model.before(p, inputs), rest)
            run_layer = functools.partial(self._layer.forward, inputs)
            xs = stacked, bases, per_layer
            scan = in_place.scan if in_place.applies(xs) else jax.lax.scan
            x, kept = scan(run_layer, x, xs)
            loss, grads, dx = self._differentiate_after(rest, x, inputs, weight)
            is_single = self._model.accumulate == 1
            return (loss, grads), Residuals(dx, kept, before if is_single else None)

        batches = self._inputs, self._per_layer, self._weights
        (loss, grads), residuals = self._over_batches(run, batches)
        return loss, grads, residuals

    def differentiate_layer(
        self, block: Any, bases: Bases, per_layer: Any, residuals: Any, dx: Any
    ) -> tuple[Any, Any]:
        """Returns the gradient of a layer's weights, and the cotangent of its input.

        For one micro-batch.

        Args:
          block: the weights.
          bases: the bases in which inputs of this layer are stored.
          per_layer: its slice of `per_layer`.
          residuals: its residuals.
          dx: cotangent of its output.
        """
        return self._layer.backward(self._inputs, (block, bases, per_layer), residuals, dx)

    def gradient_of_layer(
        self, i: jax.Array, arguments: tuple[Any, Bases], residuals: Any, dx: Any
    ) -> tuple[Any, Any]:
        """Returns the gradient of the weights of layer `i`, and the cotangent of its input.

        Args:
          i: the layer.
          arguments: its weights and bases.
          residuals: those of all layers.
          dx: cotangent of its output.
        """

        def run(batch: Any) -> tuple[Any, Any]:
            inputs, per_layer, kept, dx = batch
            return self._layer.backward(inputs, (*arguments, per_layer), kept, dx)

        axis = int(self._model.accumulate > 1)
        slices = take((self._per_layer, residuals), i, axis)
        return self._over_batches(run, (self._inputs, *slices, dx))

    def gradient_of_before(self, rest: Any, vjp: Any, dx: Any) -> Any:
        """Returns the gradient of `before`.

        Args:
          rest: the parameters outside the layers.
          vjp: the VJP of `before`; None to compute it again.
          dx: cotangent of the input of the first layer.
        """
        if vjp is not None:
            (grads,) = vjp(dx)
            return grads

        def run(batch: Any) -> tuple[Any, None]:
            inputs, dx = batch
            _, vjp = _differentiated(lambda p: self._model.before(p, inputs), rest)
            return vjp(dx)[0], None

        return self._over_batches(run, (self._inputs, dx))[0]

    def read_by_before(self, rest: Any) -> set[str]:
        """Returns the paths of the parameters that `before` reads."""
        inputs = self._inputs
        if self._model.accumulate > 1:
            inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
        return _read_by(self._model.before, rest, inputs)

    def _differentiate_after(
        self, rest: Any, x: Any, inputs: Any, weight: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the loss times a weight, and its gradients: of parameters, and of the input."""
        both, after = {"rest": rest, "x": x}, self._model.after
        loss, vjp = _differentiated(lambda p: after(p["rest"], p["x"], inputs), both)
        form = shape_structs(loss)
        is_scalar = isinstance(form, jax.ShapeDtypeStruct) and form.shape == ()
        if not is_scalar or not jnp.issubdtype(form.dtype, jnp.floating):
            raise ValueError(f"`after` must return a floating point scalar, got {form}.")
        # The gradient is read here and at the end of the step. Without the barrier, XLA may keep it
        # in float32 in between.
        weight = weight.astype(loss.dtype)
        (grads,) = jax.lax.optimization_barrier(vjp(weight))
        known = named_leaves(grads["x"])
        unread = {name: y for name, y in named_leaves(x).items() if name not in known}
        dx = filled(grads["x"], jax.tree.map(jnp.zeros_like, unread), x)
        return loss * weight, grads["rest"], dx

    def _over_batches(self, run: Callable[[Any], tuple[Any, Any]], slices: Any) -> tuple[Any, Any]:
        """Returns the sum over micro-batches of the gradient, and a stack of what comes beside it.

        Args:
          run: from one micro-batch to a gradient and other arrays.
          slices: the micro-batches; if there is one, without the axis that numbers them.
        """
        return run(slices) if self._model.accumulate == 1 else sum_gradients(run, slices)


def _differentiated(fun: Callable[[Any], Any], rest: Any) -> tuple[Any, Any]:
    """Returns `fun(rest)` and its VJP for the parameters that it reads; `None` for others.

    The VJP of JAX gives zeros for the others, as large as they are.
    """
    read = _read_by(fun, rest)
    others = {name: x for name, x in named_leaves(rest).items() if name not in read}
    return jax.vjp(lambda some: fun(filled(some, others, rest)), without(rest, others))


def _read_by(fun: Callable[..., Any], params: Any, *args: Any) -> set[str]:
    """Returns the paths of the parameters that `fun(params, *args)` reads."""
    jaxpr = jax.make_jaxpr(fun)(params, *args).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return {name for name, is_read in zip(named_leaves(params), used, strict=False) if is_read}


def sum_of_parts(rest: Any, *parts: Any) -> Any:
    """Returns the sum of gradients that have `None` for parameters without one.

    Args:
      rest: the parameters.
      *parts: the gradients.
    """
    sums: dict[str, Any] = {}
    for part in parts:
        for name, g in named_leaves(part).items():
            sums[name] = sums[name] + g if name in sums else g
    totals = {name: sums.get(name, jnp.zeros_like(x)) for name, x in named_leaves(rest).items()}
    return filled(rest, totals, rest)
