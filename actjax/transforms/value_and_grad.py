"""Gradients in which a weight that meets a factored codec has a `LowRank`, never a dense matrix.

Wei et al. (2026), section 4: once an activation is stored as `U Vᵀ`, the weight gradient is
`V (Uᵀ dz)`, and need not be multiplied out. With a basis `P` on the input side of a weight, an
operator that stores `x P` alone gives `Pᵀ dw = (x P)ᵀ dz` exactly: the gradient as GaLore (Zhao et
al., 2024) projects it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.paths import named_leaves
from actjax._jaxpr.uses import Use, find_uses
from actjax.codecs.basis import BITS
from actjax.low_rank import LowRank
from actjax.weights.tapped import TappedWeight, plain_weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bases:
    """Bases for the inputs of linear operators, to differentiate in.

    Attributes:
      arrays: from the name of an input (`input_groups`) to its basis, [..., d, k], with the leading
        axes of the weights that it belongs to.
      bits: what `x P` is stored in: 16 for the dtype of `x`, or 8. Static.
    """

    arrays: dict[str, Any]
    bits: int = dataclasses.field(default=16, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"`bits` of Bases must be one of {BITS}, got {self.bits!r}.")


@dataclasses.dataclass(frozen=True)
class _Tapped:
    """What is known of a parameter that will have a factored gradient.

    Attributes:
      path: where it stands.
      group: name of the input that it meets, which is the path of the first weight that meets it.
      rank: of its gradient.
      is_first: whether it is that first weight.
      in_basis: whether the rank is that of a given basis.
      left_dtype: of the factor that the weights of the input share.
    """

    path: str
    group: str
    rank: int
    is_first: bool
    in_basis: bool
    left_dtype: Any


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    bases: Bases | Mapping[str, jax.Array] | None = None,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but weights that meet a factored codec get a `LowRank` gradient.

    A weight that `actjax.linear` or `actjax.qkv_projection` reads with such a codec (all but
    `Exact`) gets the factors, in its own dtype; everything else a dense gradient, as from JAX. No
    dense gradient of a factored weight ever exists, and its product is not computed: about a third
    of the operations of a linear layer.

    Works under `jit`, under `lax.scan` over stacked weights (the factors are stacked likewise),
    `vmap`, `jax.checkpoint`, and in Flax modules of both kinds. `fun` is traced once more than by
    JAX, to find out which weights meet which operator. A weight is known through casts, copies,
    branches and slices of a scan. One that reaches the operator changed, as a transposed or scaled
    one does, or out of a scan under `vmap`, is no longer the parameter: its gradient is dense.

    Args:
      fun: a scalar function, or of a scalar and an auxiliary output if `has_aux`.
      argnums: which arguments to differentiate, as in JAX.
      has_aux: as in JAX.
      bases: where a basis is given for an input, by name (see `input_groups`), its operators store
        the input in that basis instead of encoding it, whatever their codec. The gradient is then
        `LowRank(basis, (x basis)ᵀ dz, name)`.

    Returns:
      A function of the arguments of `fun` to the value, or the value and the auxiliary output, and
      the gradient, shaped like the argument with `LowRank` in the place of weights.

    Raises:
      ValueError: when called: a weight with a factored gradient is read by two operators, more than
        once by one, or by something else; a basis that fits no input.
    """
    given = _checked_bases(bases)
    single = not isinstance(argnums, Sequence)
    numbers: tuple[Any, ...] = (argnums,) if single else tuple(argnums)
    if not all(isinstance(i, int) for i in numbers):
        raise TypeError(f"`argnums` must be an integer, or a sequence of them, got {argnums!r}.")

    @functools.wraps(fun)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in numbers):
            raise TypeError(
                f"`argnums` is {argnums}, but the function was called with {len(args)} positional"
                " arguments: pass what is differentiated by position."
            )
        parameters = tuple(args[i] for i in numbers)

        def of_parameters(parameters: Any) -> Any:
            replaced = list(args)
            for i, value in zip(numbers, parameters, strict=True):
                replaced[i] = value
            return fun(*replaced, **kwargs)

        # A single argument's weights go by their path in it, without its number in front.
        inner = (lambda p: of_parameters((p,))) if single else of_parameters
        tree = parameters[0] if single else parameters
        taps = plan_taps(inner, tree, given)

        def of_taps(differentiated: Any) -> Any:
            result = inner(taps.merge(tree, differentiated, given))
            # A weight may come out again beside the value, as it went in.
            return (result[0], plain_weights(result[1])) if has_aux else result

        value, gradient = jax.value_and_grad(of_taps, has_aux=has_aux)(taps.split(tree))
        return value, taps.join(gradient, given)

    return value_and_gradient


