"""Chooses the values to store so that all residuals of a backward pass can be rebuilt from them.

The stored values take as few bytes as possible, provided that no error of a code grows much on the
way to the results of the backward pass. Each residual has variables that it can be rebuilt from
accurately. A set that every path from a root to a residual passes is a vertex cut of the program,
and a maximum flow gives the cheapest one (Menger's theorem).
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.extend import core

from actjax.residuals.graph.cuts import cheapest_cut
from actjax.residuals.graph.growth import SPREADS, Growth
from actjax.residuals.graph.rebuilding import STEEP, Graph
from actjax.residuals.graph.variables import VIEWS, size

# An error is the relative one of the value that reads a residual, if the error of the code is the
# range of its group: 6 for normal numbers that a product reads.
_GOOD = 12.0
"""Error that is as good as any."""
_FACTOR = 5.0
"""Growth of an error, over that of a code of the residual itself, that is as good as none."""
_OF_ROWS = 8.0
"""Further factor for a statistic of rows. Rebuilt from the decoded rows it fits these: weights of
attention add up to one."""
_FAIR = 24.0
"""Error at which rebuilding counts as twice the bytes."""
_MOST = 1000.0
"""The most bytes, over its own, that a root counts as."""
_WORTH_DIVIDING = 1.5
"""Factor by which a code of the reciprocal must lower an error."""
_FLAT = 2.2
"""Growth of an error below which all variables are equal: the first is stored."""
_TIE = 0.01
"""Part of the bytes of a variable that such a growth counts as."""
_MADE = 0.005
"""Part of the bytes that a variable counts more if other operations would be fused with its own, so
that the forward pass would not write it."""
_SMALL = 32
"""Variables that are smaller than a residual by this factor are mostly stored exactly."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a variable is encoded.

    Attributes:
      is_reciprocal: whether a code of its reciprocal is stored, since the backward pass divides by
        it.
      limit: bound of its ordinary numbers, if it has others, such as the -1e9 of a mask.
      may_be_nan: whether some of its numbers may be NaN, of which the program makes no use.
    """

    is_reciprocal: bool = False
    limit: float | None = None
    may_be_nan: bool = False


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The ways to rebuild a residual.

    Attributes:
      residual: the residual.
      near: variables that it can be rebuilt from accurately, and itself if a code of it is as good,
        with their errors over that of a code of itself.
      far: roots that it would be rebuilt from with a large error, with these errors.
    """

    residual: core.Var
    near: dict[core.Var, float]
    far: dict[core.Var, float]


@dataclasses.dataclass(frozen=True)
class _End:
    """Where the ways to a residual end."""

    residual: core.Var


@dataclasses.dataclass(frozen=True)
class _Far:
    """Where the ways to a residual begin that bring a large error."""

    residual: core.Var


def choose(
    graph: Graph,
    residuals: Sequence[core.Var],
    backward: core.Jaxpr | None = None,
    leaves: Sequence[Any] = (),
) -> dict[core.Var, Form]:
    """Returns the variables to store so that others can be rebuilt, with their forms.

    The graph is told which of them each may be rebuilt from.

    Args:
      graph: the program.
      residuals: the others: the residuals of a backward pass, or inputs of a segment.
      backward: the pullback that reads them, without calls; None if it is not known.
      leaves: its residuals, its first inputs.
    """
    members = [x for x in dict.fromkeys(residuals) if graph.is_priced(x)]
    forms: dict[core.Var, Form] = {}
    if members:
        errors = _Errors(graph, members, backward, leaves)
        ways = [_ways_to(graph, x, errors.of(x)) for x in members]
        graph.rebuild_from({way.residual: way.near.keys() for way in ways})
        forms = {x: errors.form(x) for x in _cut(graph, ways)}
    # Roots that are alive anyway are read without a code.
    return {x: forms.get(x, Form()) for x in graph.ends(residuals, forms)}


class _Errors:
    """Errors of the values that read each residual, by the variable that is stored as a code."""

    def __init__(
        self,
        graph: Graph,
        residuals: Sequence[core.Var],
        backward: core.Jaxpr | None,
        leaves: Sequence[Any],
    ) -> None:
        self._graph = graph
        growths = [Growth(graph.jaxpr, graph.is_followed, spread) for spread in SPREADS]
        if backward is None:
            weights, divisors = [g.equal_weights(residuals) for g in growths], set()
        else:
            weights = [g.weights(backward, leaves) for g in growths]
            divisors = _divisors(backward, leaves).intersection(residuals)
        self._views = list(zip(growths, weights, strict=True))
        self._reciprocal: set[core.Var] = set()
        self._reciprocal = {
            x
            for x in divisors
            if self._largest([x], {x})[x] * _WORTH_DIVIDING < self._largest([x], ())[x]
        }

    def of(self, residual: core.Var) -> dict[core.Var, float]:
        """Returns the errors of a residual."""
        errors = self._largest(self._graph.region(residual), self._reciprocal)
        # Small arrays are stored exactly.
        return {x: e if _SMALL * size(x) >= size(residual) else 0.0 for x, e in errors.items()}

    def form(self, var: core.Var) -> Form:
        """Returns the form in which a variable is stored."""
        growth = self._views[0][0]
        return Form(var in self._reciprocal, growth.limit(var), growth.may_be_nan(var))

    def _largest(
        self, region: Sequence[core.Var], reciprocal: Collection[core.Var]
    ) -> dict[core.Var, float]:
        each = [growth.errors(region, w[region[0]], reciprocal) for growth, w in self._views]
        return {x: max(errors[x] for errors in each) for x in region}


