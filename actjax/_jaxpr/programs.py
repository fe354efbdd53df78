"""Functions as programs: traced, with what they close over made explicit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax._jaxpr.equations import called, run_equation


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
