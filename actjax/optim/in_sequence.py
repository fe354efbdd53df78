"""An update of several weights, computed one weight after the other.

An optax transform gets a tree of gradients and returns a tree of updates. XLA computes the updates
of all weights at once if nothing prevents it, and then the float32 arrays of all of them exist at
once. Here the equations of an update run in the order of the weights that need them, and the
gradient of a weight waits for the weight before. Results are the same: what reads several
gradients, such as a norm, runs with the first weight that needs it.

Compiled for an H100 it saves 0.09 GiB of 6.2 for `llama_1b` with moments in 4 bits, and 0.17 of
20.3 for `llama_7b`. XLA for CPUs keeps its own order, and nothing is saved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from actjax._jaxpr.equations import run_equation


def in_sequence(
    fun: Callable[..., Any], args: Sequence[Any], groups: Callable[[Any], Sequence[Any]]
) -> Any:
    """Returns `fun(*args)`, computed a group of outputs at a time.

    Args:
      fun: a function of pytrees of arrays.
      args: its arguments. The leaves of the first one are what waits for the group before, such as
        gradients.
      groups: from the output of `fun` to its parts, each a pytree of some of the outputs, in the
        order in which they are computed. What is in none of them comes last.
    """
    leaves = jax.tree.leaves(tuple(args))
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr = program.jaxpr
    structure = jax.tree.structure(shapes)
    names = jax.tree.unflatten(structure, range(structure.num_leaves))
    order = [jax.tree.leaves(part) for part in groups(names)]
    placed = {i for part in order for i in part}
    order.append([i for i in range(structure.num_leaves) if i not in placed])
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, leaves, strict=True)
    waiting = jaxpr.invars[: len(jax.tree.leaves(args[0]))]
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    numbers = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    done: set[int] = set()
    last: list[Any] = []

    def read(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for part in order:
        wanted = [jaxpr.outvars[i] for i in part]
        # What only has an effect, such as a print, comes last.
        effects = [eqn for eqn in jaxpr.eqns if eqn.effects] if part is order[-1] else []
        needed, inputs = _needed(wanted, effects, makers, done)
        own = [var for var in waiting if var in inputs]
        if last and own:
            held, last = jax.lax.optimization_barrier(([values[var] for var in own], last))
            values |= zip(own, held, strict=True)
        for eqn in sorted(needed, key=lambda eqn: numbers[id(eqn)]):
            done.add(id(eqn))
            values |= zip(eqn.outvars, run_equation(eqn, list(map(read, eqn.invars))), strict=True)
        last = [read(jaxpr.outvars[i]) for i in part]
    return jax.tree.unflatten(structure, [read(x) for x in jaxpr.outvars])


def _needed(
    outputs: Sequence[Any],
    effects: Sequence[core.JaxprEqn],
    makers: dict[Any, core.JaxprEqn],
    done: set[int],
) -> tuple[list[core.JaxprEqn], set[Any]]:
    """Returns the equations that outputs or effects still need, and what they read."""
    found = {id(eqn): eqn for eqn in effects if id(eqn) not in done}
    read: set[Any] = set()
    stack = [*outputs, *(var for eqn in found.values() for var in eqn.invars)]
    while stack:
        var = stack.pop()
        if isinstance(var, core.Literal):
            continue
        read.add(var)
        eqn = makers.get(var)
        if eqn is None or id(eqn) in done or id(eqn) in found:
            continue
        found[id(eqn)] = eqn
        stack.extend(eqn.invars)
    return list(found.values()), read
