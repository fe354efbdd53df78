"""Cutting a program into segments that a backward pass can compute again, one at a time.

A segment costs the memory of the arrays that are alive at its start, which are stored, and, while
its backward pass runs, of the arrays that it computes. Chen et al. (2016), *Training Deep Nets with
Sublinear Memory Cost*, cut a chain of layers. This module cuts any program, at the places where the
fewest bytes are alive.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.extend import core

from actjax.residuals.graph.equations import body_of, branches_of
from actjax.residuals.graph.rebuilding import Graph, is_cheap
from actjax.residuals.graph.storing import choose
from actjax.residuals.graph.variables import is_floating, nbytes

_SIZES = 24
"""Number of bounds of the largest segment to try."""
_MOST_CUTS = 200
"""Largest number of places to consider; places with the most bytes alive are left out first."""


@dataclasses.dataclass(frozen=True)
class ProgramSegment:
    """A run of equations of a program without calls.

    Attributes:
      start: its first equation.
      stop: the equation after its last.
      again: whether it is computed again.
    """

    start: int
    stop: int
    again: bool


def cut(
    jaxpr: core.Jaxpr,
    layers: int,
    dies: Sequence[bool],
    apart: Callable[[core.JaxprEqn], bool],
    share: float = 1.0,
) -> list[ProgramSegment]:
    """Returns segments for which the stored bytes plus the largest segment are few.

    Args:
      jaxpr: a program without calls.
      layers: number of times that the arrays alive at a cut are stored: iterations of the loops
        around the program.
      dies: which inputs are dead after the forward pass; constants come first.
      apart: whether an equation must not be in a segment that is computed again.
      share: part of the computation that is repeated, from the start of the program: its arrays
        would be stored longest.
    """
    eqns = jaxpr.eqns
    if not eqns:
        return []
    alive = _alive(jaxpr, dies)
    # Bytes that each equation computes, but for those that are cheap to rebuild.
    inside = [
        0 if is_cheap(eqn) else sum(nbytes(x) for x in eqn.outvars if is_floating(x.aval))
        for eqn in eqns
    ]
    single = [i for i, eqn in enumerate(eqns) if apart(eqn)]
    segments: list[ProgramSegment] = []
    start = 0
    for i in [*single, len(eqns)]:
        if i > start:
            segments += _cut(alive, inside, start, i, layers)
        if i < len(eqns):
            segments.append(ProgramSegment(i, i + 1, False))
        start = i + 1
    before = [0, *itertools.accumulate(inside)]
    bound = share * before[-1]
    return [dataclasses.replace(s, again=s.again and before[s.start] < bound) for s in segments]


def _alive(jaxpr: core.Jaxpr, dies: Sequence[bool]) -> list[int]:
    """Returns the bytes of computed floating point arrays that are alive before each equation."""
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last |= {x: i for x in eqn.invars if isinstance(x, core.Var)}
    last |= {x: len(jaxpr.eqns) for x in jaxpr.outvars if isinstance(x, core.Var)}
    change = [0] * (len(jaxpr.eqns) + 2)

    def add(var: Any, since: int) -> None:
        if var in last and is_floating(var.aval):
            change[since] += nbytes(var)
            change[last[var] + 1] -= nbytes(var)

    for var, dead in zip((*jaxpr.constvars, *jaxpr.invars), dies, strict=True):
        if dead:
            add(var, 0)
    for i, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            add(var, i + 1)
    total, alive = 0, []
    for step in change[:-1]:
        total += step
        alive.append(total)
    return alive


def _cut(
    alive: Sequence[int], inside: Sequence[int], start: int, stop: int, layers: int
) -> list[ProgramSegment]:
    """Returns segments of the equations from `start` to `stop`."""
    before = [0]
    for size in inside[start:stop]:
        before.append(before[-1] + size)
    places = [
        i
        for i in range(start + 1, stop)
        if alive[i] <= alive[i - 1] and alive[i] <= alive[i + 1] and before[i - start]
    ]
    # Among places with the same computation before them, keep the one with the fewest bytes alive.
    best: dict[int, int] = {}
    for i in places:
        done = before[i - start]
        if done not in best or alive[i] < alive[best[done]]:
            best[done] = i
    places = sorted(sorted(best.values(), key=lambda i: alive[i])[:_MOST_CUTS])
    places = [start, *places, stop]
    done = [before[i - start] for i in places]
    cheapest: tuple[float, list[int]] | None = None
    for size in range(1, _SIZES + 1):
        bound = done[-1] * 2 ** (-8 * (1 - size / _SIZES))
        stored, cuts = _fewest(places, done, [alive[i] * layers for i in places], bound)
        largest = max(before[b - start] - before[a - start] for a, b in itertools.pairwise(cuts))
        if cheapest is None or stored + largest < cheapest[0]:
            cheapest = stored + largest, cuts
    assert cheapest is not None
    cuts = cheapest[1]
    return [ProgramSegment(a, b, True) for a, b in itertools.pairwise(cuts)]


def _fewest(
    places: Sequence[int], done: Sequence[int], stored: Sequence[int], bound: float
) -> tuple[int, list[int]]:
    """Returns the cuts that store least if no segment may compute more than `bound` bytes."""
    least: list[float] = [stored[0]]
    previous = [0]
    for j in range(1, len(places)):
        fitting = [i for i in range(j) if done[j] - done[i] <= bound] or [j - 1]
        i = min(fitting, key=lambda i: least[i])
        least.append(least[i] + (stored[j] if j < len(places) - 1 else 0))
        previous.append(i)
    cuts, j = [places[-1]], len(places) - 1
    while j:
        j = previous[j]
        cuts.append(places[j])
    return int(least[-1]), cuts[::-1]


def pieces(
    program: core.ClosedJaxpr,
    segments: Sequence[ProgramSegment],
    dies: Sequence[bool],
) -> list[tuple[core.Jaxpr, list[Any]]]:
    """Returns each segment as a program, and its inputs.

    Args:
      program: a program without calls.
      segments: segments that cover it.
      dies: which inputs are dead after the forward pass; constants come first.

    Returns:
      For each segment its program, without constants, and the variables or constants that are its
      arguments.
    """
    jaxpr = program.jaxpr
    used = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    known = (*jaxpr.constvars, *jaxpr.invars)
    alive = {x for x, dead in zip(known, dies, strict=True) if not dead}
    graph = Graph(jaxpr, lambda x: 0 if x in alive else nbytes(x), rebuild=True)
    bodies = []
    for segment in reversed(segments):
        own = jaxpr.eqns[segment.start : segment.stop]
        eqns = [*_cheap_before(jaxpr, segment, graph, {*known}), *own] if segment.again else own
        made = {x for eqn in eqns for x in eqn.outvars}
        outvars = [x for x in dict.fromkeys(x for eqn in own for x in eqn.outvars) if x in used]
        read = dict.fromkeys(x for eqn in eqns for x in eqn.invars if isinstance(x, core.Var))
        invars = [x for x in read if x not in made]
        used |= set(invars)
        body = jaxpr.replace(
            constvars=[],
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        bodies.append((body, invars))
    return bodies[::-1]


def _cheap_before(
    jaxpr: core.Jaxpr, segment: ProgramSegment, graph: Graph, known: Collection[Any]
) -> list[core.JaxprEqn]:
    """Returns the equations before a segment that it computes again from what is stored or alive.

    Without them an array that follows from constants, such as a mask of scores, would be stored as
    a code: where a segment stores codes, its inputs are not traced back.
    """
    own = jaxpr.eqns[segment.start : segment.stop]
    made = {x for eqn in own for x in eqn.outvars}
    read = dict.fromkeys(x for eqn in own for x in eqn.invars if isinstance(x, core.Var))
    needed = {x for x in read if x not in made}
    stored = {*known, *choose(graph, [x for x in read if x in needed and x not in known])}
    before = []
    for eqn in reversed(jaxpr.eqns[: segment.start]):
        if any(x in needed and x not in stored for x in eqn.outvars):
            before.append(eqn)
            needed |= {x for x in eqn.invars if isinstance(x, core.Var)}
    return before[::-1]


_ORDERS = frozenset({
    "approx_top_k", "argmax", "argmin", "sort", "top_k",
})  # fmt: skip
"""Operations that choose places by comparing values: nearly equal ones change places."""


def chosen_by(body: core.Jaxpr, special: Callable[[core.JaxprEqn], bool]) -> set[Any]:
    """Returns the floating point inputs of a segment that it must be computed again from exactly.

    Without recomputation, an order and the residuals of a custom rule are exact. Computed again
    from a decoded input they would differ.

    Args:
      body: the segment.
      special: whether an equation has a custom rule that stores what it likes.
    """
    reach: set[Any] = set()
    for eqn in reversed(body.eqns):
        if special(eqn) or _has_order(eqn) or any(x in reach for x in eqn.outvars):
            reach |= {x for x in eqn.invars if isinstance(x, core.Var)}
    return {x for x in body.invars if x in reach and is_floating(x.aval)}


def _has_order(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name in _ORDERS:
        return True
    body = body_of(eqn)
    bodies = [b.jaxpr for b in (*branches_of(eqn), *([] if body is None else [body]))]
    return any(_has_order(inner) for b in bodies for inner in b.eqns)
