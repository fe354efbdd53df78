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
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from actjax.low_rank import clip_factor, global_norm, scale_tree
from actjax.optim.apply import check_state, refresh_by_layer, update_one
from actjax.optim.apply import init as init_layerwise
from actjax.optim.checks import check_callable, check_transform
from actjax.optim.layer_vjp import LayerVjp, form_of
from actjax.optim.layers import (
    LayerwiseState,
    count_layers,
    layers_of,
    merge,
    put,
    split,
    take,
)
from actjax.optim.subspace import SubspaceTransformation
from actjax.transforms.taps import Bases

ClipBy = Literal["estimate", "layer_norm"]


class InBackwardState(NamedTuple):
    """State of `in_backward`.

    Attributes:
      optimizer: a `LayerwiseState`.
      grad_norm: global norm of the last gradient, float32; 0 before the first step.
      typical: typical squared norms of the parts of a gradient in the order in which the backward
        pass computes them, [layers + 1]: the layers from the last to the first, then what `before`
        adds to the gradient of `after`. Means over about the last five steps, of logarithms, so
        that a rare large gradient leaves no trace; 0 before the first step.
    """

    optimizer: LayerwiseState
    grad_norm: Any
    typical: Any


@dataclasses.dataclass(frozen=True, eq=False)
class InBackward:
    """A training step whose backward pass updates the parameters, made by `in_backward`.

    Attributes:
      before: from parameters and inputs to the input of the first layer.
      layer: one layer.
      after: from parameters and the output of the last layer to the loss.
      tx: the optax transform.
      layers: from the parameters to the subtree of stacked layers.
      clip: largest norm of a gradient.
      clip_by: which norm is clipped.
      fetch: what is fetched ahead of the backward pass of a layer; None for nothing.
    """

    before: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    after: Callable[[Any, Any, Any], jax.Array]
    tx: optax.GradientTransformation
    layers: Callable[[Any], Any]
    clip: float
    clip_by: ClipBy
    fetch: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_transform("tx", self.tx)
        for name in ("before", "layer", "after", "layers"):
            check_callable(name, getattr(self, name))
        if self.fetch is not None:
            check_callable("fetch", self.fetch)
        if not isinstance(self.clip, int | float) or not self.clip > 0:
            raise ValueError(f"`clip` of in_backward must be a number above 0, got {self.clip!r}.")
        if self.clip_by not in get_args(ClipBy):
            raise ValueError(
                f"`clip_by` of in_backward must be one of {get_args(ClipBy)}: {self.clip_by!r}"
            )
        if self.clip_by == "layer_norm" and math.isinf(self.clip):
            raise ValueError("`clip_by='layer_norm'` of in_backward has no effect without `clip`.")

    def init(self, params: Any) -> InBackwardState:
        """Returns the state before the first step."""
        optimizer = init_layerwise(self.tx, params, layers=self.layers)
        count = count_layers(split(params, self.layers)[0])
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return InBackwardState(optimizer, zeros(()), zeros(count + 1))

    def step(
        self,
        params: Any,
        state: InBackwardState,
        inputs: Any,
        per_layer: Any = None,
        refresh: bool | jax.Array = False,
    ) -> tuple[Any, InBackwardState, jax.Array, jax.Array]:
        """Takes one step.

        Args:
          params: the parameters; donate them.
          state: what `init` or the last step returned; donate it.
          inputs: the last argument of `before` and `after` and the third of `layer`, such as a
            batch.
          per_layer: a pytree of arrays [layers, ...], such as keys, of which `layer` gets a slice.
          refresh: as for `actjax.optim.apply`.

        Returns:
          The new parameters and state, the loss, and the norm of what was added to the parameters.

        Raises:
          ValueError: a state that `init` did not make for these parameters, parameters that are
            not floating point, arrays of `per_layer` of another length, a layer whose output does
            not have the shape and dtype of its input, or a loss that is not a floating point
            scalar.
        """
        count = self._check(params, state, per_layer)
        stacked, rest = split(params, self.layers)
        whole, due_layers = refresh_by_layer(self.tx, refresh, count)
        bases_of = self._bases_of(is_refresh=whole or due_layers is not None)
        # A norm that is not finite predicts nothing about this gradient.
        typical = jnp.where(jnp.isfinite(state.typical), state.typical, 0)

        x, before_vjp = jax.vjp(lambda p: self.before(p, inputs), rest)
        one_layer = LayerVjp(lambda p, x, own: self.layer(self.layers(p), x, inputs, own), inputs)
        given = stacked, bases_of(state.optimizer.layers), per_layer
        x, kept = jax.lax.scan(one_layer.forward, x, given)
        loss, rest_grads, dx = self._differentiate_after(rest, x, inputs)
        of_after = _squared_norm(rest_grads)

        def backward(n: jax.Array, carry: Any) -> Any:
            dx, stacked, optimizer, squares, moved, ahead = carry
            i = count - 1 - n
            block, layer_state = take(stacked, i), take(optimizer, i)
            given = _inserted(block, ahead), bases_of(layer_state), take(per_layer, i)
            ahead = self._fetched(stacked, jnp.maximum(i - 1, 0))
            grads, dx = one_layer.backward(given, take(kept, i), dx)
            square = _squared_norm(grads)
            squares = squares.at[n].set(square)
            estimate = _estimated_norm(of_after, squares, typical, n + 1)
            grads = self._clipped(grads, square, estimate)
            due = whole if due_layers is None else due_layers[i]
            block, layer_state, more = update_one(self.tx, grads, layer_state, block, due)
            stacked, optimizer = put(stacked, block, i), put(optimizer, layer_state, i)
            return dx, stacked, optimizer, squares, moved + more, ahead

        squares, moved = jnp.zeros(count + 1, jnp.float32), jnp.zeros((), jnp.float32)
        ahead = self._fetched(stacked, count - 1)
        carry = dx, stacked, state.optimizer.layers, squares, moved, ahead
        dx, stacked, layers_state, squares, moved, _ = jax.lax.fori_loop(0, count, backward, carry)

        rest_grads = jax.tree.map(jnp.add, rest_grads, before_vjp(dx)[0])
        square = _squared_norm(rest_grads)
        norm = jnp.sqrt(jnp.sum(squares) + square)
        squares = squares.at[count].set(jnp.maximum(square - of_after, 0))
        rest_grads = self._clipped(rest_grads, square, norm)
        rest, rest_state, more = update_one(self.tx, rest_grads, state.optimizer.rest, rest, whole)
        optimizer = LayerwiseState(layers_state, rest_state)
        state = InBackwardState(optimizer, norm, _followed(typical, squares))
        return merge(stacked, rest, params), state, loss, jnp.sqrt(moved + more)

    def _fetched(self, stacked: Any, i: jax.typing.ArrayLike) -> list[Any]:
        """Returns what is fetched of a layer, in the order of its arrays; None for the others."""
        if self.fetch is None:
            return [None for _ in jax.tree.leaves(stacked)]
        layer = take(stacked, i)
        try:
            return jax.tree.structure(layer).flatten_up_to(self.fetch(layer))
        except ValueError as error:
            raise ValueError(
                "`fetch` of in_backward must return the parameters of the layer that it gets, with"
                f" None for what it leaves: {error}"
            ) from error

    def _check(self, params: Any, state: Any, per_layer: Any) -> int:
        """Returns the number of layers; raises an error for arguments that do not fit them."""
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
        for x in jax.tree.leaves(per_layer):
            if jnp.shape(x)[:1] != (count,):
                raise ValueError(
                    f"arrays of `per_layer` must have a leading axis of {count} layers, got one"
                    f" with shape {jnp.shape(x)}."
                )
        return count

    def _bases_of(self, *, is_refresh: bool) -> Callable[[Any], Bases]:
        """Returns a function from an optimizer state to the bases that inputs are stored in."""
        if isinstance(self.tx, SubspaceTransformation) and not is_refresh:
            return self.tx.bases
        return lambda _: Bases({})

    def _differentiate_after(self, rest: Any, x: Any, inputs: Any) -> tuple[jax.Array, Any, Any]:
        """Returns the loss, and the gradients of the parameters of `after` and of its input."""
        loss, vjp = jax.vjp(lambda p, x: self.after(p, x, inputs), rest, x)
        form = form_of(loss)
        is_scalar = isinstance(form, jax.ShapeDtypeStruct) and form.shape == ()
        if not is_scalar or not jnp.issubdtype(form.dtype, jnp.floating):
            raise ValueError(f"`after` must return a floating point scalar, got {form}.")
        # The gradient is read here and at the end of the step. Without the barrier, XLA may keep it
        # in float32 in between.
        return loss, *jax.lax.optimization_barrier(vjp(jnp.ones_like(loss)))

    def _clipped(self, grads: Any, square: jax.Array, estimate: jax.Array) -> Any:
        """Returns a part of the gradient, clipped.

        Args:
          grads: the part.
          square: its squared norm.
          estimate: estimated norm of the whole gradient.
        """
        if math.isinf(self.clip):
            return grads
        norm = estimate if self.clip_by == "estimate" else jnp.sqrt(square)
        return scale_tree(grads, clip_factor(norm, self.clip))


