"""Updates of stacked weights in place, one layer at a time.

`optax.apply_updates(params, tx.update(grads, state, params))` creates an update as large as the
model, and writes new weights and moments while the old ones are still read. Here a loop takes one
layer out of donated stacks, updates it and writes it back, so that only one layer exists twice.
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
    default_layers,
    densify,
    merge,
    no_layers,
    put,
    split,
    split_gradient,
    square_norm,
    take,
)
from actjax.optim.rounding import RoundedState, RoundedTransformation, WeightRounding
from actjax.optim.subspace import Subspace, SubspaceState, SubspaceTransformation


def init(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    layers: Callable[[Any], Any] | None = None,
) -> LayerwiseState:
    """Returns the state of `tx` for `apply`: one for each layer, and one for the rest.

    Args:
      tx: an optax transform that treats each array separately: see `apply`.
      params: the parameters.
      layers: from the parameters to the subtree whose arrays have a leading axis of layers; by
        default the attribute or entry `layers`, and without stacked layers there nothing.

    Raises:
      TypeError: `tx` is not a transform, or `layers` is not a function.
      ValueError: the arrays of the layers do not share their leading axis; a `subspace`, or a
        transform that rounds weights, is inside another transform; an input group of a `subspace`
        has weights inside and outside the layers.
    """
    check_transform("tx", tx)
    layers = default_layers(params) if layers is None else layers
    check_callable("layers", layers)
    if isinstance(tx, RoundedTransformation):
        return _init_rounded(tx.rounding, params, layers)
    stacked, rest = split(params, layers)
    count = _count(stacked, layers)
    if isinstance(tx, SubspaceTransformation):
        tx.subspace.check_groups(params)
        return _init_subspace(tx.subspace, stacked, rest, count)
    state = LayerwiseState(jax.vmap(tx.init)(stacked) if count else (), tx.init(rest))
    _check_outermost(state)
    return state


def _count(stacked: Any, layers: Callable[[Any], Any]) -> int:
    """Returns the number of stacked layers; 0 if the parameters have none."""
    return 0 if layers is no_layers else count_layers(stacked)


def _check_outermost(state: LayerwiseState) -> None:
    """Raises a `ValueError` for the state of a transform that `apply` cannot see in another."""
    kinds = SubspaceState, RoundedState
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    if any(isinstance(x, SubspaceState) for x in found):
        raise ValueError(
            "`tx` has a subspace inside another transform, where `apply` cannot refresh it: pass"
            " the transforms before it as its `inner`, such as subspace(eight_bit(adam), rank), and"
            " those after it as its `outer`."
        )
    if any(isinstance(x, RoundedState) for x in found):
        raise ValueError(
            "`tx` has stochastic_rounding or compensated inside another transform, where `apply`"
            " cannot write rounded weights: put the other transforms into it, such as"
            " stochastic_rounding(optax.chain(clip, adamw))."
        )


def _init_rounded(
    rounding: WeightRounding, params: Any, layers: Callable[[Any], Any]
) -> LayerwiseState:
    rounding.check_params(params)
    inner = init(rounding.inner, rounding.seen_by_inner(params), layers=layers)
    stacked, rest = split(params, layers)
    of_rest, count = rounding.state_of(inner.rest, rest, rounding.key), _count(stacked, layers)
    if not count:
        return LayerwiseState((), of_rest)
    # A separate key for each layer: otherwise all layers would be rounded by the same numbers.
    keys = jax.random.split(rounding.key, count)
    return LayerwiseState(jax.vmap(rounding.state_of)(inner.layers, stacked, keys), of_rest)


def _init_subspace(subspace: Subspace, stacked: Any, rest: Any, count: int) -> LayerwiseState:
    key = jax.random.key(subspace.seed)
    of_rest = subspace.init_from(rest, key)
    if not count:
        return LayerwiseState((), of_rest)
    # A separate key for each layer: otherwise all layers would get the same random bases.
    keys = jax.random.split(key, count)
    of_layers = jax.lax.map(lambda layer: subspace.init_from(*layer), (stacked, keys))
    state = LayerwiseState(of_layers, of_rest)
    if shared := sorted(set(state.layers.bases) & set(state.rest.bases)):
        raise ValueError(
            f"input groups {shared} in `groups` of subspace have weights inside and outside the"
            " layers, but each layer has a separate basis: use different names."
        )
    return state


def apply(
    tx: optax.GradientTransformation,
    grads: Any,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] | None = None,
    refresh: bool | jax.Array = False,
    with_norm: bool = False,
) -> Any:
    """Updates parameters and state with a gradient, one stacked layer after the other, in place.

    It computes `optax.apply_updates(params, tx.update(grads, state, params)[0])` for each layer
    separately and for the rest, without an update or a second copy of all weights. Parameters
    without stacked layers, such as a dict of arrays or a list of trees, are the rest.

    Donate `state` and `params` to the jitted function around it, which must take and return them in
    the same order: JAX assigns donated buffers to results of the same shape in this order, and
    everything would be copied if a first moment got the buffer of a weight.

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            loss, grads = actjax.value_and_grad(loss_function)(params, batch)
            params, state = actjax.optim.apply(tx, grads, state, params)
            return params, state, loss

    On several devices, place `params` and `state` on a mesh, or set it with `jax.set_mesh`. If the
    mesh is named only in `in_shardings` of `jax.jit`, all weights and states are gathered whole.

    `LowRank` gradients are multiplied out one layer at a time (Wei et al., 2026, section 4,
    strategy (i)); `actjax.optim.subspace` takes the factors (strategy (ii)).

    Args:
      tx: an optax transform. A transform that reads several arrays at once, such as
        `optax.clip_by_global_norm`, gets one layer: clip with `actjax.clip_by_global_norm` before.
        A mask that is a function gets one layer, or the rest. Transforms that need more than
        gradients and parameters, such as the value of the loss, are not supported.
      grads: gradient, in the structure of `params`, with `LowRank` for factored gradients.
      state: what `actjax.optim.init(tx, params)` or the last `apply` returned.
      params: the parameters.
      layers: as for `init`.
      refresh: for a `subspace`, whether to take new bases from this gradient before it is applied:
        static under `jax.jit`. An array [layers] of bool refreshes these layers, and not the rest.
      with_norm: whether to also return the norm of what was added to the parameters, before they
        were rounded.

    Returns:
      The new parameters and state, and the norm, float32, if `with_norm`.

    Raises:
      ValueError: a gradient or state whose structure or shapes do not fit the parameters, or
        `refresh` for a transform other than `subspace`.
    """
    layers = default_layers(params) if layers is None else layers
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    stacked_grads, rest_grads = split_gradient(grads, params, layers)
    count = _count(stacked, layers)
    whole, due_layers = refresh_by_layer(tx, refresh, count)

    def body(i: jax.Array, carry: Any) -> Any:
        params, state, square = carry
        layer = take(stacked_grads, i), take(state, i), take(params, i)
        due = whole if due_layers is None else due_layers[i]
        new, new_state, moved = update_one(tx, *layer, due)
        return put(params, new, i), put(state, new_state, i), square + moved

    carry = stacked, state.layers, jnp.zeros((), jnp.float32)
    stacked, layers_state, square = jax.lax.fori_loop(0, count, body, carry) if count else carry
    rest, rest_state, moved = update_one(tx, rest_grads, state.rest, rest, whole)
    result = merge(stacked, rest, params), LayerwiseState(layers_state, rest_state)
    return (*result, jnp.sqrt(square + moved)) if with_norm else result


def redraw(
    tx: SubspaceTransformation,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] | None = None,
    due: jax.Array | None = None,
) -> LayerwiseState:
    """Returns the state with new random bases, for a `subspace` whose `source` is "random".

    Args:
      tx: the transform.
      state: what `init` or `apply` returned.
      params: the parameters.
      layers: as for `init`.
      due: which layers, [layers] of bool, get new bases, and not the rest; everything if None.

    Raises:
      ValueError: a state whose structure or shapes do not fit, or a source other than "random".
    """
    layers = default_layers(params) if layers is None else layers
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    count = _count(stacked, layers)
    whole, due_layers = refresh_by_layer(tx, True if due is None else due, count)

    def body(i: jax.Array, layers_state: Any) -> Any:
        old, block = take(layers_state, i), take(stacked, i)
        new = tx.refresh(None, old, block)
        if due_layers is not None:
            chosen = due_layers[i]
            new = jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)
        return put(layers_state, new, i)

    drawn = jax.lax.fori_loop(0, count, body, state.layers) if count else ()
    return LayerwiseState(drawn, tx.refresh(None, state.rest, rest) if whole else state.rest)


def check_state(
    tx: optax.GradientTransformation, state: Any, params: Any, layers: Callable[[Any], Any]
) -> None:
    """Raises a `ValueError` unless a state has the arrays that `init` makes, with their shapes.

    Layers are indexed in stacks, and JAX raises no error for an index out of range.
    """
    expected = _shapes(jax.eval_shape(lambda p: init(tx, p, layers=layers), params))
    got = _shapes(state)
    if isinstance(state, LayerwiseState) and got == expected:
        return
    differing = [name for name in {**expected, **got} if got.get(name) != expected.get(name)]
    shown = "".join(
        f" `{name}` is {got.get(name, 'missing')}, expected {expected.get(name, 'nothing')}."
        for name in differing[:1]
    )
    raise ValueError(
        "`state` must be what `actjax.optim.init(tx, params)` or the last `apply` returned for this"
        f" transform and these parameters: got {type(state).__name__}.{shown}"
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def refresh_by_layer(
    tx: optax.GradientTransformation, refresh: Any, count: int
) -> tuple[bool, jax.Array | None]:
    """Returns whether everything is refreshed, and, if only some layers may be, which: [count].

    Raises:
      ValueError: `refresh` is neither a bool nor an array of bool for the layers, or `tx` is not a
        `subspace`.
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
    """Updates one tree: returns parameters, state and the squared norm of what was added.

    Args:
      tx: the transform.
      grads: gradient, with `LowRank` for factored gradients.
      state: state of the transform for this tree.
      params: the parameters.
      refresh: whether to take new bases first; a bool, or a scalar array for one of several layers.
    """
    if not isinstance(tx, SubspaceTransformation):
        grads = densify(grads)
    elif isinstance(refresh, jax.Array):
        state = jax.lax.cond(refresh, lambda: tx.refresh(grads, state, params), lambda: state)
    elif refresh:
        state = tx.refresh(grads, state, params)
    if isinstance(tx, RoundedTransformation):
        params, state, updates = tx.rounding.apply(grads, state, params)
    else:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, square_norm(updates)
