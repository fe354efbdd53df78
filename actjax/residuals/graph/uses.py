"""Finds the operations of a program that read a parameter.

`actjax.linear` marks its weights with a primitive that computes nothing but records the rank of
their gradients, and the axes that `vmap` maps (`mark_weights`). `find_uses` reads these marks, and
all other uses, from the traced program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.interpreters.batching
import jax.interpreters.mlir
from jax.extend import core

from actjax.residuals.graph.equations import body_of, branches_of

_mark_p = core.Primitive("actjax_linear")
_mark_p.multiple_results = True


def mark_weights(
    weights: Sequence[jax.Array], rank: int | None, *others: jax.Array | None
) -> list[jax.Array]:
    """Returns the weights [d, n] of one operator with a mark in the trace. Computes nothing.

    Args:
      weights: the weights of the operator.
      rank: rank of their gradients; None if the gradients are dense.
      *others: arrays that the factors of the gradients depend on as well. If `vmap` maps one of
        these and not a weight, the weight is read once for each example.
    """
    times, leading = (1,) * len(weights), (True,) * len(weights)
    dependencies = [x for x in others if x is not None]
    return _mark_p.bind(*weights, *dependencies, rank=rank or 0, times=times, leading=leading)


def _marked(*args: Any, times: tuple[int, ...], **_: Any) -> list[Any]:
    return list(args[: len(times)])


def _mark_batched(args: Any, dims: Any, *, rank: int, times: Any, leading: Any) -> Any:
    """Records how often each weight is read, and whether mapped axes come before [d, n]."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    weights = dims[: len(times)]
    times = tuple(n * size if d is None else n for n, d in zip(times, weights, strict=True))
    leading = tuple(ok and d in (None, 0) for ok, d in zip(leading, weights, strict=True))
    return _mark_p.bind(*args, rank=rank, times=times, leading=leading), weights


_mark_p.def_impl(_marked)
_mark_p.def_abstract_eval(_marked)
jax.interpreters.batching.primitive_batchers[_mark_p] = _mark_batched
jax.interpreters.mlir.register_lowering(
    _mark_p, jax.interpreters.mlir.lower_fun(_marked, multiple_results=True)
)


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a program reads a parameter.

    Attributes:
      operator: "linear", or the JAX primitive that reads it.
      rank: rank of its gradient at this place; 0 if the gradient is dense.
      call: identifies the call of the operator; equal for weights of the same call.
      times: how often this place runs with the same parameter.
      leading: whether the axes that `vmap` maps are the first axes of the parameter.
      alone: whether the call reads no other weight.
    """

    operator: str
    rank: int
    call: tuple[int, ...]
    times: int
    leading: bool = True
    alone: bool = True


def find_uses(jaxpr: core.Jaxpr) -> list[list[Use]]:
    """Returns, for each input of a traced function, the places that read it.

    Casts, and the bodies of calls, loops and branches, are followed. The body of a `scan` counts
    once for a parameter that is sliced over layers, and `length` times for one that is not. All
    branches of a `cond` count, except that branches which read the parameter in the same way count
    as one. Returning a parameter as an auxiliary output is not a use.
    """
    uses_of_inputs = []
    for var in jaxpr.invars:
        uses, outputs = _follow(jaxpr, {var: False}, (), 1)
        if 0 in outputs:
            uses.append(Use("the value of the function", 0, (), 1))
        uses_of_inputs.append(uses)
    return uses_of_inputs


_LOOKED_THROUGH = ("convert_element_type", "sharding_constraint", "copy", "copy_p", "name")

_Names = dict[Any, bool]
"""Variables, or positions of outputs, that hold the parameter. True for a copy, such as a stack of
slices: the factors of a gradient cannot pass through it, so a linear operator that reads the copy
counts as another operation."""


def _follow(
    jaxpr: core.Jaxpr, names: _Names, call: tuple[int, ...], times: int
) -> tuple[list[Use], _Names]:
    """Returns the uses of the variables in `names`, and the outputs that hold the parameter."""
    uses: list[Use] = []
    for number, eqn in enumerate(jaxpr.eqns):
        read = {i: names[x] for i, x in enumerate(eqn.invars) if _is_named(x, names)}
        if not read:
            continue
        inner, is_copy = (*call, number), any(read.values())
        if eqn.primitive.name in _LOOKED_THROUGH:
            names = names | {eqn.outvars[0]: is_copy}
        elif bodies := _bodies(eqn):
            branches = []
            for branch, (body, offset) in enumerate(bodies):
                within = {body.invars[i - offset]: c for i, c in read.items() if i >= offset}
                body_uses, outputs = _follow_body(eqn, body, within, (*inner, branch), times)
                branches.append(body_uses)
                names = names | {eqn.outvars[i]: c for i, c in outputs.items()}
            uses += _of_branches(branches)
            if any(i < bodies[0][1] for i in read):
                uses.append(Use(eqn.primitive.name, 0, inner, times))
        elif eqn.primitive is _mark_p and not is_copy:
            mark = eqn.params
            uses += [
                Use(
                    "linear",
                    mark["rank"],
                    call,
                    times * mark["times"][i],
                    mark["leading"][i],
                    len(mark["times"]) == 1,
                )
                for i in read
                if i < len(mark["times"])
            ]
        else:
            uses.append(Use(eqn.primitive.name, 0, inner, times))
    return uses, {i: names[x] for i, x in enumerate(jaxpr.outvars) if _is_named(x, names)}


def _is_named(x: core.Var | core.Literal, names: _Names) -> bool:
    return isinstance(x, core.Var) and x in names


def _of_branches(branches: list[list[Use]]) -> list[Use]:
    """Returns the uses in all branches, or in one of them if they use the parameter equally."""
    reading = [uses for uses in branches if uses]
    alike = {(len(uses), dataclasses.replace(uses[0], call=())) for uses in reading}
    if len(alike) == 1 and len(reading[0]) == 1 and reading[0][0].alone:
        return reading[0]
    return [use for uses in reading for use in uses]


def _follow_body(
    eqn: core.JaxprEqn, body: core.Jaxpr, names: _Names, call: tuple[int, ...], times: int
) -> tuple[list[Use], _Names]:
    """Follows the parameter through one body of an equation to its outputs."""
    if eqn.primitive.name != "scan":
        return _follow(body, names, call, times)
    # A loop slices the arrays that it runs over and passes constants on as a whole.
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    is_constant = all(_shape(x) == _shape(y) for x, y in pairs if y in names)
    uses, outputs = _follow(body, names, call, times * (eqn.params["length"] if is_constant else 1))
    # A carry that the body returns unchanged is the same array outside. A stacked output, or a
    # carry that takes the place of another, is a copy.
    carried = [i for i, x in enumerate(eqn.outvars) if _shape(x) == _shape(body.outvars[i])]
    constants = len(pairs) - len(carried) - sum(_shape(x) != _shape(y) for x, y in pairs)
    return uses, {
        i: c or i not in carried or body.outvars[i] is not body.invars[constants + i]
        for i, c in outputs.items()
    }


def _bodies(eqn: core.JaxprEqn) -> list[tuple[core.Jaxpr, int]]:
    """Returns the bodies of an equation, and how many of its first inputs they do not get."""
    if branches := branches_of(eqn):
        return [(branch.jaxpr, 1) for branch in branches]
    body = body_of(eqn)
    return [] if body is None or len(body.jaxpr.invars) != len(eqn.invars) else [(body.jaxpr, 0)]


def _shape(var: Any) -> Sequence[int]:
    return var.aval.shape