def in_backward(
    before: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any, Any], Any],
    after: Callable[[Any, Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    layers: Callable[[Any], Any] = layers_of,
    clip: float = math.inf,
    clip_by: ClipBy = "estimate",
    fetch: Callable[[Any], Any] | None = None,
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

    The norm of the whole gradient is known only after the last layer has been updated. Since the
    norms of layers grow and shrink together, it can be estimated: parts that are not known yet have
    their typical norms, times the growth of the known layers over theirs (geometric mean). In the
    first step they are taken to be as large as the known layers are on average.

    Args:
      before: from parameters and inputs to the input of the first layer.
      layer: from the parameters of one layer, without the leading axis, to the input of the next.
      after: from parameters and the output of the last layer to a scalar loss.
      tx: an optax transform that treats each array separately: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      clip_by: which norm is clipped. "estimate": the estimate above, and at least the norm of the
        known parts; it is exact for parameters outside the layers. "layer_norm": the norm of each
        layer, and of the rest, separately.
      fetch: from the parameters of a layer, divided over devices, to the same parameters with those
        gathered that its backward pass reads first, and None for the others. They are gathered
        while the layer after it is differentiated, and take memory meanwhile. The order of leaves
        is that of the parameters. None fetches nothing ahead.

    Raises:
      TypeError: `tx` is not a transform, or one of the functions is not a function.
      ValueError: `clip` is not positive, or `clip_by` is unknown or has no effect.
    """
    return InBackward(before, layer, after, tx, layers, clip, clip_by, fetch)


def _inserted(block: Any, ahead: list[Any]) -> Any:
    """Returns the parameters of a layer, with those that were fetched in their places."""
    leaves, treedef = jax.tree.flatten(block)
    pairs = zip(leaves, ahead, strict=True)
    return jax.tree.unflatten(treedef, [x if found is None else found for x, found in pairs])


def _squared_norm(grads: Any) -> jax.Array:
    return global_norm(grads).astype(jnp.float32) ** 2


_DECAY = 0.8
"""Of typical norms. 0.5 to 0.9 estimate about equally well."""
_MOST_GROWTH = 1e12
"""Of a squared norm, so that layers whose gradients were nearly zero do not give inf."""


def _estimated_norm(
    of_after: jax.Array, squares: jax.Array, typical: jax.Array, count: jax.Array
) -> jax.Array:
    """Returns the estimated norm of a gradient of which some parts are known.

    Args:
      of_after: squared norm of the gradient of `after`.
      squares: squared norms of the layers in the order of the backward pass, [layers + 1]; zeros
        for those that are not known yet, and for what comes before the layers.
      typical: typical values of `squares`; zeros in the first step.
      count: number of known layers, at least 1.
    """
    known = of_after + jnp.sum(squares)
    later = jnp.sum(jnp.where(jnp.arange(typical.size) < count, 0, typical))
    both = (squares > 0) & (typical > 0)
    logs = jnp.where(both, jnp.log(squares / jnp.where(both, typical, 1)), 0)
    growth = jnp.exp(jnp.sum(logs) / jnp.maximum(jnp.sum(both), 1))
    unknown = later * jnp.minimum(growth, _MOST_GROWTH)
    as_large = jnp.sum(squares) * (typical.size - count) / count
    return jnp.sqrt(known + jnp.where(jnp.any(typical > 0), unknown, as_large))


def _followed(typical: jax.Array, squares: jax.Array) -> jax.Array:
    """Returns typical squared norms after a gradient; one of zero, inf or nan says nothing."""
    mean = jnp.exp(_DECAY * jnp.log(typical) + (1 - _DECAY) * jnp.log(squares))
    known = (squares > 0) & jnp.isfinite(squares)
    return jnp.where(known, jnp.where(typical > 0, mean, squares), typical)
