"""Updating stacked weights in place, a layer at a time.

`optax.apply_updates(params, tx.update(grads, state, params))` makes an update as large as the
model, and writes new weights and moments while the old are still read. Here a loop takes one layer
out of donated stacks, updates it and writes it back: what exists beside the stacks is one layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from actjax.low_rank import LowRank, is_low_rank
from actjax.optim.layers import (
    LayerwiseState,
    count_layers,
    densify,
    layers_of,
    merge,
    put,
    split,
    split_gradient,
    square_norm,
    take,
)
from actjax.optim.subspace import SubspaceTransformation


def init(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    layers: Callable[[Any], Any] = layers_of,
) -> LayerwiseState:
    """Returns the state of `tx` for `apply`: one of its own for each layer, and one for the rest.

    Args:
      tx: any optax transform that takes each array by itself: see `apply`.
      params: the parameters.
      layers: from the parameters to the subtree whose arrays have a leading axis of layers; by
        default the attribute or entry `layers`.

    Raises:
      ValueError: the arrays of the layers do not share their leading axis.
    """
    stacked, rest = split(params, layers)
    count = count_layers(stacked)
    if isinstance(tx, SubspaceTransformation):
        # Layers draw from keys of their own: random bases of all layers would else be one.
        tx.check_groups(params)
        key = jax.random.key(tx.seed)
        keys = jax.random.split(key, count)
        drawn = jax.lax.map(lambda layer: tx.init_from(*layer), (stacked, keys))
        return LayerwiseState(drawn, tx.init_from(rest, key))
    return LayerwiseState(jax.vmap(tx.init)(stacked), tx.init(rest))


def apply(
    tx: optax.GradientTransformation,
    grads: Any,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] = layers_of,
    refresh: bool | jax.Array = False,
    with_norm: bool = False,
) -> Any:
    """Updates parameters and state with a gradient, stacked layers one after the other, in place.

    What `optax.apply_updates(params, tx.update(grads, state, params)[0])` does for each layer by
    itself and for the rest, without an update or a second copy of all weights. Donate `state` and
    `params` to the jitted function around it, and let that take and return them in the same order:
    JAX gives donated buffers to results of the same shape one after the other, and where the first
    moment got the buffer of a weight, all would be copied.

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            loss, grads = actjax.value_and_grad(loss_function)(params, batch)
            params, state = actjax.optim.apply(tx, grads, state, params)
            return params, state, loss

    `LowRank` gradients are multiplied out a layer at a time (Wei et al., 2026, section 4, strategy
    (i)), but for `actjax.optim.subspace`, which takes the factors (strategy (ii)).

    Args:
      tx: an optax transform. One that looks at several arrays at once, such as
        `optax.clip_by_global_norm`, sees one layer: clip with `actjax.clip_by_global_norm` before.
        Masks must be callables. A transform chained behind `subspace` belongs in its `outer`.
      grads: gradient, in the structure of `params`, with `LowRank` where weights are factored.
      state: what `actjax.optim.init(tx, params)` returned, or the last `apply`.
      params: the parameters.
      layers: as for `init`.
      refresh: for a `subspace`, whether new bases are taken from this gradient, before it is
        applied. An array [layers] of bool refreshes some layers only, and not the rest.
      with_norm: also return the norm of what was added to the parameters.

    Returns:
      The new parameters and state; the norm, float32, if asked for.

    Raises:
      ValueError: a gradient of another structure, or `refresh` for a transform that has none.
    """
    stacked, rest = split(params, layers)
    stacked_grads, rest_grads = split_gradient(grads, params, layers)
    count = count_layers(stacked)
    due_layers = refresh_by_layer(tx, refresh, count)

    def body(i: jax.Array, carry: Any) -> Any:
        params, state, square = carry
        layer = take(stacked_grads, i), take(state, i), take(params, i)
        due = refresh if due_layers is None else due_layers[i]
        new, new_state, moved = update_one(tx, *layer, due)
        return put(params, new, i), put(state, new_state, i), square + moved

    zero = jnp.zeros((), jnp.float32)
    stacked, layers_state, square = jax.lax.fori_loop(0, count, body, (stacked, state.layers, zero))
    rest_refresh = refresh if due_layers is None else False
    rest, rest_state, moved = update_one(tx, rest_grads, state.rest, rest, rest_refresh)
    result = merge(stacked, rest, params), LayerwiseState(layers_state, rest_state)
    return (*result, jnp.sqrt(square + moved)) if with_norm else result


def redraw(
    tx: SubspaceTransformation,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] = layers_of,
    due: jax.Array | None = None,
) -> LayerwiseState:
    """Returns the state with other random bases; for a `subspace` whose `source` is "random".

    Args:
      tx: the transform.
      state: what `init` or `apply` returned.
      params: the parameters.
      layers: as for `init`.
      due: which layers, [layers] of bool, and not the rest; everything if None.
    """
    stacked, rest = split(params, layers)

    count = count_layers(stacked)
    due_layers = refresh_by_layer(tx, True if due is None else due, count)

    def body(i: jax.Array, layers_state: Any) -> Any:
        old, block = take(layers_state, i), take(stacked, i)
        new = tx.refresh(None, old, block)
        if due_layers is not None:
            chosen = due_layers[i]
            new = jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)
        return put(layers_state, new, i)

    drawn = jax.lax.fori_loop(0, count, body, state.layers)
    return LayerwiseState(
        drawn, state.rest if due is not None else tx.refresh(None, state.rest, rest)
    )


def refresh_by_layer(
    tx: optax.GradientTransformation, refresh: Any, count: int
) -> jax.Array | None:
    """Returns which layers are refreshed, [count] of bool; None if `refresh` is one bool for all.

    Raises:
      ValueError: it is neither, or `tx` has nothing to refresh.
    """
    if not isinstance(tx, SubspaceTransformation) and refresh is not False:
        raise ValueError(f"`refresh` is for actjax.optim.subspace, got tx={type(tx).__name__}.")
    if isinstance(refresh, bool):
        return None
    due = jnp.asarray(refresh)
    if due.shape != (count,) or due.dtype != jnp.bool_:
        raise ValueError(
            f"`refresh` must be a bool, or an array of bool for the {count} layers: got"
            f" {due.dtype}{list(due.shape)}."
        )
    return due


def _without_basis(grads: Any) -> Any:
    """Returns a gradient whose factors are taken as they are, since bases have changed."""
    return jax.tree.map(
        lambda g: LowRank(g.left, g.right) if is_low_rank(g) else g, grads, is_leaf=is_low_rank
    )


def update_one(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, refresh: Any
) -> tuple[Any, Any, jax.Array]:
    """Updates one tree: returns parameters, state and the squared norm of what was added."""
    if not isinstance(tx, SubspaceTransformation):
        grads = densify(grads)
    elif isinstance(refresh, jax.Array):
        state = jax.lax.cond(refresh, lambda: tx.refresh(grads, state, params), lambda: state)
    elif refresh:
        state = tx.refresh(grads, state, params)
    if refresh is not False:
        grads = _without_basis(grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, square_norm(updates)
