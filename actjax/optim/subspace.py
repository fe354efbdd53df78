"""Optimizer states in a subspace of the gradient: GaLore, CompAct, and Wei et al.'s "Ours+".

GaLore (Zhao et al., 2024, Algorithm 2) projects a gradient `G` [d, n] to `R = Pᵀ G`, runs Adam on
`R` and adds `α P N` to the weight. With `P` on the input side, `R = (x P)ᵀ dz`: the subspace of the
optimizer is that in which the activation is stored, and `actjax.value_and_grad(..., bases=...)`
returns `R` without a dense gradient and without further error. A random `P` makes it CompAct
(Shamshoum et al., 2025), one from factored gradients Wei et al. (2026), section 4, strategy (ii).

What it changes: a new basis is taken from the factored gradient of a refresh step, by QR of a thin
and eigenvectors of a small matrix; of a dense gradient, by a randomised range finder (Halko et al.,
2011). No singular value decomposition of a dense matrix anywhere.
"""

import functools
import math
import numbers
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from actjax._core.paths import named_leaves, path_name
from actjax._math.precision import accumulation_dtype, matmul
from actjax.codecs.base import check_positive_integer
from actjax.low_rank import is_low_rank
from actjax.optim.bases import leading_basis, random_basis
from actjax.optim.checks import check_transform
from actjax.optim.eight_bit import SECOND_MOMENTS, is_blockwise
from actjax.optim.layers import LayerwiseState
from actjax.optim.paths import map_state
from actjax.optim.projections import Projection, Side, plan_projections, projected_zeros
from actjax.transforms.taps import Bases

Moments = Literal["keep", "reset", "rotate"]
Source = Literal["gradient", "random"]


class SubspaceState(NamedTuple):
    """State of `subspace`.

    Attributes:
      step: updates done, int32.
      key: words of the key that random bases and sketches are drawn from.
      bases: from the name of a group of weights to its basis, [..., d, k] or, on the output side,
        [..., n, k].
      inner: state of the inner transform, on projected gradients.
      outer: state of the outer transform.
    """

    step: Any
    key: Any
    bases: dict[str, Any]
    inner: Any
    outer: Any


class SubspaceTransformation(optax.GradientTransformationExtraArgs):
    """An optax transform with what a changing subspace needs besides.

    Attributes:
      refresh: `refresh(grads, state, params)` returns the state with new bases.
      bases: `bases(state)` returns them for `actjax.value_and_grad`.
      init_from: `init_from(params, key)` is `init` of a part of the parameters, with a key of its
        own.
      check_groups: `check_groups(params)` raises if `groups` names what is no parameter.
      gap: steps between two refreshes.
      seed: of random bases and sketches.
      source: where bases come from.
    """

    refresh: Callable[..., SubspaceState]
    bases: Callable[[Any], Bases]
    init_from: Callable[[Any, jax.Array], SubspaceState]
    check_groups: Callable[[Any], None]
    gap: int
    seed: int
    source: Source


