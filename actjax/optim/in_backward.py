"""The optimizer inside the backward pass: no gradient of all weights ever exists.

LOMO (Lv et al., 2023) and GaLore's per-layer updates, for layers that are stacked and scanned: the
backward pass is a loop that carries the cotangent of the residual stream and the stacked weights
and states themselves. It finishes one layer's vector-Jacobian product, updates that layer, writes
it back in place and goes on. With it, full-rank AdamW fits where its gradients alone would not.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from actjax.gradients import Bases, plan_taps
from actjax.low_rank import clip_factor, global_norm, scale_tree
from actjax.optim.apply import init as init_layerwise
from actjax.optim.apply import refresh_by_layer, update_one
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

ClipBy = Literal["last_norm", "layer_norm"]


class InBackwardState(NamedTuple):
    """State of `in_backward`.

    Attributes:
      optimizer: a `LayerwiseState`.
      grad_norm: global norm of the last gradient, float32; 0 before the first.
    """

    optimizer: LayerwiseState
    grad_norm: Any


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
    clip_by: ClipBy = "last_norm",
) -> InBackward:
    """Returns a training step that updates each layer within the backward pass.

    The model is given as three functions:

        before(params, inputs) -> x                     # embedding
        layer(layer_params, x, inputs, slice) -> x      # one layer, and its slice of per_layer
        after(params, x, inputs) -> loss                # last norm, output projection, loss

    `before` and `after` see the parameters without the layers (`None` there); what both read, such
    as a tied embedding, gets the sum of both gradients. `x` is any pytree of floating point arrays.
    Residuals are those that `jax.vjp(layer)` keeps, so codecs, and `jax.checkpoint(layer)`, work as
    ever; a layer's weights are not among them but sliced again. Weights that meet a factored codec
    get factored gradients, and under `subspace` those in its bases.

    Clipping: the norm of the whole gradient is known only when the last layer has been updated.

    Args:
      before: from parameters and inputs to what the first layer reads.
      layer: from the parameters of one layer, without the leading axis, to what the next reads.
      after: from parameters and what the last layer gives to a scalar loss.
      tx: an optax transform that takes each array by itself: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      clip_by: which norm that is. "last_norm": the global norm of the step before, which scales
        all of this step alike; the first step is not clipped. "layer_norm": that of each layer, and
        of the rest, by itself.

    Raises:
      ValueError: `clip` is not positive or `clip_by` unknown.
    """
    if not clip > 0:
        raise ValueError(f"`clip` of in_backward must be above 0, got {clip}.")
    if clip_by not in get_args(ClipBy):
        raise ValueError(f"`clip_by` of in_backward must be one of {get_args(ClipBy)}: {clip_by!r}")

    def init(params: Any) -> InBackwardState:
        optimizer = init_layerwise(tx, params, layers=layers)
        return InBackwardState(optimizer, jnp.zeros((), jnp.float32))

    def clipped(grads: Any, last_norm: jax.Array) -> tuple[Any, jax.Array]:
        """Returns a part of the gradient, clipped, and its squared norm before."""
        norm = global_norm(grads).astype(jnp.float32)
        if math.isfinite(clip):
            reference = norm if clip_by == "layer_norm" else last_norm
            grads = scale_tree(grads, clip_factor(reference, clip))
        return grads, norm**2

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
        """
        stacked, rest = split(params, layers)
        count, last_norm = count_layers(stacked), state.grad_norm
        due_layers = refresh_by_layer(tx, refresh, count)
        lengths = sorted({x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(per_layer)})
        if lengths not in ([], [count]):
            raise ValueError(
                f"arrays of `per_layer` must have a leading axis of {count} layers, got {lengths}."
            )

        def bases_of(optimizer: Any) -> Bases:
            if isinstance(tx, SubspaceTransformation) and refresh is False:
                return tx.bases(optimizer)
            return Bases({})

        x, before_vjp = jax.vjp(lambda p: before(p, inputs), rest)
        static: dict[str, Any] = {}

        def forward(x: Any, xs: Any) -> tuple[Any, list[Any]]:
            block, bases, slices = xs
            taps = plan_taps(lambda p: layer(layers(p), x, inputs, slices), block, bases)
            y, vjp = jax.vjp(
                lambda d, x: layer(layers(taps.merge(block, d, bases)), x, inputs, slices),
                taps.split(block),
                x,
            )
            residuals, treedef = jax.tree.flatten(vjp)
            # What a layer is given is there in the backward pass too, and is not kept twice.
            given = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((xs, inputs)))}
            positions = [given.get(id(residual)) for residual in residuals]
            static.update(taps=taps, treedef=treedef, positions=positions)
            return y, [r for r, i in zip(residuals, positions, strict=True) if i is None]

        xs = stacked, bases_of(state.optimizer.layers), per_layer
        x, kept = jax.lax.scan(forward, x, xs)
        loss, after_vjp = jax.vjp(lambda p, x: after(p, x, inputs), rest, x)
        rest_grads, dx = after_vjp(jnp.ones_like(loss))

        def backward(n: jax.Array, carry: Any) -> Any:
            dy, stacked, optimizer, squares = carry
            i = count - 1 - n
            block, layer_state = take(stacked, i), take(optimizer, i)
            bases = bases_of(layer_state)
            given = jax.tree.leaves((block, bases, take(per_layer, i))) + jax.tree.leaves(inputs)
            own = iter(take(kept, i))
            residuals = [next(own) if j is None else given[j] for j in static["positions"]]
            gradient, dx = jax.tree.unflatten(static["treedef"], residuals)(dy)
            grads, square = clipped(static["taps"].join(gradient, bases), last_norm)
            due = refresh if due_layers is None else due_layers[i]
            block, layer_state, moved = update_one(tx, grads, layer_state, block, due)
            squares = squares[0] + square, squares[1] + moved
            return dx, put(stacked, block, i), put(optimizer, layer_state, i), squares

        zero = jnp.zeros((), jnp.float32)
        carry = dx, stacked, state.optimizer.layers, (zero, zero)
        dx, stacked, layers_state, squares = jax.lax.fori_loop(0, count, backward, carry)

        rest_grads = jax.tree.map(jnp.add, rest_grads, before_vjp(dx)[0])
        rest_grads, square = clipped(rest_grads, last_norm)
        due = refresh if due_layers is None else False
        rest, rest_state, moved = update_one(tx, rest_grads, state.optimizer.rest, rest, due)
        optimizer = LayerwiseState(layers_state, rest_state)
        state = InBackwardState(optimizer, jnp.sqrt(squares[0] + square))
        return merge(stacked, rest, params), state, loss, jnp.sqrt(squares[1] + moved)

    return InBackward(init, step)
