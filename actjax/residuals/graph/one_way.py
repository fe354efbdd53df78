"""Finds the inputs and values of a program that have no derivative, or must not have one."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from actjax.residuals.graph.equations import (
    CUSTOM_VJP,
    branches_of,
    called,
    closed_over,
    scan_counts,
)

CLOSED_OVER = "a function with a custom_vjp that closes over it"
ONE_WAY = frozenset({"io_callback", "pure_callback", "while"})
"""Operations without a reverse-mode derivative: data passes through them, gradients do not."""


def passing_one_way(
    jaxpr: core.Jaxpr,
    outputs: dict[int, str] | None = None,
    differentiated: Collection[int] | None = None,
) -> dict[int, str]:
    """Returns the inputs that pass through an operation without a derivative, with its name.

    An operation whose results no gradient reaches does not count.

    Args:
      jaxpr: a program. Calls and the bodies of loops and branches are followed; functions with
        custom differentiation rules are not.
      outputs: positions of outputs that pass through such an operation later.
      differentiated: positions of outputs that a gradient may reach; None for all.

    Returns:
      From the position of a floating point constant or input (constants come first) to the name of
      the operation.
    """
    operation_of: dict[core.Var, str] = {}
    live: set[Any] = set()

    def mark(variables: Sequence[Any], names: dict[int, str]) -> None:
        for i, name in names.items():
            if _is_smooth(variables[i]):
                operation_of.setdefault(variables[i], name)

    mark(jaxpr.outvars, outputs or {})
    positions = range(len(jaxpr.outvars)) if differentiated is None else differentiated
    live |= {x for i in positions if _is_smooth(x := jaxpr.outvars[i])}
    for eqn in reversed(jaxpr.eqns):
        reached = [i for i, x in enumerate(eqn.outvars) if x in live]
        if not reached or eqn.primitive.name == "stop_gradient":
            continue
        live |= {x for x in eqn.invars if _is_smooth(x)}
        later = {i: operation_of[x] for i, x in enumerate(eqn.outvars) if x in operation_of}
        mark(eqn.invars, _through(eqn, later, reached))
    known = (*jaxpr.constvars, *jaxpr.invars)
    return {i: operation_of[x] for i, x in enumerate(known) if x in operation_of}


def _is_smooth(x: Any) -> bool:
    aval: Any = x.aval
    return isinstance(x, core.Var) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _through(eqn: core.JaxprEqn, later: dict[int, str], reached: list[int]) -> dict[int, str]:
    """Returns the inputs of an equation that pass through an operation without a derivative.

    Args:
      eqn: the equation.
      later: its outputs that pass through such an operation later.
      reached: its outputs that a gradient may reach.
    """
    if eqn.primitive.name == "scan":
        return _through_scan(eqn, later)
    if eqn.primitive.name == "cond":
        branches = [_without_constants(b, later, reached) for b in branches_of(eqn)]
        return {i + 1: name for branch in branches for i, name in branch.items()}
    if (body := called(eqn)) is not None:
        return _without_constants(body, later, reached)
    every = range(len(eqn.invars))
    if eqn.primitive.name in ONE_WAY:
        return dict.fromkeys(every, eqn.primitive.name)
    names = dict.fromkeys(every, next(iter(later.values()))) if later else {}
    if eqn.primitive.name in CUSTOM_VJP:
        names |= dict.fromkeys(range(closed_over(eqn)), CLOSED_OVER)
    return names


def _without_constants(
    body: core.ClosedJaxpr, outputs: dict[int, str], differentiated: Collection[int] | None = None
) -> dict[int, str]:
    first = len(body.jaxpr.constvars)
    operation_of = passing_one_way(body.jaxpr, outputs, differentiated)
    return {i - first: name for i, name in operation_of.items() if i >= first}


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
    """Returns the inputs that are not differentiated, and all values that depend on them alone.

    Args:
      jaxpr: a program without calls.
      fixed: inputs that are not differentiated.
    """
    underived = set(fixed)
    for eqn in jaxpr.eqns:
        read = (x for x in eqn.invars if isinstance(x, core.Var))
        if eqn.primitive.name == "stop_gradient" or all(x in underived for x in read):
            underived |= set(eqn.outvars)
    return underived