def subspace(
    inner: optax.GradientTransformation,
    rank: int,
    *,
    gap: int = 200,
    scale: float = 0.25,
    moments: Moments = "keep",
    source: Source = "gradient",
    side: Side = "input",
    groups: Mapping[str, str] | None = None,
    outer: optax.GradientTransformation | None = None,
    bits: int = 16,
    seed: int = 0,
) -> SubspaceTransformation:
    """Runs `inner` on gradients projected to a subspace of rank `rank`.

    The projected weights get the update `scale · P N`, where `N` is what `inner` makes of `Pᵀ G`;
    other parameters get what `inner` makes of their gradient. Updates are dense, so `outer` acts in
    full space: that is where weight decay and the learning rate belong. To hold no dense update of
    all weights at once, use `actjax.optim.apply`.

    Every `gap` steps, the first included, in a jitted function of its own, so that the hot one has
    no room for it; with a codec of rank k at least, for new bases to be taken from its factors:

        loss, grads = actjax.value_and_grad(fun)(params, ...)
        params, state = actjax.optim.apply(tx, grads, state, params, refresh=True)

    and in between, where `groups` are those of `actjax.input_groups(fun, params, ...)`:

        loss, grads = actjax.value_and_grad(fun, bases=tx.bases(state))(params, ...)
        params, state = actjax.optim.apply(tx, grads, state, params)

    Or, with random bases, `state = actjax.optim.redraw(tx, state, params)` before an ordinary step.

    Args:
      inner: a transform of gradients alone, such as `optax.scale_by_adam()`, or
        `eight_bit(optax.scale_by_adam())`. It sees float32 (or float64) arrays, [..., k, n] for
        weights that are projected on the input side, and no parameters.
      rank: k.
      gap: steps between two refreshes (GaLore's T). Whoever runs the steps calls `refresh`.
      scale: α.
      moments: what a refresh does to the moments of `inner`: "keep" them as they are (GaLore),
        "reset" them to zero, or "rotate" them to the new basis: `P_newᵀ P_old m`, and the same with
        squared entries for second moments, which is exact for uncorrelated coordinates.
      source: where bases come from: the "gradient" of a refresh step, its leading singular vectors
        on that side; or "random", `N(0, 1/k)` from the seed, another at each refresh (CompAct).
      side: which side of a weight [d, n] is projected. "input" shares a basis among the weights of
        one input, and is the side that activations can be stored in; "smaller" is GaLore's.
      groups: which weights are projected, by path, and the name of the basis of each: what
        `actjax.input_groups` returns, for inputs to be stored in them. None: every array of two
        axes that `init` sees, each on its own, for gradients that are dense.
      outer: a transform of the full-space updates, such as
        `optax.chain(optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))`.
      bits: what `x P` is stored in under `actjax.value_and_grad`: 16 for the dtype of `x`, or 8.
      seed: of random bases and sketches.

    Raises:
      TypeError: `inner` or `outer` is no transform, or `groups` no mapping of names.
      ValueError: an argument out of range; at `init`, a rank above a projected dimension, a name of
        `groups` that is no parameter, or weights of different rows in one group; at a refresh, a
        gradient that was taken in the bases that are to be replaced.
    """
    check_transform("inner", inner)
    if outer is not None:
        check_transform("outer", outer)
    check_positive_integer("subspace", "rank", rank)
    check_positive_integer("subspace", "gap", gap)
    check_positive_integer("subspace", "seed", seed, minimum=0)
    if not isinstance(scale, numbers.Real) or not 0 < scale < math.inf:
        raise ValueError(f"`scale` of subspace must be a finite number above 0, got {scale!r}.")
    if groups is not None and not (
        isinstance(groups, Mapping) and all(isinstance(name, str) for name in groups.values())
    ):
        raise TypeError(
            "`groups` of subspace must map paths of weights to names of bases, as"
            f" actjax.input_groups returns them, got {groups!r}."
        )
    for name, value, known in (
        ("moments", moments, Moments),
        ("source", source, Source),
        ("side", side, Side),
    ):
        if value not in get_args(known):
            raise ValueError(f"`{name}` of subspace must be one of {get_args(known)}: {value!r}.")
    Bases({}, bits)  # Refuses bits that there are not.
    after = optax.with_extra_args_support(outer or optax.identity())
    plan = functools.partial(plan_projections, rank=rank, side=side, groups=groups)

    def init_from(params: Any, key: jax.Array) -> SubspaceState:
        projections = plan(params)
        bases = {}
        for path, leaf in _by_path(params).items():
            if (p := projections.get(path)) is not None and p.group not in bases:
                shape, drawn = (*leaf.shape[:-2], p.size(leaf), rank), _fold_name(key, p.group)
                # Orthonormal where it only waits for the first gradient.
                basis = random_basis(drawn, shape, orthonormal=source == "gradient")
                bases[p.group] = basis.astype(leaf.dtype)
        small = _map_by_path(
            lambda path, w: projected_zeros(w, projections.get(path), rank), params
        )
        step = jnp.zeros((), jnp.int32)
        words = jax.random.key_data(key)
        return SubspaceState(step, words, bases, inner.init(small), after.init(params))

    def init(params: Any) -> SubspaceState:
        check_groups(params)
        return init_from(params, jax.random.key(seed))

    def check_groups(params: Any) -> None:
        unknown = sorted(set(groups or ()) - set(_by_path(params)))
        if unknown:
            raise ValueError(
                f"`groups` of subspace names {unknown}, but the parameters are:"
                f" {', '.join(_by_path(params))}."
            )

    def update(
        updates: Any, state: SubspaceState, params: Any = None, **extra: Any
    ) -> tuple[Any, SubspaceState]:
        projections = plan(updates)

        def project(path: str, g: Any) -> Any:
            p = projections.get(path)
            if p is None:
                g = g.dense() if is_low_rank(g) else g
                return g.astype(accumulation_dtype(g.dtype))
            return p.project(g, state.bases[p.group])

        def project_back(path: str, n: jax.Array) -> jax.Array:
            p = projections.get(path)
            return n if p is None else scale * p.project_back(n, state.bases[p.group])

        try:
            small, inner_state = inner.update(_map_by_path(project, updates), state.inner)
        except (TypeError, ValueError) as error:
            if "params" in str(error):
                error.add_note(
                    "`inner` of subspace sees projected gradients and no parameters: what reads"
                    " these, such as weight decay, belongs in `outer`."
                )
            raise
        full, outer_state = after.update(
            _map_by_path(project_back, small), state.outer, params, **extra
        )
        state = state._replace(step=state.step + 1, inner=inner_state, outer=outer_state)
        return full, state

    def refresh(grads: Any, state: SubspaceState, params: Any) -> SubspaceState:
        """Returns the state with new bases.

        Args:
          grads: gradient of a refresh step, `LowRank` of rank k at least, or dense; None if
            `source` is "random".
          state: the state before.
          params: the parameters, or their shapes.
        """
        projections = plan(params)
        if (grads is None) != (source == "random"):
            raise ValueError(
                "random bases are drawn before the gradient is taken: use"
                " `state = actjax.optim.redraw(tx, state, params)`."
                if source == "random"
                else "`grads` of refresh is None: new bases are taken from the gradient."
            )
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step + 1)
        members: dict[str, list[Any]] = {}
        for path, g in _by_path(grads).items():
            if is_low_rank(g) and g.basis is not None:
                raise ValueError(
                    f"the gradient of `{path}` was taken in the basis that is to be replaced: take"
                    " that of a refresh step without `bases`."
                )
            if (p := projections.get(path)) is not None:
                members.setdefault(p.group, []).append(g if p.on_input else g.mT)
        new = {}
        for group, old in state.bases.items():
            drawn = _fold_name(key, group)
            if source == "random":
                new[group] = random_basis(drawn, old.shape).astype(old.dtype)
            else:
                found = leading_basis(members[group], rank, drawn, group).astype(old.dtype)
                # A gradient that is no number must not outlive its step, which may be skipped.
                finite = jnp.all(jnp.isfinite(found), axis=(-2, -1), keepdims=True)
                new[group] = jnp.where(finite, found, old)
        changed = {}
        for path, p in projections.items():
            changed[path] = (p, state.bases[p.group], new[p.group])
        moved = _move_moments(moments, state.inner, params, changed)
        return state._replace(bases=new, inner=moved)

    def bases(state: Any) -> Bases:
        """Returns what linear inputs are to be stored in: nothing unless `side` is "input"."""
        if side != "input":
            return Bases({}, bits)
        if isinstance(state, LayerwiseState):
            return Bases({**state.layers.bases, **state.rest.bases}, bits)
        if not isinstance(state, SubspaceState):
            raise TypeError(
                "`state` must be what `tx.init` or `actjax.optim.init` returned; of an"
                f" InBackwardState it is `state.optimizer`: got {type(state).__name__}."
            )
        return Bases(dict(state.bases), bits)

    transformation = SubspaceTransformation(init, cast(Any, update))
    transformation.refresh, transformation.bases = refresh, bases
    transformation.init_from, transformation.check_groups = init_from, check_groups
    transformation.gap, transformation.seed, transformation.source = gap, seed, source
    return transformation


