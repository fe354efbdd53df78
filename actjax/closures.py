"""A function as a program: what it closes over made explicit, its pytrees taken apart."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core


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

    def flat(*leaves: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten(fun(*jax.tree.unflatten(treedef, leaves)))
        found.append(structure)
        return outputs

    traced = jax.make_jaxpr(flat)(*leaves)
    return Closed(traced.jaxpr, list(traced.consts), leaves, found[-1])
