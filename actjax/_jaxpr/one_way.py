"""What of a program has no derivative, and what must have none."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from actjax._jaxpr.equations import CUSTOM_VJP, branches_of, called, closed_over, scan_counts

CLOSED_OVER = "a function with a custom_vjp that closes over it"
ONE_WAY = frozenset({"io_callback", "pure_callback", "while"})
"""Operations without a reverse-mode derivative: data passes through them, gradients do not."""


def passing_one_way(jaxpr: core.Jaxpr, outputs: dict[int, str] | None = None) -> dict[int, str]:
    """Returns the inputs that pass through an operation without a derivative, with its name.

    Args:
      jaxpr: a program. Calls and the bodies of loops and branches are followed; functions with
        custom differentiation rules are not.
      outputs: positions of outputs that pass through such an operation later.

    Returns:
      From the position of a floating point constant or input (constants come first) to the name of
      the operation.
    """
    found: dict[core.Var, str] = {}

    def mark(variables: Sequence[Any], names: dict[int, str]) -> None:
        for i, name in names.items():
            x = variables[i]
            aval: Any = x.aval
            if isinstance(x, core.Var) and jnp.issubdtype(aval.dtype, jnp.inexact):
                found.setdefault(x, name)

    mark(jaxpr.outvars, outputs or {})
    for eqn in reversed(jaxpr.eqns):
        later = {i: found[x] for i, x in enumerate(eqn.outvars) if x in found}
        body = called(eqn)
        if eqn.primitive.name in ONE_WAY:
            names = dict.fromkeys(range(len(eqn.invars)), eqn.primitive.name)
        elif eqn.primitive.name in CUSTOM_VJP:
            names = (
                dict.fromkeys(range(len(eqn.invars)), next(iter(later.values()))) if later else {}
            )
            names |= dict.fromkeys(range(closed_over(eqn)), CLOSED_OVER)
        elif eqn.primitive.name == "stop_gradient":
            names = {}
        elif eqn.primitive.name == "scan":
            names = _through_scan(eqn, later)
        elif eqn.primitive.name == "cond":
            branches = [_without_constants(b, later) for b in branches_of(eqn)]
            names = {i + 1: name for branch in branches for i, name in branch.items()}
        elif body is not None:
            names = _without_constants(body, later)
        else:
            names = (
                dict.fromkeys(range(len(eqn.invars)), next(iter(later.values()))) if later else {}
            )
        mark(eqn.invars, names)
    known = (*jaxpr.constvars, *jaxpr.invars)
    return {i: found[x] for i, x in enumerate(known) if x in found}


def _without_constants(body: core.ClosedJaxpr, outputs: dict[int, str]) -> dict[int, str]:
    first = len(body.jaxpr.constvars)
    found = passing_one_way(body.jaxpr, outputs)
    return {i - first: name for i, name in found.items() if i >= first}


def _through_scan(eqn: core.JaxprEqn, outputs: dict[int, str]) -> dict[int, str]:
    first, carried = scan_counts(eqn)
    while True:
        names = _without_constants(eqn.params["jaxpr"], outputs)
        # The carry of an iteration is an output of the iteration before.
        carry = {i - first: name for i, name in names.items() if first <= i < first + carried}
        if carry.keys() <= outputs.keys():
            return names
        outputs = {**carry, **outputs}


def without_derivative(jaxpr: core.Jaxpr, fixed: Collection[core.Var]) -> set[core.Var]:
    """Returns what a program computes from constants that are not differentiated, and these.

    Args:
      jaxpr: a program without calls.
      fixed: inputs that are not differentiated.
    """
    found = set(fixed)
    for eqn in jaxpr.eqns:
        read = (x for x in eqn.invars if isinstance(x, core.Var))
        if eqn.primitive.name == "stop_gradient" or all(x in found for x in read):
            found |= set(eqn.outvars)
    return found