def _checked_bases(bases: Bases | Mapping[str, jax.Array] | None) -> Bases:
    if isinstance(bases, Bases):
        return bases
    if not isinstance(bases, Mapping | None) or any(
        getattr(x, "ndim", 0) < 2 for x in (bases or {}).values()
    ):
        raise TypeError(
            "`bases` must map names of inputs to arrays [..., d, k], as `tx.bases(state)` of a"
            f" subspace does, got {bases!r}."
        )
    return Bases(dict(bases or {}))


def input_groups(fun: Callable[..., Any], *args: Any) -> dict[str, str]:
    """Returns which weights are fed by which input of an `actjax.linear`, in the first argument.

    Weights of one call, such as query, key and value, share their input, and so its stored copy
    and its basis. Nothing is run; arguments may be shapes.

    Args:
      fun: a function whose first argument holds the weights, such as a loss.
      *args: its arguments.

    Returns:
      From the path of a weight, such as "layers.attention.q", to the name of its input, which is
      the path of the first weight that it meets. Weights that cannot have a factored gradient,
      because something else reads them too, are left out.
    """
    parameters, *rest = args
    paths, uses = _uses_by_path(fun, parameters, *rest)
    calls: dict[tuple[int, ...], str] = {}
    groups = {}
    for path, found in zip(paths, uses, strict=True):
        if len(found) == 1 and found[0].operator == "linear":
            groups[path] = calls.setdefault(found[0].call, path)
    return groups


def with_bases(fun: Callable[..., Any], bases: Bases | Mapping[str, jax.Array]) -> Any:
    """Returns `fun` with its linear operators storing their inputs in `bases`.

    What `value_and_grad(fun, bases=bases)` differentiates, for `actjax.explain` to look at. Under
    `jax.grad` its weights that have a basis get no gradient.

    Args:
      fun: a function whose first argument holds the weights.
      bases: as for `value_and_grad`.
    """
    given = _checked_bases(bases)

    @functools.wraps(fun)
    def stored_in_bases(parameters: Any, *args: Any) -> Any:
        taps = plan_taps(lambda p: fun(p, *args), parameters, given)
        return fun(taps.merge(parameters, taps.split(parameters), given), *args)

    return stored_in_bases


@dataclasses.dataclass(frozen=True)
class Taps:
    """Which weights of a function's parameters are tapped. Holds no arrays.

    Attributes:
      treedef: structure of the parameters.
      tapped: by position among their leaves.
    """

    treedef: Any
    tapped: dict[int, _Tapped]

    def split(self, parameters: Any) -> Any:
        """Returns what to differentiate: leaves with a dense gradient, and zero taps."""
        leaves = enumerate(jax.tree.leaves(parameters))
        pairs = [(i, leaf, self.tapped.get(i)) for i, leaf in leaves]
        dense = {i: leaf for i, leaf, plan in pairs if plan is None}
        return dense, {i: _zero_taps(leaf, plan) for i, leaf, plan in pairs if plan is not None}

    def merge(self, parameters: Any, differentiated: Any, bases: Bases) -> Any:
        """Returns the parameters for the function to be called with."""
        dense, taps = differentiated
        leaves = [
            dense[i] if i in dense else _wrap(leaf, taps[i], self.tapped[i], bases)
            for i, leaf in enumerate(jax.tree.leaves(parameters))
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def join(self, gradient: Any, bases: Bases) -> Any:
        """Returns the gradient of the parameters from that of what `split` gave."""
        dense, taps = gradient
        lefts = {self.tapped[i].group: left for i, (left, _) in taps.items() if left is not None}
        leaves: list[Any] = []
        for i in range(len(dense) + len(taps)):
            plan = self.tapped.get(i)
            if plan is None:
                leaves.append(dense[i])
                continue
            right = taps[i][1]
            if plan.in_basis:
                left = bases.arrays[plan.group].astype(right.dtype)
                leaves.append(LowRank(left, right, plan.group))
            else:
                leaves.append(LowRank(lefts[plan.group].astype(right.dtype), right))
        return jax.tree.unflatten(self.treedef, leaves)


def plan_taps(fun: Callable[[Any], Any], parameters: Any, bases: Bases) -> Taps:
    """Finds the weights of `parameters` that meet a factored codec, or a given basis, in `fun`.

    Raises:
      ValueError: one of them cannot have a factored gradient, or a basis fits none.
    """
    paths, uses = _uses_by_path(fun, parameters)
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(parameters)]
    return Taps(jax.tree.structure(parameters), _plan(paths, uses, dtypes, bases))


