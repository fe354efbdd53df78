"""States of stacked weights: one for each layer, and one for the rest."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from actjax._core.paths import named_leaves
from actjax.optim.checks import check_callable, check_transform
from actjax.optim.layers import (
    LayerwiseState,
    count_layers,
    default_layers,
    merge,
    no_layers,
    split,
)
from actjax.optim.projected.subspace import Subspace, SubspaceState, SubspaceTransformation
from actjax.optim.rounding.stochastic import RoundedState, RoundedTransformation, WeightRounding
from actjax.optim.stepping.across import check_separate
from actjax.optim.stepping.pieces import only, plan_pieces, without
from actjax.optim.stepping.pieces import stacked as cut_into


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
      ValueError: `tx` looks at several arrays at once, as `optax.clip_by_global_norm` does; the
        arrays of the layers do not share their leading axis; a `subspace`, or a
        transform that rounds weights, is inside another transform; an input group of a `subspace`
        has weights inside and outside the layers.
    """
    check_transform("tx", tx)
    layers = default_layers(params) if layers is None else layers
    check_callable("layers", layers)
    state = _init(tx, params, layers)
    _check_separate(tx, params, layers)
    return state


def _check_separate(
    tx: optax.GradientTransformation, params: Any, layers: Callable[[Any], Any]
) -> None:
    """Raises a `ValueError` for a transform that looks at several arrays at once."""
    inner = tx.rounding.inner if isinstance(tx, RoundedTransformation) else tx
    first = inner.init
    if isinstance(inner, SubspaceTransformation):
        # Not the state of the plain transform, which refreshes all bases itself.
        first = functools.partial(inner.subspace.init_from, key=jax.random.key(0))
    stacked, rest = split(params, layers)
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    check_separate(first, inner.update, merge(layer, rest, params))


def _init(
    tx: optax.GradientTransformation, params: Any, layers: Callable[[Any], Any]
) -> LayerwiseState:
    """Returns what `init` does, without looking at the transform."""
    if isinstance(tx, RoundedTransformation):
        return _init_rounded(tx.rounding, params, layers)
    stacked, rest = split(params, layers)
    count = count_stacked(stacked, layers)
    if isinstance(tx, SubspaceTransformation):
        tx.subspace.check_groups(params)
        return _init_subspace(tx.subspace, stacked, rest, count)
    cuts = _cuts_of(tx, rest)
    state = LayerwiseState(
        jax.vmap(tx.init)(stacked) if count else (),
        tx.init(without(rest, cuts)),
        {name: jax.vmap(tx.init)(_stack_of(rest, name, n)) for name, n in cuts.items()},
    )
    _check_outermost(state)
    return state


def _cuts_of(tx: optax.GradientTransformation, rest: Any) -> dict[str, int]:
    """Returns the number of pieces of each matrix of the rest that is updated in pieces, by path.

    A matrix that a subspace projects stays whole: its basis is one of all its rows.
    """
    if not isinstance(tx, SubspaceTransformation):
        return plan_pieces(rest, lambda _: False)
    return plan_pieces(rest, tx.subspace.projects)


def _stack_of(tree: Any, name: str, count: int) -> Any:
    """Returns the pieces of one matrix, with a leading axis, in the place of it."""
    return only(tree, name, cut_into(named_leaves(tree)[name], count))


def count_stacked(stacked: Any, layers: Callable[[Any], Any]) -> int:
    """Returns the number of stacked layers; 0 if the parameters have none."""
    return 0 if layers is no_layers else count_layers(stacked)


def _check_outermost(state: LayerwiseState) -> None:
    """Raises a `ValueError` for the state of a transform that `apply` cannot see in another."""
    kinds = SubspaceState, RoundedState
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    if any(isinstance(x, SubspaceState) for x in nodes):
        raise ValueError(
            "`tx` has a subspace inside another transform, where `apply` cannot refresh it: pass"
            " the transforms before it as its `inner`, such as subspace(eight_bit(adam), rank), and"
            " those after it as its `outer`."
        )
    if any(isinstance(x, RoundedState) for x in nodes):
        raise ValueError(
            "`tx` has stochastic_rounding inside another transform, where `apply` cannot write"
            " rounded weights: put the other transforms into it, such as"
            " stochastic_rounding(optax.chain(clip, adamw))."
        )


def _init_rounded(
    rounding: WeightRounding, params: Any, layers: Callable[[Any], Any]
) -> LayerwiseState:
    rounding.check_params(params)
    inner = _init(rounding.inner, rounding.seen_by_inner(params), layers)
    stacked, rest = split(params, layers)
    cuts, count = _cuts_of(rounding.inner, rest), count_stacked(stacked, layers)
    of_rest = rounding.state_of(inner.rest, rounding.key)
    # A separate key for each layer: otherwise all layers would be rounded by the same numbers.
    keys = jax.random.split(rounding.key, count + sum(cuts.values()))
    of_layers = ()
    if count:
        of_layers = jax.vmap(rounding.state_of)(inner.layers, keys[:count])
    pieces, used = {}, count
    for name, n in cuts.items():
        pieces[name] = jax.vmap(rounding.state_of)(inner.pieces[name], keys[used : used + n])
        used += n
    return LayerwiseState(of_layers, of_rest, pieces)


def _init_subspace(subspace: Subspace, stacked: Any, rest: Any, count: int) -> LayerwiseState:
    key = jax.random.key(subspace.seed)
    cuts = plan_pieces(rest, subspace.projects)
    of_rest = subspace.init_from(without(rest, cuts), key)
    # Without bases, the key of a piece is never used.
    pieces = {
        name: jax.vmap(lambda piece: subspace.init_from(piece, key))(_stack_of(rest, name, n))
        for name, n in cuts.items()
    }
    if not count:
        return LayerwiseState((), of_rest, pieces)
    # A separate key for each layer: otherwise all layers would get the same random bases.
    keys = jax.random.split(key, count)
    of_layers = jax.lax.map(lambda layer: subspace.init_from(*layer), (stacked, keys))
    state = LayerwiseState(of_layers, of_rest, pieces)
    if shared := sorted(set(state.layers.bases) & set(state.rest.bases)):
        raise ValueError(
            f"input groups {shared} in `groups` of subspace have weights inside and outside the"
            " layers, but each layer has a separate basis: use different names."
        )
    return state


def check_state(
    tx: optax.GradientTransformation, state: Any, params: Any, layers: Callable[[Any], Any]
) -> None:
    """Raises a `ValueError` unless a state has the arrays that `init` makes, with their shapes.

    Layers are indexed in stacks, and JAX raises no error for an index out of range.
    """
    expected = _shapes(jax.eval_shape(lambda p: _init(tx, p, layers), params))
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
