"""The optimizer inside the backward pass: no gradient of all weights ever exists.

LOMO (Lv et al., 2023) and GaLore's per-layer updates, for layers that are stacked and scanned: the
backward pass is a loop that carries the cotangent of the residual stream and the stacked weights
and states themselves. It finishes one layer's vector-Jacobian product, updates that layer, writes
it back in place and goes on. With it, full-rank AdamW fits where its gradients alone would not.
"""

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
from actjax.transforms.taps import Bases, plan_taps

ClipBy = Literal["estimate", "last_norm", "layer_norm"]


class InBackwardState(NamedTuple):
    """State of `in_backward`.

    Attributes:
      optimizer: a `LayerwiseState`.
      grad_norm: global norm of the last gradient, float32; 0 before the first.
      squares: squared norms of its parts, in the order in which they become known: what the
        parameters of `after` got there, then each layer from the last to the first, [layers + 1].
    """

    optimizer: LayerwiseState
    grad_norm: Any
    squares: Any


class InBackward(NamedTuple):
    """A training step whose backward pass updates the parameters.

    Attributes:
      init: from parameters to an `InBackwardState`.
      step: `step(params, state, inputs, per_layer=None, refresh=False)` returns parameters, state,
        loss and the norm of what was added to the parameters.
    """

    init: Callable[[Any], InBackwardState]
    step: Callable[..., tuple[Any, InBackwardState, jax.Array, jax.Array]]