def _uses_by_path(
    fun: Callable[..., Any], parameters: Any, *args: Any
) -> tuple[list[str], list[list[Use]]]:
    named, treedef = named_leaves(parameters), jax.tree.structure(parameters)
    traced = jax.make_jaxpr(lambda leaves, args: fun(jax.tree.unflatten(treedef, leaves), *args))(
        list(named.values()), args
    )
    return list(named), find_uses(traced.jaxpr)[: len(named)]


def _plan(
    paths: list[str], uses: list[list[Use]], dtypes: list[Any], bases: Bases
) -> dict[int, _Tapped]:
    """Returns, by position, the parameters that get a factored gradient.

    Raises:
      ValueError: one of them cannot, or a basis fits none.
    """
    groups: dict[tuple[int, ...], str] = {}
    plans: dict[int, _Tapped] = {}
    widest: dict[str, Any] = {}
    for i, (path, found) in enumerate(zip(paths, uses, strict=True)):
        linear = [use for use in found if use.operator == "linear"]
        if not linear:
            continue
        group = groups.setdefault(linear[0].call, path)
        rank, in_basis = linear[0].rank, group in bases.arrays
        if in_basis:
            rank = bases.arrays[group].shape[-1]
        if not in_basis and all(use.rank == 0 for use in linear):
            continue
        _check_uses(path, found, in_basis)
        widest[group] = jnp.promote_types(widest.get(group, dtypes[i]), dtypes[i])
        plans[i] = _Tapped(path, group, rank, group == path, in_basis, dtypes[i])
    unknown = sorted(set(bases.arrays) - {plan.group for plan in plans.values()})
    if unknown:
        known = ", ".join(dict.fromkeys(groups.values())) or "none"
        raise ValueError(
            f"`bases` has {unknown}, but the inputs of linear operators are: {known}. A subspace"
            " projects what its `groups` name: pass those of `actjax.input_groups`."
        )
    return {i: dataclasses.replace(p, left_dtype=widest[p.group]) for i, p in plans.items()}


def _check_uses(path: str, uses: list[Use], in_basis: bool) -> None:
    """Raises a `ValueError` if the factors of several places would have to be added up."""
    others = [use.operator for use in uses if use.operator != "linear"]
    advice = "give the operator codec=Exact(), or differentiate with jax.value_and_grad."
    if others:
        raise ValueError(
            f"the weight `{path}` has a factored gradient, so only actjax's linear operators may"
            f" read it, but `{others[0]}` does too: {advice}"
        )
    calls, times = len(uses), uses[0].times
    if calls > 1 and not (in_basis and len({use.call for use in uses}) == 1):
        raise ValueError(
            f"the weight `{path}` is read by {calls} linear operators, whose factors cannot be"
            f" added up: {advice}"
        )
    if not all(use.leading for use in uses):
        raise ValueError(
            f"the weight `{path}` has a factored gradient, so the axis of it that `vmap` maps must"
            f" be its first: move it there, or {advice}"
        )
    if times > 1 and not in_basis:
        raise ValueError(
            f"the weight `{path}` meets a factored codec {times} times, in a loop that does not"
            " slice it or under a vmap that does not map it, and the factors cannot be added up:"
            f" let the operator see all tokens at once, or {advice}"
        )


def _zero_taps(weight: jax.Array, plan: _Tapped) -> tuple[jax.Array | None, jax.Array]:
    *lead, d, n = weight.shape
    has_left = plan.is_first and not plan.in_basis
    left = jnp.zeros((*lead, d, plan.rank), plan.left_dtype) if has_left else None
    return left, jnp.zeros((*lead, plan.rank, n), weight.dtype)


def _wrap(weight: jax.Array, taps: Any, plan: _Tapped, bases: Bases) -> TappedWeight:
    basis = bases.arrays[plan.group] if plan.in_basis else None
    if basis is not None and basis.shape[:-1] != weight.shape[:-1]:
        expected = (*weight.shape[:-1], basis.shape[-1])
        raise ValueError(
            f"the basis of `{plan.group}` must have shape {expected}, for the weight"
            f" `{plan.path}` of {weight.shape}, got {basis.shape}."
        )
    left, right = taps
    return TappedWeight(weight, left, right, basis, plan.path, bases.bits)
