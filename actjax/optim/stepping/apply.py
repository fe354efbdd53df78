"""Updates of stacked weights in place, one layer at a time.

`optax.apply_updates(params, tx.update(grads, state, params))` creates an update as large as the
model, and writes new weights and moments while the old ones are still read. Here a loop takes one
layer out of donated stacks, updates it and writes it back, so that only one layer exists twice.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from actjax._core.paths import named_leaves
from actjax._host import fetched
from actjax.factored.low_rank import LowRank, clip_factor, global_norm, is_low_rank, scale_tree
from actjax.optim.layers import (
    LayerwiseState,
    default_layers,
    densify,
    merge,
    put,
    split,
    split_gradient,
    take,
)
from actjax.optim.projected.subspace import SubspaceTransformation
from actjax.optim.rounding.stochastic import RoundedTransformation
from actjax.optim.states.host_states import read_before_writing
from actjax.optim.stepping import in_place
from actjax.optim.stepping.clipping import check_clip
from actjax.optim.stepping.init import check_state, count_stacked
from actjax.optim.stepping.pieces import count_pieces, cut, filled, only, without
from actjax.optim.stepping.square_norm import no_square, square_norm


def apply(
    tx: optax.GradientTransformation,
    grads: Any,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] | None = None,
    refresh: bool = False,
    with_norm: bool = False,
    clip: float = math.inf,
) -> Any:
    """Updates parameters and state with a gradient, one stacked layer after the other, in place.

    It computes `optax.apply_updates(params, tx.update(grads, state, params)[0])` for each layer
    separately and for the rest, without an update or a second copy of all weights. Parameters
    without stacked layers, such as a dict of arrays or a list of trees, are the rest. A matrix of
    the rest with more than 2^24 numbers, such as an embedding, is updated in pieces: some of its
    rows are an array to the transform, and one that reads norms or means of whole arrays sees those
    of a piece.

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
      tx: an optax transform. `init` refuses one whose update of an array depends on the gradient of
        another, such as `optax.clip_by_global_norm` (use `clip`) or `optax.apply_if_finite`.
        A mask that is a function gets one layer, or the rest. Transforms that need more than
        gradients and parameters, such as the value of the loss, are not supported.
      grads: gradient, in the structure of `params`, with `LowRank` for factored gradients.
      state: what `actjax.optim.init(tx, params)` or the last `apply` returned.
      params: the parameters.
      layers: as for `init`.
      refresh: for a `subspace`, whether to take new bases from this gradient before it is applied:
        static under `jax.jit`.
      with_norm: whether to also return the norm of what was added to the parameters, before they
        were rounded; of matrices with 1,024 rows or more it is estimated from every sixteenth row.
      clip: largest norm of the gradient. The results are those of a gradient from
        `actjax.clip_by_global_norm(grads, clip)`, which is never written to memory.

    Returns:
      The new parameters and state, and the norm, float32, if `with_norm`.

    Raises:
      ValueError: a gradient or state whose structure or shapes do not fit the parameters, `refresh`
        for a transform other than `subspace`, or `clip` is not a number above 0.
    """
    check_clip("apply", clip)
    layers = default_layers(params) if layers is None else layers
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    stacked_grads, rest_grads = split_gradient(grads, params, layers)
    count = count_stacked(stacked, layers)
    check_refresh(tx, refresh)
    factor = None if clip == math.inf else clip_factor(global_norm(grads), clip)

    def clipped(gradient: Any) -> Any:
        return gradient if factor is None else scale_tree(gradient, factor)

    def update_read(layers: Any, gradient: Any) -> tuple[Any, jax.Array]:
        params, state, moved = update_one(tx, clipped(gradient), layers[1], layers[0], refresh)
        return (params, state), moved

    def body(i: jax.Array, carry: Any) -> Any:
        params, state, square = carry
        if in_place.applies(carry, stacked_grads):
            (params, state), moved = in_place.update(update_read, i, (params, state), stacked_grads)
            return params, state, square + moved
        state, old = read_before_writing(state, fetched(take(state, i)))
        layer = clipped(take(stacked_grads, i)), old, take(params, i)
        new, new_state, moved = update_one(tx, *layer, refresh)
        return put(params, new, i), put(state, new_state, i), square + moved

    carry = stacked, state.layers, no_square()
    stacked, layers_state, square = jax.lax.fori_loop(0, count, body, carry) if count else carry
    pieces = {}
    for name in state.pieces:
        gradient = named_leaves(rest_grads, is_leaf=is_low_rank)[name]
        old = state.pieces[name]
        rest, pieces[name], moved = update_pieces(tx, name, gradient, old, rest, clipped)
        square += moved
    rest, rest_state, moved = update_rest(tx, clipped(rest_grads), state, rest, refresh)
    result = merge(stacked, rest, params), LayerwiseState(layers_state, rest_state, pieces)
    return (*result, jnp.sqrt(jnp.sum(square + moved))) if with_norm else result


def update_rest(
    tx: optax.GradientTransformation, grads: Any, state: LayerwiseState, rest: Any, refresh: bool
) -> tuple[Any, Any, jax.Array]:
    """Updates what is in no layer and not cut into pieces: returns as `update_one`."""
    small = without(rest, state.pieces)
    new, new_state, moved = update_one(tx, without(grads, state.pieces), state.rest, small, refresh)
    large = {name: named_leaves(rest)[name] for name in state.pieces}
    return filled(new, large, rest), new_state, moved


def update_pieces(
    tx: optax.GradientTransformation,
    name: str,
    gradient: Any,
    state: Any,
    rest: Any,
    clipped: Callable[[Any], Any] = lambda gradient: gradient,
) -> tuple[Any, Any, jax.Array]:
    """Updates one matrix a piece at a time, in place.

    Args:
      tx: the transform.
      name: path of the matrix.
      gradient: its gradient.
      state: states of its pieces.
      rest: the parameters that are in no layer.
      clipped: from the gradient of a piece to that which is applied.

    Returns:
      The rest with the new matrix, the states, and the `square_norm` of what was added.
    """
    matrix = named_leaves(rest)[name]
    count = count_pieces(matrix.shape)
    # The right factor of a factored gradient is that of every piece.
    rows = cut(gradient.left if is_low_rank(gradient) else gradient, count)

    def update_piece(old: Any, read: Any, g: Any, w: jax.Array) -> tuple[Any, Any]:
        del read
        g = LowRank(g, gradient.right) if is_low_rank(gradient) else g
        g = only(rest, name, clipped(g))
        new, state, moved = update_one(tx, g, old, only(rest, name, w), False)
        (w,) = jax.tree.leaves(new)
        return state, (w, moved)

    def body(i: jax.Array, carry: Any) -> Any:
        weight, state, square = carry
        g, w = take((rows, weight), i, axis=1)
        if in_place.applies(carry, rows):
            state, (w, moved) = in_place.update(update_piece, i, state, (), g, w)
        else:
            state, old = read_before_writing(state, fetched(take(state, i)))
            new, (w, moved) = update_piece(old, (), g, w)
            state = put(state, new, i)
        return put(weight, w, i, axis=1), state, square + moved

    carry = cut(matrix, count), state, no_square()
    weight, state, square = jax.lax.fori_loop(0, count, body, carry)
    changed = {**named_leaves(rest), name: weight.reshape(matrix.shape)}
    return filled(rest, changed, rest), state, square


def redraw(
    tx: SubspaceTransformation,
    state: LayerwiseState,
    params: Any,
    *,
    layers: Callable[[Any], Any] | None = None,
) -> LayerwiseState:
    """Returns the state with new random bases, for a `subspace` whose `source` is "random".

    Args:
      tx: the transform.
      state: what `init` or `apply` returned.
      params: the parameters.
      layers: as for `init`.

    Raises:
      ValueError: a state whose structure or shapes do not fit, or a source other than "random".
    """
    layers = default_layers(params) if layers is None else layers
    check_state(tx, state, params, layers)
    stacked, rest = split(params, layers)
    count = count_stacked(stacked, layers)
    check_refresh(tx, True)

    def body(i: jax.Array, layers_state: Any) -> Any:
        layers_state, old = read_before_writing(layers_state, fetched(take(layers_state, i)))
        return put(layers_state, tx.refresh(None, old, take(stacked, i)), i)

    drawn = jax.lax.fori_loop(0, count, body, state.layers) if count else ()
    of_rest = tx.refresh(None, state.rest, without(rest, state.pieces))
    return LayerwiseState(drawn, of_rest, state.pieces)


def check_refresh(tx: optax.GradientTransformation, refresh: Any) -> None:
    """Raises a `ValueError` unless `refresh` is a bool, and False if `tx` is not a `subspace`."""
    if not isinstance(refresh, bool | np.bool_):
        raise ValueError(
            "`refresh` must be a bool that is known when the step is traced (under jax.jit,"
            f' static_argnames="refresh"): got {refresh!r}.'
        )
    if refresh and not isinstance(tx, SubspaceTransformation):
        raise ValueError(f"`refresh` is for actjax.optim.subspace, got tx={type(tx).__name__}.")


def update_one(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, refresh: bool
) -> tuple[Any, Any, jax.Array]:
    """Updates one tree: returns parameters, state and the `square_norm` of what was added.

    Args:
      tx: the transform.
      grads: gradient, with `LowRank` for factored gradients.
      state: state of the transform for this tree.
      params: the parameters.
      refresh: whether to take new bases first.
    """
    if not isinstance(tx, SubspaceTransformation):
        grads = densify(grads)
    elif refresh:
        state = tx.refresh(grads, state, params)
    if isinstance(tx, RoundedTransformation):
        params, state, updates = tx.rounding.apply(grads, state, params)
    else:
        updates, state = tx.update(grads, state, params)
        # The sum is in float32 where parameters have 16 bits.
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
    return params, state, square_norm(updates)
