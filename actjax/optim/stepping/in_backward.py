"""The optimizer inside the backward pass: a gradient of all weights never exists.

This is the per-layer update of LOMO (Lv et al., 2023) and GaLore, for layers that are stacked and
scanned. The backward pass is a loop that carries the cotangent of the residual stream, and the
stacked weights and states. Each iteration computes the vector-Jacobian product of one layer,
updates this layer, and writes it back in place. Full-rank AdamW then fits where its gradients alone
would not.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from actjax.codecs.base import check_positive_integer
from actjax.optim.checks import check_callable, check_transform
from actjax.optim.layers import count_layers, layers_of, merge, split
from actjax.optim.stepping.apply import check_refresh
from actjax.optim.stepping.backward_step import InBackwardState, Settings, Step
from actjax.optim.stepping.clipping import check_clip
from actjax.optim.stepping.init import check_state
from actjax.optim.stepping.init import init as init_layerwise
from actjax.optim.stepping.passes import Layered


@dataclasses.dataclass(frozen=True, eq=False)
class InBackward:
    """A training step whose backward pass updates the parameters, made by `in_backward`.

    Its fields are the arguments of `in_backward`.
    """

    before: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    after: Callable[[Any, Any, Any], jax.Array]
    tx: optax.GradientTransformation
    layers: Callable[[Any], Any]
    clip: float
    fetch: Callable[[Any], Any] | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        check_transform("tx", self.tx)
        check_positive_integer("in_backward", "accumulate", self.accumulate)
        for name in ("before", "layer", "after", "layers"):
            check_callable(name, getattr(self, name))
        if self.fetch is not None:
            check_callable("fetch", self.fetch)
        check_clip("in_backward", self.clip)

    @property
    def model(self) -> Layered:
        """The functions of the model."""
        return Layered(self.before, self.layer, self.after, self.layers, self.accumulate)

    def init(self, params: Any) -> InBackwardState:
        """Returns the state before the first step."""
        optimizer = init_layerwise(self.tx, params, layers=self.layers)
        count = count_layers(split(params, self.layers)[0])
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return InBackwardState(optimizer, zeros(()), zeros(count + 2), zeros(()))

    def step(
        self,
        params: Any,
        state: InBackwardState,
        inputs: Any,
        per_layer: Any = None,
        refresh: bool = False,
        weights: jax.Array | None = None,
    ) -> tuple[Any, InBackwardState, jax.Array, jax.Array]:
        """Takes one step.

        With `accumulate` micro-batches, every array of `inputs` and `per_layer` has one more axis,
        the first, which numbers them.

        Args:
          params: the parameters; donate them.
          state: what `init` or the last step returned; donate it.
          inputs: the last argument of `before` and `after` and the third of `layer`, such as a
            batch.
          per_layer: a pytree of arrays [layers, ...], such as keys, of which `layer` gets a slice.
          refresh: as for `actjax.optim.apply`.
          weights: of the micro-batches, [accumulate]; by default `1 / accumulate` each.

        Returns:
          The new parameters and state, the loss, and the norm of what was added to the parameters,
          estimated as by `actjax.optim.apply`.

        Raises:
          ValueError: a state that `init` did not make for these parameters, parameters that are
            not floating point, arrays of `inputs` or `per_layer` with other axes, a layer whose
            output does not have the shape and dtype of its input, or a loss that is not a floating
            point scalar.
        """
        self._check(params, state, per_layer)
        check_refresh(self.tx, refresh)
        batch = inputs, per_layer, self._check_batches(inputs, weights)
        settings = Settings(self.model, self.tx, self.clip, self.fetch)
        step = Step(settings, state, batch, bool(refresh))
        stacked, rest = split(params, self.layers)
        loss, grads, residuals = step.forward(stacked, rest)
        outside, norms, dx = step.update_early(rest, grads, residuals.dx)
        carry = step.update_layers(stacked, residuals.layers, dx, norms, outside.moved)
        of_before = step.gradient_of_before(rest, residuals.before, carry.dx)
        outside, state = step.update_late(outside, of_before, carry)
        moved = jnp.sqrt(jnp.sum(outside.moved))
        return merge(carry.stacked, outside.params, params), state, loss, moved

    def _check(self, params: Any, state: Any, per_layer: Any) -> None:
        """Raises a `ValueError` for arguments that do not fit the parameters."""
        if not isinstance(state, InBackwardState):
            raise ValueError(
                "`state` must be what `init` or the last `step` of this in_backward returned: got"
                f" {type(state).__name__}."
            )
        for path, x in jax.tree.leaves_with_path(params):
            dtype = jnp.result_type(x)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    "`params` of in_backward must be floating point, but"
                    f" {jax.tree_util.keystr(path)} is {dtype}: give other arrays in `inputs` or"
                    " `per_layer`."
                )
        check_state(self.tx, state.optimizer, params, self.layers)
        count = count_layers(split(params, self.layers)[0])
        lead = (count,) if self.accumulate == 1 else (self.accumulate, count)
        for x in jax.tree.leaves(per_layer):
            if jnp.shape(x)[: len(lead)] != lead:
                axes = "layers" if self.accumulate == 1 else "micro-batches and layers"
                raise ValueError(
                    f"arrays of `per_layer` must begin with {lead}, the {axes}: got one with shape"
                    f" {jnp.shape(x)}."
                )

    def _check_batches(self, inputs: Any, weights: Any) -> jax.Array:
        """Returns the weights of the micro-batches, or raises a `ValueError`."""
        count = self.accumulate
        if count == 1:
            if weights is not None:
                raise ValueError("`weights` of in_backward is for `accumulate` above 1: drop it.")
            return jnp.ones((), jnp.float32)
        for path, x in jax.tree.leaves_with_path(inputs):
            if jnp.shape(x)[:1] != (count,):
                raise ValueError(
                    f"`accumulate={count}` of in_backward: arrays of `inputs` must have a leading"
                    f" axis of {count} micro-batches, but `{jax.tree_util.keystr(path)}` has shape"
                    f" {jnp.shape(x)}. Reshape [B, ...] to [{count}, B / {count}, ...], with a"
                    f" batch that is a multiple of {count}."
                )
        if weights is None:
            return jnp.full((count,), 1 / count, jnp.float32)
        if jnp.shape(weights) != (count,):
            raise ValueError(f"`weights` must be [{count}], got {list(jnp.shape(weights))}.")
        return jnp.asarray(weights, jnp.float32)


def in_backward(
    before: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any, Any], Any],
    after: Callable[[Any, Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    layers: Callable[[Any], Any] = layers_of,
    clip: float = math.inf,
    fetch: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
) -> InBackward:
    """Returns a training step that updates each layer within the backward pass.

    The model is given as three functions:

        before(params, inputs) -> x                     # embedding
        layer(layer_params, x, inputs, slice) -> x      # one layer, and its slice of per_layer
        after(params, x, inputs) -> loss                # last norm, output projection, loss

    `before` and `after` get the parameters with `None` in the place of the layers. A parameter that
    both read, such as a tied embedding, gets the sum of both gradients. `x` is any pytree of
    floating point arrays. Compile the step with `jax.jit`, with parameters and state donated, and
    with `refresh` static for a `subspace`:

        update = actjax.optim.in_backward(before, layer, after, tx)
        state = update.init(params)
        step = jax.jit(update.step, donate_argnums=(0, 1), static_argnames="refresh")
        params, state, loss, update_norm = step(params, state, inputs, per_layer)

    The residuals are those of `jax.vjp(layer)`, so codecs and `jax.checkpoint(layer)` work as
    usual. The weights of a layer are not stored with them but sliced again. Weights that meet a
    factored codec get factored gradients, and under `subspace` gradients in its bases.

    The norm of the whole gradient is known only after the last layer has been updated. Layers are
    clipped by an estimate of it, and at least by the norm of the parts that are known
    (`actjax.optim.stepping.clipping`). Parameters outside the layers are clipped by the norm
    itself, except for large matrices that only `after` reads, which are updated before the layers.

    Args:
      before: from parameters and inputs to the input of the first layer.
      layer: from the parameters of one layer, without the leading axis, to the input of the next.
      after: from parameters and the output of the last layer to a scalar loss.
      tx: an optax transform that treats each array separately: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      fetch: from the parameters of a layer, divided over devices, to the same parameters with those
        gathered that its backward pass reads first, and None for the others. They are gathered
        while the layer after it is differentiated, and take memory meanwhile. The order of leaves
        is that of the parameters. None fetches nothing ahead.
      accumulate: number of micro-batches. Above 1, `step` takes arrays with a leading axis of them.

    Raises:
      TypeError: `tx` is not a transform, or one of the functions is not a function.
      ValueError: `clip` is not positive, or `accumulate` is below 1.
    """
    return InBackward(before, layer, after, tx, layers, clip, fetch, accumulate)