def _move_moments(
    policy: Moments,
    state: Any,
    params: Any,
    changed: dict[str, tuple[Projection, jax.Array, jax.Array]],
) -> Any:
    """Brings the moments of projected weights to their new basis, as `policy` says."""
    if policy == "keep":
        return state

    def move(fields: list[str], weight: str | None, leaf: Any) -> Any:
        if weight not in changed:
            return leaf
        projection, old, new = changed[weight]
        moment = leaf.decode() if is_blockwise(leaf) else leaf
        if policy == "reset":
            moved = jnp.zeros_like(moment)
        else:
            rotation = matmul(new.mT, old)
            if any(field in SECOND_MOMENTS for field in fields):
                rotation = jnp.square(rotation)
            moved = (
                matmul(rotation, moment) if projection.on_input else matmul(moment, rotation.mT)
            ).astype(moment.dtype)
        return leaf.encode(moved) if is_blockwise(leaf) else moved

    return map_state(move, state, params, is_leaf=is_blockwise)


def _fold_name(key: jax.Array, name: str) -> jax.Array:
    """Returns a key for a name, the same in every process."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _by_path(tree: Any) -> dict[str, Any]:
    return named_leaves(tree, is_leaf=is_low_rank)


def _map_by_path(fun: Callable[[str, Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fun(path_name(path), leaf), tree, is_leaf=is_low_rank
    )
