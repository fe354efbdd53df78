"""Functions as programs: traced, with what they close over made explicit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util


@dataclasses.dataclass(frozen=True)
class Closed:
    """A traced function and the arrays that it reads.

    Attributes:
      jaxpr: the program, from constants and arguments to outputs.
      constants: arrays that the function closes over: tracers of surrounding traces among them.
      arguments: leaves of its arguments.
      treedef: structure of its output.
    """

    jaxpr: core.Jaxpr
    constants: list[Any]
    arguments: list[Any]
    treedef: Any

    def run(self, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Returns the leaves of the output."""
        return core.jaxpr_as_fun(core.ClosedJaxpr(self.jaxpr, list(constants)))(*arguments)

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Returns the output from its leaves."""
        return jax.tree.unflatten(self.treedef, outputs)


def close(fun: Callable[..., Any], args: Sequence[Any]) -> Closed:
    """Traces `fun(*args)`; custom differentiation rules stay what they are.

    A custom rule that is traced later may not refer to tracers of today, as it does under a scan
    that is differentiated: so all that a function reads is passed to it.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    found: list[Any] = []
    for leaf in leaves:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"an argument is {leaf!r}, which is no array: pass what is static by name, or close"
                " over it."
            )

    def flat(*leaves: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten(fun(*jax.tree.unflatten(treedef, leaves)))
        found.append(structure)
        return outputs

    traced = jax.make_jaxpr(flat)(*leaves)
    # Numbers of Python are arrays from here on; what was traced took them as they are.
    arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    return Closed(traced.jaxpr, list(traced.consts), arrays, found[-1])


Handler = Callable[[core.JaxprEqn, list[Any]], list[Any] | None]
"""From an equation and its inputs to its outputs, or None to run it as it is."""

_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Equations that only run a program. Other names of `jax.jit` are of other versions of JAX."""


_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def run_inlined(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    handle: Handler | None = None,
    *,
    custom: bool = False,
) -> list[Any]:
    """Runs a program, calls within it as if they were written out.

    Args:
      program: what to run.
      arguments: its arguments.
      handle: is offered every equation that is no call.
      custom: whether functions with differentiation rules of their own are written out too: for a
        program that will not be differentiated.
    """
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= zip(program.jaxpr.invars, arguments, strict=True)

    def read(x: core.Var | core.Literal) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in program.jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        body = called(eqn, custom)
        outputs: Any = None
        if body is not None:
            outputs = run_inlined(body, inputs, handle, custom=custom)
        elif handle is not None:
            outputs = handle(eqn, inputs)
        if outputs is None:
            outputs = run_equation(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(x) for x in program.jaxpr.outvars]


def run_equation(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of one equation, in the context and from the line that it came from."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    context: Any = eqn.ctx
    with source_info_util.user_context(source.traceback, name_stack=stack), context.manager:
        params = eqn.primitive.get_bind_params(eqn.params)
        outputs = eqn.primitive.bind(*inputs, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns how many inputs of a `lax.scan` are constants of its body, and how many its carry."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # From JAX 0.12 on they are told apart by a tree: constants, carry, and what is scanned over.
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def called(eqn: core.JaxprEqn, custom: bool = False) -> core.ClosedJaxpr | None:
    """Returns the program that an equation only calls; None if it does anything else."""
    if eqn.primitive.name not in (*_CALLS, *(_CUSTOM if custom else ())):
        return None
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    body: Any = next(eqn.params[name] for name in names if name in eqn.params)
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, [])


ONE_WAY = frozenset({"io_callback", "pure_callback", "while"})
"""Operations without a derivative in reverse mode: data may pass through them, no gradient may."""


def passing_one_way(jaxpr: core.Jaxpr, outputs: dict[int, str] | None = None) -> dict[int, str]:
    """Returns which inputs pass through an operation without a derivative, with its name.

    Args:
      jaxpr: a program. What it calls, and the bodies of its loops and branches, are looked into;
        functions with differentiation rules of their own are not.
      outputs: positions of outputs that pass through one later on.

    Returns:
      By position of its floating point constants and inputs, the former first.
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
        elif eqn.primitive.name == "stop_gradient":
            names = {}
        elif eqn.primitive.name == "scan":
            names = _through_scan(eqn, later)
        elif eqn.primitive.name == "cond":
            branches = [_without_constants(b, later) for b in eqn.params["branches"]]
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
        # What enters an iteration is what the one before gave.
        carry = {i - first: name for i, name in names.items() if first <= i < first + carried}
        if carry.keys() <= outputs.keys():
            return names
        outputs = {**carry, **outputs}