def _ways_to(graph: Graph, residual: core.Var, errors: Mapping[core.Var, float]) -> _Ways:
    """Returns from where a residual can be rebuilt, with errors as `_Errors.of` returns them."""
    own = errors[residual]
    roots = sum(e**2 for x, e in errors.items() if not graph.sources(x)) ** 0.5
    bound = max(_GOOD, _FACTOR * min(own, roots))
    steep = _steep(graph, residual)
    near, far = {}, {}
    for x, error in errors.items():
        is_row = size(x) > 2 * size(residual)
        if error <= bound * (_OF_ROWS if is_row else 1.0):
            growth = error / own if own and not is_row else 1.0
            near[x] = max(growth, 2 * _FLAT) if x in steep else growth
        elif not graph.sources(x):
            far[x] = error
    return _Ways(residual, near, far)


def _steep(graph: Graph, residual: core.Var) -> set[core.Var]:
    """Returns the variables that reach a residual through an operation with an unbounded slope.

    Their numbers may be larger than the samples, as sums of logarithms are.
    """
    is_large = lambda x: 2 * size(x) > size(residual)  # noqa: E731
    steep: set[core.Var] = set()
    for x in graph.region(residual):
        sources = graph.sources(x)
        if x in steep or (sources and is_large(x) and _is_steep(graph.maker(x), is_large)):
            steep.update(filter(is_large, sources))
    return steep


def _is_steep(eqn: core.JaxprEqn, is_large: Callable[[Any], bool]) -> bool:
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return isinstance(divisor, core.Var) and is_large(divisor)
    return eqn.primitive.name in STEEP


def _cut(graph: Graph, ways: Sequence[_Ways]) -> list[core.Var]:
    """Returns the variables that are cheapest to store, given the ways to the residuals."""
    near_any = {x for way in ways for x in way.near}
    shares = collections.Counter(x for way in ways for x in way.far if x not in near_any)
    prices: dict[Any, float] = {}
    edges: list[tuple[Any, Any]] = []
    starts: list[Any] = []
    ends = [_End(way.residual) for way in ways]
    for way, end in zip(ways, ends, strict=True):
        far = _Far(way.residual)
        for x, growth in way.near.items():
            # Prefer the more accurate of equal sizes: values may be larger than the samples.
            price = graph.price(x) * (1 + _TIE * min(max(growth / _FLAT, 1.0), 2.0) ** 2)
            price *= 1 + _MADE * bool(graph.sources(x))
            prices[x] = max(prices.get(x, 0.0), price)
        # The roots themselves, which other residuals may share, and the error.
        fine = min(sum(error**2 for error in way.far.values()) / _FAIR**2, _MOST)
        own = sum(graph.price(x) / shares[x] for x in way.far if x in shares)
        prices[far] = own + fine * sum(map(graph.price, way.far))
        prices[end] = math.inf
        starts.append(far)
        for x in (*way.near, end):
            before, misses = _nearest(graph, way, x)
            edges += [(y, x) for y in before]
            if misses:
                edges.append((far, x))
            elif not before:
                starts.append(x)
    return [x for x in cheapest_cut(prices, edges, starts, ends) if isinstance(x, core.Var)]


def _nearest(graph: Graph, way: _Ways, x: core.Var | _End) -> tuple[set[core.Var], bool]:
    """Returns the first variables on the ways back that are near, and whether a way has none."""
    if isinstance(x, _End):
        waiting = [x.residual]
    else:
        is_mask = x is way.residual and graph.is_unsafe(x)
        waiting = [] if is_mask else list(graph.sources(x))
    found: set[core.Var] = set()
    seen: set[core.Var] = set()
    misses = False
    while waiting:
        y = waiting.pop()
        if y in seen:
            continue
        seen.add(y)
        if y in way.near:
            found.add(y)
            continue
        sources = graph.sources(y)
        misses = misses or not sources
        waiting += sources
    return found, misses


def _divisors(jaxpr: core.Jaxpr, leaves: Sequence[Any]) -> set[core.Var]:
    """Returns the residuals that a pullback divides cotangents by.

    Args:
      jaxpr: the pullback.
      leaves: its residuals, its first inputs.
    """
    views: dict[Any, Any] = dict(zip(jaxpr.invars, leaves, strict=False))
    divisors = set()
    for eqn in jaxpr.eqns:
        operands = [views.get(x) if isinstance(x, core.Var) else None for x in eqn.invars]
        if eqn.primitive.name in VIEWS and operands[0] is not None:
            views[eqn.outvars[0]] = operands[0]
        elif eqn.primitive.name == "div":
            divisors.add(operands[1])
    return {x for x in divisors if isinstance(x, core.Var)}
