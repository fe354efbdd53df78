"""Optimizer states in a subspace of the gradient: GaLore, CompAct, and Wei et al.'s "Ours+".

GaLore (Zhao et al., 2024, Algorithm 2) projects a gradient `G` [d, n] to `R = Pᵀ G`, runs Adam on
`R` and adds `α P N` to the weight. With `P` on the input side, `R = (x P)ᵀ dz`: the optimizer and
the stored activation use the same subspace, and `actjax.value_and_grad(..., bases=...)` returns `R`
without a dense gradient and without further error. A random `P` gives CompAct (Shamshoum et al.,
2025). A basis taken from factored gradients gives strategy (ii) of Wei et al. (2026), section 4.

Unlike GaLore, a refresh decomposes no dense matrix (`actjax.optim.projected.bases`).

Fira adds an update without moments for the part that the subspace leaves out, `G - P Pᵀ G`
(`actjax.optim.projected.remainders`), and needs the dense gradient.
"""

import dataclasses
import math
import numbers
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, without_variables
from actjax._core.paths import map_named, named_leaves
from actjax._math.precision import accumulation_dtype
from actjax.codecs.base import check_positive_integer
from actjax.factored.low_rank import is_low_rank
from actjax.factored.taps import Bases
from actjax.optim.checks import check_inner, check_keeps_sign, check_parameters, raise_if
from actjax.optim.layers import LayerwiseState
from actjax.optim.projected.bases import leading_basis, random_basis
from actjax.optim.projected.projections import Projection, Side, plan_projections
from actjax.optim.projected.remainders import ScaledRemainder

Source = Literal["gradient", "random"]


