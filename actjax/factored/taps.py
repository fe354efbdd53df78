"""Finds the weights of a function that get a factored gradient, and makes the taps for it."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.paths import named_leaves
from actjax._math.precision import common_dtype
from actjax.codecs.basis import BITS
from actjax.factored.low_rank import LowRank
from actjax.factored.tapped import TappedWeight
from actjax.residuals.graph.uses import Use, find_uses
from actjax.residuals.graph.variables import is_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bases:
    """Bases that linear operators store their inputs in.

    Attributes:
      arrays: from the name of an input (`input_groups`) to its basis, [..., d, k], with the leading
        axes of the weights of this input.
      bits: bits of a coordinate of `x P`: 8, 4, or 16 for the dtype of `x`. Static.
      orthonormal: whether the columns of each basis are orthonormal, so that a gradient has the
        norm of its coordinates. Static.
    """

    arrays: dict[str, Any]
    bits: int = dataclasses.field(default=16, metadata={"static": True})
    orthonormal: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"`bits` of Bases must be one of {BITS}, got {self.bits!r}.")


@dataclasses.dataclass(frozen=True)
class _Tapped:
    """Describes a parameter that gets a factored gradient.

    Attributes:
      path: its path in the parameters.
      input_name: name of its input: the path of the first weight that reads this input.
      rank: rank of its gradient.
      is_first: whether it is that first weight.
      in_basis: whether its input has a given basis.
      left_dtype: dtype of the factor that the weights of the input share.
    """

    path: str
    input_name: str
    rank: int
    is_first: bool
    in_basis: bool
    left_dtype: Any


@dataclasses.dataclass(frozen=True)
class Taps:
    """The plan of the parameters of a function that are tapped. Holds no arrays.

    Attributes:
      treedef: structure of the parameters.
      tapped: from the position of a leaf to its description.
    """

    treedef: Any
    tapped: dict[int, _Tapped]

    def split(self, parameters: Any) -> Any:
        """Returns the arrays to differentiate: leaves with a dense gradient, and zero taps."""
        leaves = enumerate(jax.tree.leaves(parameters))
        pairs = [(i, leaf, self.tapped.get(i)) for i, leaf in leaves]
        dense = {i: leaf for i, leaf, plan in pairs if plan is None}
        return dense, {i: _zero_taps(leaf, plan) for i, leaf, plan in pairs if plan is not None}

    def merge(self, parameters: Any, differentiated: Any, bases: Bases) -> Any:
        """Returns the parameters, with tapped weights, to call the function with."""
        dense, taps = differentiated
        leaves = [
            dense[i] if i in dense else _wrap(leaf, taps[i], self.tapped[i], bases)
            for i, leaf in enumerate(jax.tree.leaves(parameters))
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def without(self, paths: Collection[str]) -> "Taps":
        """Returns the plan with dense gradients for weights and all others that share their inputs.

        Raises:
          ValueError: a basis is given for one of the inputs, so that the gradient cannot be dense.
        """
        names = {plan.input_name for plan in self.tapped.values() if plan.path in paths}
        for plan in self.tapped.values():
            if plan.path in paths and plan.in_basis:
                raise ValueError(
                    f"the weight `{plan.path}` has a basis, and was cast before an operator of"
                    " actjax read it: pass it as it is, or use the layers of actjax.flax."
                )
        remaining = {i: plan for i, plan in self.tapped.items() if plan.input_name not in names}
        return dataclasses.replace(self, tapped=remaining)

    def join(self, gradient: Any, bases: Bases) -> Any:
        """Returns the gradient of the parameters from the gradient of the result of `split`."""
        dense, taps = gradient
        lefts = {
            self.tapped[i].input_name: left for i, (left, _) in taps.items() if left is not None
        }
        leaves: list[Any] = []
        for i in range(len(dense) + len(taps)):
            plan = self.tapped.get(i)
            if plan is None:
                leaves.append(dense[i])
                continue
            right = taps[i][1]
            if plan.in_basis:
                left = bases.arrays[plan.input_name].astype(right.dtype)
                leaves.append(LowRank(left, right, plan.input_name, bases.orthonormal))
            else:
                leaves.append(LowRank(lefts[plan.input_name].astype(right.dtype), right))
        return jax.tree.unflatten(self.treedef, leaves)


def plan_taps(fun: Callable[[Any], Any], parameters: Any, bases: Bases) -> Taps:
    """Finds the weights of `parameters` that `fun` uses with a factored codec or a given basis.

    Raises:
      ValueError: such a weight cannot have a factored gradient, or a basis fits no input.
    """
    paths, uses = uses_by_path(fun, parameters)
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(parameters)]
    return Taps(jax.tree.structure(parameters), _plan(paths, uses, dtypes, bases))


def uses_by_path(
    fun: Callable[..., Any], parameters: Any, *args: Any
) -> tuple[list[str], list[list[Use]]]:
    """Returns the paths of the leaves of `parameters`, and where `fun` reads each of them."""
    named, treedef = named_leaves(parameters), jax.tree.structure(parameters)

    def arrays_of(leaves: Any, args: Any) -> list[Any]:
        outputs = jax.tree.leaves(fun(jax.tree.unflatten(treedef, leaves), *args))
        return [x for x in outputs if is_array(x)]  # Auxiliary outputs may be text.

    traced = jax.make_jaxpr(arrays_of)(list(named.values()), args)
    return list(named), find_uses(traced.jaxpr)[: len(named)]


def _plan(
    paths: list[str], uses: list[list[Use]], dtypes: list[Any], bases: Bases
) -> dict[int, _Tapped]:
    """Returns, by position, the parameters that get a factored gradient.

    Raises:
      ValueError: such a parameter cannot have one, or a basis fits no input.
    """
    names: dict[tuple[int, ...], str] = {}
    plans: dict[int, _Tapped] = {}
    widest: dict[str, Any] = {}
    for i, (path, path_uses) in enumerate(zip(paths, uses, strict=True)):
        linear = [use for use in path_uses if use.operator == "linear"]
        if not linear:
            continue
        name = names.setdefault(linear[0].call, path)
        rank, in_basis = linear[0].rank, name in bases.arrays
        if in_basis:
            rank = bases.arrays[name].shape[-1]
        if not in_basis and all(use.rank == 0 for use in linear):
            continue
        _check_uses(path, path_uses, in_basis)
        widest[name] = common_dtype(widest.get(name, dtypes[i]), dtypes[i])
        plans[i] = _Tapped(path, name, rank, name == path, in_basis, dtypes[i])
    unknown = sorted(set(bases.arrays) - {plan.input_name for plan in plans.values()})
    if unknown:
        known = ", ".join(dict.fromkeys(names.values())) or "none"
        raise ValueError(
            f"`bases` has {unknown}, but the inputs of linear operators are: {known}. If a"
            " subspace made the bases, pass it `groups=actjax.input_groups(...)`."
        )
    return {i: dataclasses.replace(p, left_dtype=widest[p.input_name]) for i, p in plans.items()}


def _check_uses(path: str, uses: list[Use], in_basis: bool) -> None:
    """Raises a `ValueError` if factors of several places would have to be added."""
    other_operators = [use.operator for use in uses if use.operator != "linear"]
    advice = "give the operator codec=Exact(), or differentiate with jax.value_and_grad."
    if other_operators:
        raise ValueError(
            f"the weight `{path}` has a factored gradient, so only actjax's linear operators may"
            f" read it, but `{other_operators[0]}` does too: {advice}"
        )
    calls, times = len(uses), uses[0].times
    if calls > 1 and not (in_basis and len({use.call for use in uses}) == 1):
        raise ValueError(
            f"the weight `{path}` is read by {calls} linear operators, whose factors cannot be"
            f" added: {advice}"
        )
    if not all(use.leading for use in uses):
        raise ValueError(
            f"the weight `{path}` has a factored gradient, so `vmap` must map its first axis: move"
            f" the mapped axis to the front, or {advice}"
        )
    if times > 1 and not in_basis:
        raise ValueError(
            f"the weight `{path}` is read with a factored codec {times} times, in a loop that does"
            " not slice it or under a vmap that does not map it, and the factors cannot be added:"
            f" pass all tokens to the operator at once, or {advice}"
        )


def _zero_taps(weight: jax.Array, plan: _Tapped) -> tuple[jax.Array | None, jax.Array]:
    *lead, d, n = weight.shape
    has_left = plan.is_first and not plan.in_basis
    left = jnp.zeros((*lead, d, plan.rank), plan.left_dtype) if has_left else None
    return left, jnp.zeros((*lead, plan.rank, n), weight.dtype)


def _wrap(weight: jax.Array, taps: Any, plan: _Tapped, bases: Bases) -> TappedWeight:
    basis = bases.arrays[plan.input_name] if plan.in_basis else None
    if basis is not None and basis.shape[:-1] != weight.shape[:-1]:
        expected = (*weight.shape[:-1], basis.shape[-1])
        raise ValueError(
            f"the basis of `{plan.input_name}` must have shape {expected}, for the weight"
            f" `{plan.path}` of {weight.shape}, got {basis.shape}."
        )
    left, right = taps
    return TappedWeight(weight, left, right, basis, plan.path, bases.bits)
