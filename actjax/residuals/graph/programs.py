"""Functions as programs (jaxprs) whose closed-over arrays are explicit inputs."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from actjax.residuals.graph.equations import called, in_scope_of, run_equation
from actjax.residuals.graph.variables import is_array


@dataclasses.dataclass(frozen=True)
class Closed:
    """A traced function and the arrays that it reads.

    Attributes:
      jaxpr: the program, from constants and arguments to outputs.
      constants: arrays that the function closes over, including tracers of surrounding traces.
      arguments: leaves of its arguments.
      treedef: structure of its output.
      statics: leaves of its output that are not arrays, such as text; None in the place of arrays.
    """

    jaxpr: core.Jaxpr
    constants: list[Any]
    arguments: list[Any]
    treedef: Any
    statics: list[Any]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Returns the output from its arrays."""
        arrays = iter(outputs)
        leaves = [next(arrays) if x is None else x for x in self.statics]
        return jax.tree.unflatten(self.treedef, leaves)


def close(fun: Callable[..., Any], args: Sequence[Any]) -> Closed:
    """Traces `fun(*args)` and keeps custom differentiation rules.

    A custom rule may be traced later, for example when a scan is differentiated. It must not refer
    to tracers that exist now, so everything that the function reads becomes an input.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    structures: list[tuple[Any, list[Any]]] = []

    def flat(*leaves: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten(fun(*jax.tree.unflatten(treedef, leaves)))
        structures.append((structure, [None if is_array(x) else x for x in outputs]))
        return [x for x in outputs if is_array(x)]

    traced = jax.make_jaxpr(flat)(*leaves)
    return Closed(traced.jaxpr, list(traced.consts), leaves, *structures[-1])


def inlined(
    program: core.ClosedJaxpr, *, custom: bool = False, remat: bool = False
) -> core.ClosedJaxpr:
    """Returns a program with all calls in it inlined. Nothing is traced again.

    Args:
      program: the program.
      custom: whether to inline functions with custom differentiation rules too. Only for a program
        that is not differentiated afterwards.
      remat: whether to inline second forward passes too. Likewise.
    """
    jaxpr = program.jaxpr
    constvars, constants = list(jaxpr.constvars), list(program.consts)
    eqns: list[core.JaxprEqn] = []

    def add(body: core.Jaxpr, names: dict[Any, Any], call: core.JaxprEqn | None) -> list[Any]:
        """Adds the equations of a body, with new variables for each call."""
        read = lambda x: x if isinstance(x, core.Literal) else names.get(x, x)  # noqa: E731
        for body_eqn in body.eqns:
            eqn = body_eqn if call is None else in_scope_of(call, body_eqn)
            inner, invars = called(eqn, custom, remat), [read(x) for x in eqn.invars]
            if inner is not None:
                within = dict(zip(inner.jaxpr.invars, invars, strict=True))
                for var, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    within[var] = _copy(var)
                    constvars.append(within[var])
                    constants.append(constant)
                outputs = add(inner.jaxpr, within, eqn)
                names.update(zip(eqn.outvars, outputs, strict=True))
                continue
            outvars = eqn.outvars if call is None else [_copy(x) for x in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return [read(x) for x in body.outvars]

    outvars = add(jaxpr, {}, None)
    debug_info = jaxpr.debug_info.with_unknown_names()
    flat = jaxpr.replace(constvars=constvars, eqns=eqns, outvars=outvars, debug_info=debug_info)
    return core.ClosedJaxpr(flat, constants)


def merged(
    program: core.ClosedJaxpr, are_merged: Callable[[core.JaxprEqn], bool]
) -> core.ClosedJaxpr:
    """Returns a program in which equal operations on the same operands are one.

    Args:
      program: a program without calls.
      are_merged: whether equations like this one may be.
    """
    jaxpr = program.jaxpr
    known: dict[Any, core.JaxprEqn] = {}
    names: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        invars = [x if isinstance(x, core.Literal) else names.get(x, x) for x in eqn.invars]
        key = _what(eqn, invars) if are_merged(eqn) and not eqn.effects else None
        if key is not None and key in known:
            names |= zip(eqn.outvars, known[key].outvars, strict=True)
            continue
        eqns.append(eqn.replace(invars=invars))
        if key is not None:
            known[key] = eqns[-1]
    outvars = [x if isinstance(x, core.Literal) else names.get(x, x) for x in jaxpr.outvars]
    debug_info = jaxpr.debug_info.with_unknown_names()
    return core.ClosedJaxpr(
        jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=debug_info), program.consts
    )


def _what(eqn: core.JaxprEqn, invars: Sequence[Any]) -> Any:
    """Returns what an equation computes, in a form that can be compared; None if there is none."""
    literals = [x for x in invars if isinstance(x, core.Literal)]
    if any(np.ndim(x.val) for x in literals):
        return None
    operands = [(x.aval, str(x.val)) if isinstance(x, core.Literal) else x for x in invars]
    key = eqn.primitive, tuple(operands), tuple(sorted(eqn.params.items())), eqn.ctx
    try:
        hash(key)
    except TypeError:
        return None
    return key


class Search:
    """Finds out which programs have operations of some kind, also in the programs they call."""

    def __init__(self, names: Collection[str]) -> None:
        """Takes the names of the primitives."""
        self._names = names
        self._results: dict[int, tuple[core.Jaxpr, bool]] = {}

    def __call__(self, jaxpr: core.Jaxpr) -> bool:
        """Returns whether a program has one of the operations."""
        if id(jaxpr) not in self._results:
            bodies = ((eqn, called(eqn)) for eqn in jaxpr.eqns)
            has_operation = any(
                eqn.primitive.name in self._names or (body is not None and self(body.jaxpr))
                for eqn, body in bodies
            )
            # The program is kept alive, so that no other one gets its id.
            self._results[id(jaxpr)] = jaxpr, has_operation
        return self._results[id(jaxpr)][1]


def _copy(var: Any) -> Any:
    """Returns another variable of the same type; a variable that nothing reads stays as it is."""
    return var if type(var) is not core.Var else core.Var(var.aval)


Handler = Callable[[core.JaxprEqn, list[Any]], list[Any] | None]
"""From an equation and its inputs to its outputs, or to None, which runs the equation unchanged."""


def run_inlined(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    handle: Handler | None = None,
    *,
    into: Callable[[core.Jaxpr], bool] | None = None,
    within: core.JaxprEqn | None = None,
) -> list[Any]:
    """Runs a program with all calls in it, or some of them, inlined; custom rules are kept.

    Args:
      program: the program.
      arguments: its arguments.
      handle: called with every equation that is not a call.
      into: whether to inline a call with this body. By default all are.
      within: the call whose body the program is; the body gets its name scopes.
    """
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= zip(program.jaxpr.invars, arguments, strict=True)

    def read(x: core.Var | core.Literal) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for program_eqn in program.jaxpr.eqns:
        eqn = program_eqn if within is None else in_scope_of(within, program_eqn)
        inputs = [read(x) for x in eqn.invars]
        body = called(eqn)
        outputs: Any = None
        if body is not None and (into is None or into(body.jaxpr)):
            outputs = run_inlined(body, inputs, handle, into=into, within=eqn)
        elif body is None and handle is not None:
            outputs = handle(eqn, inputs)
        if outputs is None:
            outputs = run_equation(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(x) for x in program.jaxpr.outvars]
