"""Updating stacked weights in place, a layer at a time.

`optax.apply_updates(params, tx.update(grads, state, params))` makes an update as large as the
model, and writes new weights and moments while the old are still read. Here a loop takes one layer
out of donated stacks, updates it and writes it back: what exists beside the stacks is one layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from actjax.optim.checks import check_callable, check_transform
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
from actjax.optim.subspace import SubspaceState, SubspaceTransformation


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
      TypeError: `tx` is no transform, or `layers` no function.
      ValueError: the arrays of the layers do not share their leading axis; a `subspace` is within
        another transform, or has a basis for a weight of the layers and another one.
    """
    check_transform("tx", tx)
    check_callable("layers", layers)
    stacked, rest = split(params, layers)
    count = count_layers(stacked)
    if isinstance(tx, SubspaceTransformation):
        # Layers draw from keys of their own: random bases of all layers would else be one.
        tx.check_groups(params)
        key = jax.random.key(tx.seed)
        keys = jax.random.split(key, count)
        drawn = jax.lax.map(lambda layer: tx.init_from(*layer), (stacked, keys))
        state = LayerwiseState(drawn, tx.init_from(rest, key))
        if shared := sorted(set(drawn.bases) & set(state.rest.bases)):
            raise ValueError(
                f"`groups` of subspace has {shared} for weights of the layers, each of which has a"
                " basis of its own, and for others: name these differently."
            )
        return state
    state = LayerwiseState(jax.vmap(tx.init)(stacked), tx.init(rest))
    is_subspace = lambda x: isinstance(x, SubspaceState)  # noqa: E731
    if any(map(is_subspace, jax.tree.leaves(state, is_leaf=is_subspace))):
        raise ValueError(
            "`tx` has a subspace within another transform, out of which it could not be refreshed:"
            " pass what comes before it as its `inner`, such as subspace(eight_bit(adam), rank),"
            " and what comes after as its `outer`."
        )
    return state


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
        A mask that is a function is given one layer, or what is in none. Not one that wants more
        than gradients and parameters, such as the value of the loss.
      grads: gradient, in the structure of `params`, with `LowRank` where weights are factored.
      state: what `actjax.optim.init(tx, params)` returned, or the last `apply`.
      params: the parameters.
      layers: as for `init`.
      refresh: for a `subspace`, whether new bases are taken from this gradient, before it is
        applied: static, under `jax.jit`. An array [layers] of bool refreshes some layers only, and
        not the rest.
      with_norm: also return the norm of what was added to the parameters.

    Returns:
      The new parameters and state; the norm, float32, if asked for.

    Raises:
      ValueError: a gradient or state of another structure or shape than the parameters, or
        `refresh` for a transform that has none.
    """
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    stacked_grads, rest_grads = split_gradient(grads, params, layers)
    count = count_layers(stacked)
    whole, due_layers = refresh_by_layer(tx, refresh, count)

    def body(i: jax.Array, carry: Any) -> Any:
        params, state, square = carry
        layer = take(stacked_grads, i), take(state, i), take(params, i)
        due = whole if due_layers is None else due_layers[i]
        new, new_state, moved = update_one(tx, *layer, due)
        return put(params, new, i), put(state, new_state, i), square + moved

    zero = jnp.zeros((), jnp.float32)
    stacked, layers_state, square = jax.lax.fori_loop(0, count, body, (stacked, state.layers, zero))
    rest, rest_state, moved = update_one(tx, rest_grads, state.rest, rest, whole)
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

    Raises:
      ValueError: a state of another structure or shape, or bases that are not random.
    """
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    count = count_layers(stacked)
    whole, due_layers = refresh_by_layer(tx, True if due is None else due, count)

    def body(i: jax.Array, layers_state: Any) -> Any:
        old, block = take(layers_state, i), take(stacked, i)
        new = tx.refresh(None, old, block)
        if due_layers is not None:
            chosen = due_layers[i]
            new = jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)
        return put(layers_state, new, i)

    drawn = jax.lax.fori_loop(0, count, body, state.layers)
    return LayerwiseState(drawn, tx.refresh(None, state.rest, rest) if whole else state.rest)


def check_state(
    tx: optax.GradientTransformation, state: Any, params: Any, layers: Callable[[Any], Any]
) -> None:
    """Raises a `ValueError` unless a state has the arrays that `init` makes, of their shapes.

    Layers are taken out of stacks by their number, and one that is not there is no error of JAX's.
    """
    expected = _shapes(jax.eval_shape(lambda p: init(tx, p, layers=layers), params))
    got = _shapes(state)
    if isinstance(state, LayerwiseState) and got == expected:
        return
    differing = [name for name in {**expected, **got} if got.get(name) != expected.get(name)]
    shown = "".join(
        f" `{name}` is {got.get(name, 'not there')}, expected {expected.get(name, 'nothing')}."
        for name in differing[:1]
    )
    raise ValueError(
        "`state` must be what `actjax.optim.init(tx, params)` returned for this transform and these"
        f" parameters, or the last `apply`: got {type(state).__name__}.{shown}"
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def refresh_by_layer(
    tx: optax.GradientTransformation, refresh: Any, count: int
) -> tuple[bool, jax.Array | None]:
    """Returns whether all is refreshed and, if only some layers may be, which: [count] of bool.

    Raises:
      ValueError: `refresh` is neither, or `tx` has nothing to refresh.
    """
    if isinstance(refresh, bool | np.bool_):
        whole, due = bool(refresh), None
    else:
        whole, due = False, jnp.asarray(refresh)
        if due.shape != (count,) or due.dtype != jnp.bool_:
            raise ValueError(
                "`refresh` must be a bool that is known when the step is traced (under jax.jit,"
                ' static_argnames="refresh"), or an array of bool for the'
                f" {count} layers: got {due.dtype}{list(due.shape)}."
            )
    if not isinstance(tx, SubspaceTransformation) and (whole or due is not None):
        raise ValueError(f"`refresh` is for actjax.optim.subspace, got tx={type(tx).__name__}.")
    return whole, due


def update_one(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, refresh: Any
) -> tuple[Any, Any, jax.Array]:
    """Updates one tree: returns parameters, state and the squared norm of what was added."""
    if not isinstance(tx, SubspaceTransformation):
        grads = densify(grads)
    elif isinstance(refresh, jax.Array):
        # One layer of several: which, is known when the step runs.
        state = jax.lax.cond(refresh, lambda: tx.refresh(grads, state, params), lambda: state)
    elif refresh:
        state = tx.refresh(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, square_norm(updates)
