"""Calls of kernels in a traced program."""

from typing import Any

from jaxprs import equations


def calls_on_layers(program: Any) -> dict[str, tuple[int, int]]:
    """Returns the stacks that kernels of a program get, and those that they write, by kernel."""
    counts: dict[str, tuple[int, int]] = {}
    for eqn in equations(program):
        call: Any = eqn.params.get("call")
        if getattr(call, "layers", ()):
            known = counts.get(str(call), (0, 0))
            own = sum(call.layers), sum(place is not None for place in call.into)
            counts[str(call)] = known[0] + own[0], known[1] + own[1]
    return counts