class SubspaceState(NamedTuple):
    """State of `subspace`. A tuple with names, which flax serializes too.

    Attributes:
      step: number of updates taken, int32.
      key: key data (`jax.random.key_data`) of the key for random bases and sketches.
      bases: from the name of an input group to its basis, [..., d, k] or, on the output side,
        [..., n, k].
      inner: state of the inner transform, on projected gradients.
      outer: state of the outer transform.
      next_refresh: the step in which `update` refreshes the bases itself, int32, as in the state
        that `tx.init` returns. None if its caller refreshes them, as `actjax.optim.apply` does.
      remainder: from the path of a projected weight to the norm of the last update of its
        remainder, [...] float32; empty without one.
    """

    step: Any
    key: Any
    bases: dict[str, Any]
    inner: Any
    outer: Any
    next_refresh: Any
    remainder: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Subspace:
    """An optimizer in a subspace. Its fields are the arguments of `subspace`."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    rank: int
    gap: int
    scale: float
    source: Source
    side: Side
    groups: Mapping[str, str] | None
    remainder: ScaledRemainder | None
    bits: int
    seed: int

    def __post_init__(self) -> None:
        for name, smallest in (("rank", 1), ("gap", 1), ("seed", 0), ("bits", 1)):
            value = getattr(self, name)
            if isinstance(value, jax.Array):
                raise ValueError(
                    f"`{name}` of subspace must be a Python integer, got an array. Under"
                    " optax.inject_hyperparams pass"
                    ' `static_args=("rank", "gap", "bits", "seed")`.'
                )
            check_positive_integer("subspace", name, value, minimum=smallest)
        # An array comes from optax.inject_hyperparams, and its value is not known.
        is_positive = isinstance(self.scale, numbers.Real) and 0 < self.scale < math.inf
        if not is_positive and not isinstance(self.scale, jax.Array):
            raise ValueError(
                f"`scale` of subspace must be a finite number above 0, got {self.scale!r}."
            )
        if self.groups is not None and not (
            isinstance(self.groups, Mapping)
            and all(isinstance(name, str) for name in self.groups.values())
        ):
            raise TypeError(
                "`groups` of subspace must map paths of weights to names of input groups, as"
                f" actjax.input_groups returns them, got {self.groups!r}."
            )
        for name, known in (("source", Source), ("side", Side)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ValueError(
                    f"`{name}` of subspace must be one of {get_args(known)}: {value!r}."
                )
        Bases({}, self.bits)  # Raises an error for unknown bits.
        if self.remainder is None:
            return
        if not isinstance(self.remainder, ScaledRemainder):
            raise TypeError(
                "`remainder` of subspace must be an actjax.optim.ScaledRemainder, got"
                f" {self.remainder!r}."
            )
        if self.side == "both":
            raise ValueError(
                "`remainder` of subspace has no meaning with side='both', which projects columns"
                " too: use 'smaller', 'input' or 'output'."
            )
        if self.source == "random":
            raise ValueError(
                "`remainder` of subspace needs orthonormal bases, and those of source='random' are"
                " not: use source='gradient'."
            )

    def init(self, params: Any) -> SubspaceState:
        """Returns the first state of the plain optax transform, which refreshes itself."""
        params = without_variables(params)
        self.check_groups(params)
        state = self.init_from(params, jax.random.key(self.seed))
        return state._replace(next_refresh=jnp.zeros((), jnp.int32))

    def init_from(self, params: Any, key: jax.Array) -> SubspaceState:
        """Returns the first state of a part of the parameters, such as one layer.

        Its caller, `actjax.optim.init`, also runs the refreshes.

        Args:
          params: the part, in the structure of all parameters.
          key: key of its random bases and sketches.
        """
        params = without_variables(params)
        check_parameters("subspace", params)
        projections = self._plan(params)
        bases, remainder = {}, {}
        for path, leaf in _by_path(params).items():
            if path not in projections:
                continue
            for name, size in projections[path].sizes(leaf.shape).items():
                # Orthonormal if it is only a placeholder until the first gradient.
                placeholder = self.source == "gradient"
                if name not in bases:
                    drawn, shape = _fold_name(key, name), (*leaf.shape[:-2], size, self.rank)
                    basis = random_basis(drawn, shape, orthonormal=placeholder)
                    bases[name] = basis.astype(leaf.dtype)
            if self.remainder is not None:
                remainder[path] = self.remainder.init(leaf.shape)
        small = self._projected(params, bases, projections)
        step, words = jnp.zeros((), jnp.int32), jax.random.key_data(key)
        states = self.inner.init(small), self.outer.init(params)
        return SubspaceState(step, words, bases, *states, None, remainder)

    def projects(self, path: str) -> bool:
        """Returns whether a matrix is projected."""
        return self.groups is None or path in self.groups

    def check_groups(self, params: Any) -> None:
        """Raises a `ValueError` if `groups` names a weight that is not in the parameters."""
        unknown = sorted(set(self.groups or ()) - set(_by_path(params)))
        if unknown:
            raise ValueError(
                f"`groups` of subspace names {unknown}, but the parameters are:"
                f" {', '.join(_by_path(params))}."
            )

    def update(
        self, updates: Any, state: SubspaceState, params: Any = None, **extra: Any
    ) -> tuple[Any, SubspaceState]:
        """Returns full-space updates and the next state, as the `update` of an optax transform.

        A state of `tx.init` is refreshed here where that is due.

        Raises:
          ValueError: a refresh is due, but the gradient was taken in the bases. With the state of
            a compiled step, this error is raised when the step runs.
        """
        grads, params = without_variables(updates), without_variables(params)
        projections = self._plan(grads)
        if state.next_refresh is not None:
            state = self._refreshed_if_due(grads, state)
        small = self._projected(grads, state.bases, projections)
        seen = None if params is None else self._projected(params, state.bases, projections)
        adapted, inner = self.inner.update(small, state.inner, seen, **extra)
        full, remainder = self._full(grads, small, adapted, state, projections)
        full, outer = self.outer.update(full, state.outer, params, **extra)
        state = state._replace(step=state.step + 1, inner=inner, outer=outer, remainder=remainder)
        return in_structure_of(full, updates, is_low_rank), state

    def _refreshed_if_due(self, grads: Any, state: SubspaceState) -> SubspaceState:
        due = state.step >= state.next_refresh
        in_bases = [path for path, g in _by_path(grads).items() if _is_in_basis(g)]
        if in_bases:
            raise_if(due, _needs_refresh(self, in_bases[0]))
            return state
        gradient = None if self.source == "random" else grads
        if gradient is not None:
            # A gradient of zeros has no directions: bases wait for the next one.
            leaves = jax.tree.leaves(grads)
            due &= jnp.any(jnp.stack([jnp.any(g != 0) for g in leaves])) if leaves else False
        return jax.lax.cond(
            due, lambda: self.refresh(gradient, state, _shapes(grads)), lambda: state
        )

    def _projected(self, tree: Any, bases: dict[str, Any], plan: dict[str, Projection]) -> Any:
        """Returns gradients or parameters in the subspace, in float32 or float64."""

        def project(path: str, x: Any) -> Any:
            if path in plan:
                return plan[path].project(x, bases)
            x = x.dense() if is_low_rank(x) else x
            return x.astype(accumulation_dtype(x.dtype))

        return _map_by_path(project, tree)

    def _full(
        self,
        grads: Any,
        small: Any,
        adapted: Any,
        state: SubspaceState,
        plan: dict[str, Projection],
    ) -> tuple[Any, dict[str, Any]]:
        """Returns full-space updates, and the norms of those of the remainder.

        Args:
          grads: gradient.
          small: gradient in the subspace.
          adapted: what the inner transform made of it.
          state: the state.
          plan: the projections.
        """
        gradients, projected, kept = _by_path(grads), _by_path(small), dict(state.remainder)

        def back(path: str, n: jax.Array) -> jax.Array:
            if path not in plan:
                return n
            projection = plan[path]
            update = projection.project_back(n, state.bases)
            if self.remainder is None:
                return self.scale * update
            g, r = _dense(path, gradients[path]), projected[path]
            left_out = g - projection.project_back(r, state.bases)
            axis = -2 if projection.input_basis is not None else -1
            outside, kept[path] = self.remainder.update(left_out, r, n, axis, state.remainder[path])
            return self.scale * (update + outside)

        return _map_by_path(back, adapted), kept

    def refresh(self, grads: Any, state: SubspaceState, params: Any) -> SubspaceState:
        """Returns the state with new bases.

        Args:
          grads: gradient of a refresh step, `LowRank` of rank k or more, or dense; None if `source`
            is "random".
          state: the state before.
          params: the parameters, or their shapes.

        Raises:
          ValueError: no gradient where `source` is "gradient", or one where it is "random"; a
            gradient in the old bases, or of a rank below k.
        """
        if (grads is None) != (self.source == "random"):
            raise ValueError(
                "random bases are drawn before the gradient is taken: use"
                " `state = actjax.optim.redraw(tx, state, params)`."
                if self.source == "random"
                else "`grads` of refresh is None: new bases are taken from the gradient."
            )
        grads, params = without_variables(grads), without_variables(params)
        projections = self._plan(params)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step + 1)
        if self.source == "random":
            new = {
                name: random_basis(_fold_name(key, name), old.shape).astype(old.dtype)
                for name, old in state.bases.items()
            }
        else:
            new = self._leading_bases(grads, state.bases, projections, key)
        due = None if state.next_refresh is None else state.step + self.gap
        return state._replace(bases=new, next_refresh=due)

    def _leading_bases(
        self, grads: Any, old: dict[str, Any], projections: dict[str, Projection], key: jax.Array
    ) -> dict[str, Any]:
        """Returns the leading singular vectors of the gradients of each input group."""
        members: dict[str, list[Any]] = {}
        for path, g in _by_path(grads).items():
            if is_low_rank(g) and g.basis_name is not None:
                raise ValueError(
                    f"the gradient of `{path}` was taken in the basis that is to be replaced: take"
                    " the gradient of a refresh step without `bases`."
                )
            if (p := projections.get(path)) is None:
                continue
            for name, side in ((p.input_basis, g), (p.output_basis, g.mT)):
                if name is not None:
                    members.setdefault(name, []).append(side)
        new = {}
        for name, basis in old.items():
            leading = leading_basis(members[name], self.rank, _fold_name(key, name), name)
            leading = leading.astype(basis.dtype)
            # The caller may skip the step of a non-finite gradient: its basis must not stay.
            finite = jnp.all(jnp.isfinite(leading), axis=(-2, -1), keepdims=True)
            new[name] = jnp.where(finite, leading, basis)
        return new

    def bases(self, state: Any) -> Bases:
        """Returns the bases that linear inputs are stored in.

        None unless `side` is "input", and none with a remainder, which takes the whole gradient.

        Args:
          state: what `init`, `refresh`, `actjax.optim.init` or `actjax.optim.apply` returned.
        """
        if self.side != "input" or self.remainder is not None:
            return Bases({}, self.bits)
        if isinstance(state, LayerwiseState):
            parts = [part for part in (state.layers, state.rest) if isinstance(part, SubspaceState)]
            return self._bases({k: v for part in parts for k, v in part.bases.items()})
        if not isinstance(state, SubspaceState):
            raise TypeError(
                "`state` must be what `tx.init` or `actjax.optim.init` returned; for an"
                f" InBackwardState pass `state.optimizer`: got {type(state).__name__}."
            )
        return self._bases(dict(state.bases))

    def _bases(self, arrays: dict[str, Any]) -> Bases:
        return Bases(arrays, self.bits, orthonormal=self.source == "gradient")

    def _plan(self, params: Any) -> dict[str, Projection]:
        return plan_projections(params, rank=self.rank, side=self.side, groups=self.groups)


class SubspaceTransformation(optax.GradientTransformationExtraArgs):
    """The optax transform of a `Subspace`, whose methods `init` and `update` are.

    `optax.chain` and other wrappers return a transform without the attributes below, and need none
    of them: the state says when it is refreshed. To call `refresh` and `bases` on its part of their
    state, keep the `SubspaceTransformation`.
    """

    @property
    def subspace(self) -> Subspace:
        """Settings and functions."""
        return cast(Subspace, cast(Any, self.init).__self__)

    @property
    def gap(self) -> int:
        """Steps between two refreshes."""
        return self.subspace.gap

    @property
    def source(self) -> Source:
        """Where bases come from."""
        return self.subspace.source

    def refresh(self, grads: Any, state: SubspaceState, params: Any) -> SubspaceState:
        """Returns the state with new bases: see `Subspace.refresh`."""
        return self.subspace.refresh(grads, state, params)

    def bases(self, state: Any) -> Bases:
        """Returns the bases for `actjax.value_and_grad`: see `Subspace.bases`."""
        return self.subspace.bases(state)


def subspace(
    inner: optax.GradientTransformation,
    rank: int,
    *,
    gap: int = 200,
    scale: float = 0.25,
    source: Source = "gradient",
    side: Side = "input",
    groups: Mapping[str, str] | None = None,
    outer: optax.GradientTransformation | None = None,
    remainder: ScaledRemainder | None = None,
    bits: int = 16,
    seed: int = 0,
) -> SubspaceTransformation:
    """Runs `inner` on gradients projected to a subspace of rank `rank`.

    The projected weights get the update `scale · P N`, where `N` is the output of `inner` for
    `Pᵀ G`. Other parameters get the output of `inner` for their gradient. Updates are dense, so
    `outer` acts in full space: weight decay and the learning rate belong there. To avoid a dense
    update of all weights at once, use `actjax.optim.apply`.

    A refresh step takes new bases and keeps the moments, as GaLore does. Make every `gap`-th step
    one, the first included, in its own jitted function, so that the ordinary step reserves no
    memory for it. Its codec needs rank k or more, because the new bases are taken from the factors
    of the gradient:

        state = actjax.optim.init(tx, params)

        loss, grads = actjax.value_and_grad(fun)(params, ...)
        params, state = actjax.optim.apply(tx, grads, state, params, refresh=True)

    In an ordinary step, with `groups` from `actjax.input_groups(fun, params, ...)`:

        loss, grads = actjax.value_and_grad(fun, bases=tx.bases(state))(params, ...)
        params, state = actjax.optim.apply(tx, grads, state, params)

    For random bases, a refresh step is an ordinary step after
    `state = actjax.optim.redraw(tx, state, params)`.

    As a plain optax transform, with `jax.grad` and in `optax.chain` or any other wrapper of optax,
    it takes dense gradients and refreshes its bases itself, in the first update and every `gap`
    updates, within `lax.cond`. If gradients are taken in its bases there, call
    `state = tx.refresh(grads, state, params)` where a refresh is due: `update` raises an error
    otherwise.

    Args:
      inner: a transform, such as `optax.scale_by_adam()`, or `eight_bit(optax.scale_by_adam())`. It
        gets gradients and parameters in the subspace, float32 (or float64): `Pᵀ G` and `Pᵀ W`,
        [..., k, n], for weights that are projected on the input side.
      rank: k.
      gap: steps between two refreshes (GaLore's T). With `actjax.optim.apply` the training loop
        runs the refresh steps.
      scale: α.
      source: "gradient" takes the leading singular vectors of the gradient of a refresh step, on
        the projected side; "random" draws `N(0, 1/k)` from the seed anew at each refresh (CompAct).
      side: which side of a weight [d, n] is projected. "input" shares a basis among the weights of
        an input group, and activations can be stored in it; "smaller" is GaLore's choice. "both"
        projects to `Pᵀ G Q`, [..., k, k] (GaLore, Definition 3.4).
      groups: from the path of each projected weight to the name of its input group, as
        `actjax.input_groups` returns it. None projects every array with two axes that `init` gets,
        each in its own basis, for dense gradients.
      outer: a transform of the full-space updates, such as
        `optax.chain(optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))`.
      remainder: `ScaledRemainder` (Fira) adds an update of the part of a gradient that the subspace
        leaves out; None drops this part. It takes the dense gradient of a weight, and so `jax.grad`
        or `in_backward`, without inputs stored in the subspace.
      bits: what `x P` is stored in under `actjax.value_and_grad`: 16 for the dtype of `x`, or 8.
      seed: seed of random bases and sketches.

    Raises:
      TypeError: `inner` or `outer` is not a transform, or `groups` is not a mapping to names.
      ValueError: an argument out of range, or a transform that rounds weights; at `init`, a rank
        above a projected dimension, a name in `groups` that is not a parameter, or weights with
        different numbers of rows in one input group; at `refresh`, a gradient taken in the bases
        that are to be replaced; at `update`, such a gradient where a refresh is due.
    """
    check_inner("subspace", "inner", inner)
    if outer is not None:
        check_inner("subspace", "outer", outer)
    if remainder is not None:
        check_keeps_sign("subspace with a remainder", inner)
    settings = Subspace(
        inner=optax.with_extra_args_support(inner),
        outer=optax.with_extra_args_support(outer or optax.identity()),
        rank=rank,
        gap=gap,
        scale=scale,
        source=source,
        side=side,
        groups=groups,
        remainder=remainder,
        bits=bits,
        seed=seed,
    )
    return SubspaceTransformation(cast(Any, settings.init), cast(Any, settings.update))


def _needs_refresh(settings: Subspace, path: str) -> str:
    grads = "None" if settings.source == "random" else "grads"
    how = (
        "before the gradient is taken"
        if settings.source == "random"
        else "with a gradient that was taken without `bases`"
    )
    return (
        f"a refresh of the subspace is due, but the gradient of `{path}` was taken in its bases:"
        f" call `state = tx.refresh({grads}, state, params)` {how}, in the first step and every"
        f" {settings.gap} steps (`gap`); within optax.chain or another wrapper, on the state of the"
        " subspace. Or train with `state = actjax.optim.init(tx, params)` and"
        " `actjax.optim.apply(tx, grads, state, params, refresh=...)`. With dense gradients, those"
        " of jax.grad, it refreshes itself."
    )


def _is_in_basis(g: Any) -> bool:
    return is_low_rank(g) and g.basis_name is not None


def _dense(path: str, g: Any) -> jax.Array:
    """Returns the whole gradient of a weight, float32 or float64.

    Raises:
      ValueError: it was taken in a basis, so that the rest of it is not known.
    """
    if _is_in_basis(g):
        raise ValueError(
            f"the gradient of `{path}` was taken in the basis of the subspace, which leaves no"
            " remainder: take it without `bases`, with jax.grad or in actjax.optim.in_backward."
        )
    g = g.dense() if is_low_rank(g) else g
    return g.astype(accumulation_dtype(g.dtype))


def _shapes(grads: Any) -> Any:
    return jax.tree.map(
        lambda g: jax.ShapeDtypeStruct(g.shape, g.dtype), grads, is_leaf=is_low_rank
    )


def _fold_name(key: jax.Array, name: str) -> jax.Array:
    """Returns a key for a name, the same in every process."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _by_path(tree: Any) -> dict[str, Any]:
    return named_leaves(tree, is_leaf=is_low_rank)


def _map_by_path(fun: Callable[[str, Any], Any], tree: Any) -> Any:
    return map_named(fun, tree, is_leaf=is_low_rank)