def in_backward(
    before: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any, Any], Any],
    after: Callable[[Any, Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    layers: Callable[[Any], Any] = layers_of,
    clip: float = math.inf,
    clip_by: ClipBy = "estimate",
) -> InBackward:
    """Returns a training step that updates each layer within the backward pass.

    The model is given as three functions:

        before(params, inputs) -> x                     # embedding
        layer(layer_params, x, inputs, slice) -> x      # one layer, and its slice of per_layer
        after(params, x, inputs) -> loss                # last norm, output projection, loss

    `before` and `after` see the parameters without the layers (`None` there); what both read, such
    as a tied embedding, gets the sum of both gradients. `x` is any pytree of floating point arrays.
    The step is for `jax.jit`, with `refresh` static where a `subspace` has one, and parameters and
    state donated:

        update = actjax.optim.in_backward(before, layer, after, tx)
        state = update.init(params)
        step = jax.jit(update.step, donate_argnums=(0, 1), static_argnames="refresh")
        params, state, loss, update_norm = step(params, state, inputs, per_layer)

    Residuals are those that `jax.vjp(layer)` keeps, so codecs, and `jax.checkpoint(layer)`, work as
    ever; a layer's weights are not among them but sliced again. Weights that meet a factored codec
    get factored gradients, and under `subspace` those in its bases.

    Clipping: the norm of the whole gradient is known only when the last layer has been updated. But
    norms of layers grow and fall together, so it can be estimated: it is the global norm of the
    step before, times what the parts that are known so far have grown by since then.

    Args:
      before: from parameters and inputs to what the first layer reads.
      layer: from the parameters of one layer, without the leading axis, to what the next reads.
      after: from parameters and what the last layer gives to a scalar loss.
      tx: an optax transform that takes each array by itself: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      clip_by: which norm that is. "estimate": as above, never less than the norm of the parts that
        are known; exact for what is no layer. "last_norm": the global norm of the step before,
        which scales all of this step alike; the first step, and one after a norm that was not
        finite, is not clipped. "layer_norm": that of each layer, and of the rest, by itself.

    Raises:
      TypeError: `tx` is no transform, or one of the functions none.
      ValueError: `clip` is not positive or `clip_by` unknown.
    """
    check_transform("tx", tx)
    functions = {"before": before, "layer": layer, "after": after, "layers": layers}
    for name, function in functions.items():
        check_callable(name, function)
    if not isinstance(clip, int | float) or not clip > 0:
        raise ValueError(f"`clip` of in_backward must be a number above 0, got {clip!r}.")
    if clip_by not in get_args(ClipBy):
        raise ValueError(f"`clip_by` of in_backward must be one of {get_args(ClipBy)}: {clip_by!r}")

    def init(params: Any) -> InBackwardState:
        optimizer = init_layerwise(tx, params, layers=layers)
        count = count_layers(split(params, layers)[0])
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return InBackwardState(optimizer, zeros(()), zeros(count + 1))

    def clipped(grads: Any, square: jax.Array, last_norm: jax.Array, estimate: jax.Array) -> Any:
        """Returns a part of the gradient, of this squared norm, clipped."""
        if math.isinf(clip):
            return grads
        norms = {"estimate": estimate, "last_norm": last_norm, "layer_norm": jnp.sqrt(square)}
        return scale_tree(grads, clip_factor(norms[clip_by], clip))

    def step(
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
          inputs: what the three functions are given, such as a batch.
          per_layer: a pytree of arrays [layers, ...], such as keys, of which `layer` gets a slice.
          refresh: as for `actjax.optim.apply`.

        Raises:
          ValueError: a state that `init` did not make of these parameters, arrays of `per_layer`
            of another length, or a loss that is no floating point scalar.
        """
        if not isinstance(state, InBackwardState):
            raise ValueError(
                "`state` must be what `init`, or the last `step`, of this in_backward returned: got"
                f" {type(state).__name__}."
            )
        check_state(tx, state.optimizer, params, layers)
        stacked, rest = split(params, layers)
        count = count_layers(stacked)
        # Of a last norm that is no number nothing follows for this gradient.
        last_norm = jnp.where(jnp.isfinite(state.grad_norm), state.grad_norm, 0)
        # What parts had of it when as many were known.
        known_then = jnp.cumsum(state.squares)
        whole, due_layers = refresh_by_layer(tx, refresh, count)
        for x in jax.tree.leaves(per_layer):
            if jnp.shape(x)[:1] != (count,):
                raise ValueError(
                    f"arrays of `per_layer` must have a leading axis of {count} layers, got one of"
                    f" shape {jnp.shape(x)}."
                )

        def bases_of(optimizer: Any) -> Bases:
            if isinstance(tx, SubspaceTransformation) and not whole and due_layers is None:
                return tx.bases(optimizer)
            return Bases({})

        x, before_vjp = jax.vjp(lambda p: before(p, inputs), rest)
        one_layer = _LayerVjp(lambda p, x, own: layer(layers(p), x, inputs, own), inputs)
        bases = bases_of(state.optimizer.layers)
        x, kept = jax.lax.scan(one_layer.forward, x, (stacked, bases, per_layer))
        loss, after_vjp = jax.vjp(lambda p, x: after(p, x, inputs), rest, x)
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise ValueError(f"`after` must return a floating point scalar, got {loss}.")
        # It is read here and in the end: without a barrier XLA might keep it in float32 till then.
        rest_grads, dx = jax.lax.optimization_barrier(after_vjp(jnp.ones_like(loss)))
        squares = jnp.zeros(count + 1, jnp.float32).at[0].set(_squared_norm(rest_grads))

        def backward(n: jax.Array, carry: Any) -> Any:
            dx, stacked, optimizer, squares, moved = carry
            i = count - 1 - n
            block, layer_state = take(stacked, i), take(optimizer, i)
            given = block, bases_of(layer_state), take(per_layer, i)
            grads, dx = one_layer.backward(given, take(kept, i), dx)
            square = _squared_norm(grads)
            squares = squares.at[n + 1].set(square)
            estimate = _estimated_norm(jnp.sum(squares), known_then[n + 1], last_norm)
            grads = clipped(grads, square, last_norm, estimate)
            due = whole if due_layers is None else due_layers[i]
            block, layer_state, more = update_one(tx, grads, layer_state, block, due)
            return dx, put(stacked, block, i), put(optimizer, layer_state, i), squares, moved + more

        carry = dx, stacked, state.optimizer.layers, squares, jnp.zeros((), jnp.float32)
        dx, stacked, layers_state, squares, moved = jax.lax.fori_loop(0, count, backward, carry)

        rest_grads = jax.tree.map(jnp.add, rest_grads, before_vjp(dx)[0])
        square = _squared_norm(rest_grads)
        norm = jnp.sqrt(jnp.sum(squares[1:]) + square)
        rest_grads = clipped(rest_grads, square, last_norm, norm)
        rest, rest_state, more = update_one(tx, rest_grads, state.optimizer.rest, rest, whole)
        state = InBackwardState(LayerwiseState(layers_state, rest_state), norm, squares)
        return merge(stacked, rest, params), state, loss, jnp.sqrt(moved + more)

    return InBackward(init, step)


def _squared_norm(grads: Any) -> jax.Array:
    return global_norm(grads).astype(jnp.float32) ** 2


def _estimated_norm(known: jax.Array, then: jax.Array, last_norm: jax.Array) -> jax.Array:
    """Returns what the norm of a gradient will be, of which some parts are known.

    Args:
      known: sum of the squared norms of these parts.
      then: the same in the last step.
      last_norm: that of the whole gradient in the last step; 0 if there was none.
    """
    growth = jnp.sqrt(known / jnp.where(then > 0, then, 1))
    return jnp.maximum(jnp.sqrt(known), jnp.where(then > 0, last_norm * growth, 0))


class _LayerVjp:
    """The vector-Jacobian product of one layer, cut in two: one loop keeps what the other reads.

    What the layer is given, its weights among it, is there in the backward loop too and is not kept
    twice. `backward` reads what `forward` found out while it was traced.
    """

    def __init__(self, layer: Callable[[Any, Any, Any], Any], inputs: Any) -> None:
        """Takes a function `layer(params, x, own)`, and what it closes over.

        Args:
          layer: from the parameters of one layer, in the structure of all, its input and its slice
            of `per_layer` to its output.
          inputs: arrays that it reads besides, the same in every layer.
        """
        self._layer = layer
        self._inputs = inputs

    def forward(self, x: Any, given: Any) -> tuple[Any, list[jax.Array]]:
        """Returns the output and the residuals that are the layer's own; a body of `lax.scan`."""
        block, bases, own = given
        self._taps = taps = plan_taps(lambda p: self._layer(p, x, own), block, bases)
        y, vjp = jax.vjp(
            lambda d, x: self._layer(taps.merge(block, d, bases), x, own), taps.split(block), x
        )
        residuals, self._treedef = jax.tree.flatten(vjp)
        places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((given, self._inputs)))}
        self._places = [places.get(id(residual)) for residual in residuals]
        return y, [r for r, i in zip(residuals, self._places, strict=True) if i is None]

    def backward(self, given: Any, kept: list[jax.Array], dy: Any) -> tuple[Any, Any]:
        """Returns the gradient of the layer's parameters, and the cotangent of its input."""
        leaves, own = jax.tree.leaves((given, self._inputs)), iter(kept)
        residuals = [next(own) if i is None else leaves[i] for i in self._places]
        gradient, dx = jax.tree.unflatten(self._treedef, residuals)(dy)
        return self._taps.join(gradient, given[1]), dx
