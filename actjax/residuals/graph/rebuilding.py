"""Chooses the values to store so that all residuals of a backward pass can be rebuilt from them.

Autodiff stores an array for almost every elementwise operation, although most of these follow from
one value: four for a GELU, five for a layer norm. This module traces each array back, through
operations that cost at most one pass over the data, to the values that it follows from: outputs of
matrix products and loops, arguments, and the sums that join a residual stream.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from actjax._core.tags import Tag
from actjax.residuals.graph.cuts import cheapest_cut
from actjax.residuals.graph.equations import run_equation
from actjax.residuals.graph.growth import SPREADS, Growth

VIEWS = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "name", "reshape", "reshard", "rev",
    "sharding_constraint", "slice", "split", "squeeze", "transpose", "unstack",
})  # fmt: skip
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "concatenate", "convert_element_type", "cos",
    "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pad", "polynomial", "pow",
    "random_bits", "random_unwrap", "random_wrap", "reduce_and", "reduce_max", "reduce_min",
    "reduce_or", "reduce_precision",
    "reduce_sum", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stack", "stop_gradient", "sub",
    "tan", "tanh", "threefry2x32", "xor",
})  # fmt: skip
"""Operations that take one pass over the data, including reductions and random numbers."""
_JUMPS = frozenset({
    "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "round", "sign",
})  # fmt: skip
"""The discontinuous operations among these. Casts to integers are discontinuous too."""
_STEEP = frozenset({
    "cos", "cosh", "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "sinh", "tan",
})  # fmt: skip
"""Operations that make a small error of a large or tiny number a large one."""

_GOOD = 12.0
"""Relative error of what reads a residual, over that of a code whose error is the range of its
group, that is as good as any. (Of normal numbers a code of their own has 5.)"""
_FACTOR = 5.0
"""Growth of such an error, above that of a code of the residual itself, that is as good as none."""
_MOST = 1000.0
"""The most bytes, over its own, that a root counts as."""
_WORTH_DIVIDING = 1.5
"""Factor by which a code of the reciprocal must lower such an error."""
_FAIR = 24.0
"""Such an error at which rebuilding counts as twice the bytes."""
_FLAT = 2.2
"""Growth of such an error, above that of a code of the residual itself, below which all are equal:
the first variable is stored."""
_TIE = 0.01
"""Part of the bytes of an array that such a growth counts as."""
_SMALL = 32
"""Arrays that are smaller by this factor are mostly stored exactly."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a variable is encoded.

    Attributes:
      is_reciprocal: whether a code of its reciprocal is stored, since the backward pass divides by
        it.
      limit: bound of its ordinary numbers, if it has others, such as the -1e9 of a mask.
    """

    is_reciprocal: bool = False
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The ways to rebuild a residual.

    Attributes:
      residual: the residual.
      near: what it can be rebuilt from, and itself if a code of it is as good, with the errors over
        that of a code of itself.
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


class Graph:
    """The dependencies between the values of a program without calls."""

    def __init__(
        self, jaxpr: core.Jaxpr, price: Callable[[core.Var], int], *, rebuild: bool
    ) -> None:
        """Finds the values that each variable follows from.

        Args:
          jaxpr: the program.
          price: bytes that storing a variable takes; 0 if it is alive anyway and hence exact.
          rebuild: whether to follow elementwise operations, or views only.
        """
        self._jaxpr, self._price, self._rebuild = jaxpr, price, rebuild
        self._near: dict[core.Var, Collection[core.Var]] = {}
        self._makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        known = (*jaxpr.constvars, *jaxpr.invars, *self._makers)
        self._order = {var: i for i, var in enumerate(known)}
        self._roots = {var: frozenset({var}) for var in (*jaxpr.constvars, *jaxpr.invars)}
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                self._roots[out] = self._find_roots(eqn, out)

    def choose(
        self,
        residuals: Sequence[core.Var],
        backward: core.Jaxpr | None = None,
        leaves: Sequence[Any] = (),
    ) -> dict[core.Var, Form]:
        """Returns the variables to store so that others can be rebuilt, with their forms.

        Those of the fewest bytes from which the others follow without a growth of errors. Where
        errors grow, rebuilding counts as more bytes.

        Args:
          residuals: the others: the residuals of a backward pass, or inputs of a segment.
          backward: the pullback that reads them, without calls; None if it is not known.
          leaves: its residuals, its first inputs.
        """
        members = [x for x in dict.fromkeys(residuals) if self._is_priced(x)]
        if not members:
            return dict.fromkeys(self._reached(residuals, ()), Form())
        divisors = set() if backward is None else _divisors(backward, leaves).intersection(members)
        growths = [Growth(self._jaxpr, self._is_cheap, spread) for spread in SPREADS]
        if backward is None:
            weights = [growth.equal_weights(members) for growth in growths]
        else:
            weights = [growth.weights(backward, leaves) for growth in growths]
        views = list(zip(growths, weights, strict=True))

        def errors(region: Sequence[core.Var], reciprocal: Collection[core.Var]) -> Any:
            """Returns the errors of the first of a region, the largest for each variable."""
            each = [growth.errors(region, w[region[0]], reciprocal) for growth, w in views]
            return {x: max(e[x] for e in each) for x in region}

        reciprocal = {
            x for x in divisors if errors([x], {x})[x] < errors([x], ())[x] / _WORTH_DIVIDING
        }
        ways = [
            self._ways(region[0], errors(region, reciprocal))
            for region in map(self._region, members)
        ]
        self._near = {way.residual: way.near.keys() for way in ways}
        near_roots = {x for way in ways for x in way.near}
        shares = collections.Counter(x for way in ways for x in way.far if x not in near_roots)
        prices: dict[Any, float] = {}
        edges: list[tuple[Any, Any]] = []
        starts: list[Any] = []
        ends = [_End(way.residual) for way in ways]
        for way, end in zip(ways, ends, strict=True):
            near, far = way.near, _Far(way.residual)
            prices[end] = math.inf
            for x, growth in near.items():
                # Of what takes as many bytes, the more exact: values may be larger than expected.
                price = self._price(x) * (1 + _TIE * min(max(growth / _FLAT, 1.0), 2.0) ** 2)
                prices[x] = max(prices.get(x, 0.0), price)
            for x in (*near, end):
                if not isinstance(x, core.Var):
                    first = [way.residual]
                else:
                    is_mask = x is way.residual and self._is_unsafe(x)
                    first = [] if is_mask else self._sources(x)
                before, misses = self._nearest(first, near)
                edges += [(y, x) for y in before]
                if misses:
                    edges.append((far, x))
                elif not before:
                    starts.append(x)
            # The roots themselves, which other residuals may share, and the error.
            fine = min(sum(error**2 for error in way.far.values()) / _FAIR**2, _MOST)
            own = sum(self._price(x) / shares[x] for x in way.far if x in shares)
            prices[far] = own + fine * sum(map(self._price, way.far))
            starts.append(far)
        cut = cheapest_cut(prices, edges, starts, ends)
        stored = {
            x: Form(x in reciprocal, growths[0].limit(x)) for x in cut if isinstance(x, core.Var)
        }
        # What is alive anyway is read as it is. A set has no order: sort by that of the program.
        reached = sorted(self._reached(residuals, stored), key=self._order.__getitem__)
        return {x: stored.get(x, Form()) for x in reached}

    def _stops(self, residual: core.Var, var: core.Var) -> bool:
        """Returns whether a residual is rebuilt from a variable, if this is stored.

        Another residual may need a variable whose code would ruin this one.
        """
        near = self._near.get(residual)
        return near is None or var in near or not self._sources(var)

    def _is_priced(self, var: core.Var) -> bool:
        """Returns whether a variable does not follow from what is alive anyway."""
        return any(self._price(x) for x in self._roots[var])

    def _sources(self, var: core.Var) -> list[core.Var]:
        """Returns the variables that `var` is computed from; none for a root."""
        if var in self._roots[var]:
            return []
        eqn = self._makers[var]
        inputs = dict.fromkeys(x for x in eqn.invars if isinstance(x, core.Var))
        return [x for x in inputs if self._is_priced(x)]

    def _is_unsafe(self, var: core.Var) -> bool:
        """Returns whether it is a mask that, rebuilt from decoded numbers, could differ."""
        return not _is_floating(var) and any(
            self._price(x) and _is_floating(x) for x in self._roots[var]
        )

    def _region(self, var: core.Var) -> list[core.Var]:
        """Returns `var` and all that it follows from cheaply, in reverse order of the program."""
        seen, waiting = {var}, [] if self._is_unsafe(var) else [var]
        while waiting:
            for x in self._sources(waiting.pop()):
                if x not in seen:
                    seen.add(x)
                    waiting.append(x)
        return sorted(seen, key=self._order.__getitem__, reverse=True)

    def _nearest(
        self, first: Sequence[core.Var], near: Collection[core.Var]
    ) -> tuple[set[core.Var], bool]:
        """Returns the first variables of a set on all ways back, and whether a way has none."""
        found: set[core.Var] = set()
        seen: set[core.Var] = set()
        waiting, misses = list(first), False
        while waiting:
            x = waiting.pop()
            if x in seen:
                continue
            seen.add(x)
            if x in near:
                found.add(x)
                continue
            sources = self._sources(x)
            misses = misses or not sources
            waiting += sources
        return found, misses

    def _ways(self, residual: core.Var, errors: dict[core.Var, float]) -> _Ways:
        """Returns from where a residual can be rebuilt.

        Args:
          residual: the residual.
          errors: of what reads it, if it is rebuilt from one of these variables.
        """
        # Small arrays are stored exactly.
        errors = {x: e if _SMALL * _size(x) >= _size(residual) else 0.0 for x, e in errors.items()}
        roots = sum(e**2 for x, e in errors.items() if not self._sources(x)) ** 0.5
        bound = max(_GOOD, _FACTOR * min(errors[residual], roots))
        near = {x: self._growth(residual, x, errors) for x, e in errors.items() if e <= bound}
        steep = self._steep(residual)
        near = {x: max(g, 2 * _FLAT) if x in steep else g for x, g in near.items()}
        far = {x: e for x, e in errors.items() if x not in near and not self._sources(x)}
        return _Ways(residual, near, far)

    def _growth(self, residual: core.Var, var: core.Var, errors: Mapping[core.Var, float]) -> float:
        """Returns an error over that of a code of the residual itself."""
        # A statistic of rows is not compared with the rows.
        alike = _size(var) <= 2 * _size(residual)
        return errors[var] / errors[residual] if alike and errors[residual] else 1.0

    def _steep(self, residual: core.Var) -> set[core.Var]:
        """Returns what a residual follows from through an operation whose slope has no bound.

        Numbers there may be larger than any that are expected, as sums of logarithms are.
        """
        steep: set[core.Var] = set()
        for x in self._region(residual):
            eqn = self._makers.get(x)
            sources = self._sources(x)
            is_steep = bool(sources) and eqn is not None and _is_steep(eqn, residual)
            if is_steep or x in steep:
                steep |= {y for y in sources if 2 * _size(y) > _size(residual)}
        return steep

    def _reached(
        self, residuals: Sequence[core.Var], stored: Collection[core.Var]
    ) -> set[core.Var]:
        """Returns where the ways from residuals back end: at stored variables and inputs."""
        ends: set[core.Var] = set()
        for residual in residuals:
            seen: set[core.Var] = set()
            waiting = [residual]
            while waiting:
                x = waiting.pop()
                if x in seen:
                    continue
                seen.add(x)
                if x in self._roots[x] or (x in stored and self._stops(residual, x)):
                    ends.add(x)
                else:
                    waiting += [y for y in self._makers[x].invars if isinstance(y, core.Var)]
        return ends

    def viewed(self, var: core.Var) -> Iterator[core.Var]:
        """Yields `var`, the variable that it is a view of, the one that this is a view of, ..."""
        x: Any = var
        while isinstance(x, core.Var):
            yield x
            eqn = self._makers.get(x)
            if eqn is None or eqn.primitive.name not in VIEWS:
                return
            x = eqn.invars[0]

    def only_root(self, var: core.Var) -> core.Var | None:
        """Returns the value that `var` follows from cheaply, if it is one of the same size."""
        roots = self._roots[var]
        if len(roots) != 1:
            return None
        (root,) = roots
        return root if _size(root) == _size(var) else None

    def is_view(self, var: Any, other: core.Var) -> bool:
        """Returns whether `var` is `other` or a view of it."""
        return any(x is other for x in self.viewed(var))

    def needed(self, residuals: Sequence[core.Var], stored: Collection[core.Var]) -> set[core.Var]:
        """Returns the stored variables from which the residuals are rebuilt."""
        return self._reached(residuals, stored) & set(stored)

    def rebuild(self, var: core.Var, value: Callable[[core.Var], Any]) -> dict[core.Var, Any]:
        """Returns the values of `var` and of everything it is computed from.

        Args:
          var: a residual.
          value: returns the value of a stored variable, and None for other variables.
        """
        done: dict[core.Var, Any] = {}
        needed: dict[int, core.JaxprEqn] = {}
        waiting = [var]
        while waiting:
            x = waiting.pop()
            if x in done:
                continue
            done[x] = value(x) if self._stops(var, x) else None
            if done[x] is None:
                eqn = self._makers[x]
                needed[self._order[eqn.outvars[0]]] = eqn
                waiting += [y for y in eqn.invars if isinstance(y, core.Var)]
        for _, eqn in sorted(needed.items()):
            inputs = [x.val if isinstance(x, core.Literal) else done[x] for x in eqn.invars]
            done.update(zip(eqn.outvars, run_equation(eqn, inputs), strict=True))
        return done

    def _find_roots(self, eqn: core.JaxprEqn, var: core.Var) -> frozenset[core.Var]:
        """Returns the variables that the output `var` of an equation follows from cheaply."""
        if not self._is_cheap(eqn):
            return frozenset({var})
        sources = [self._roots[x] for x in eqn.invars if isinstance(x, core.Var)]
        if self._is_narrower_copy(eqn, sources):
            return frozenset({var})
        if self._jumps(eqn) and any(
            _is_floating(root) and self._price(root) for roots in sources for root in roots
        ):
            # A mask of decoded values could differ from the exact mask, so the mask is stored.
            return frozenset({var})
        if eqn.primitive.name in ("add", "add_any", "sub") and len(sources) == 2:
            large = [{root for root in roots if 2 * _size(root) > _size(var)} for roots in sources]
            # The sum of two independent values, as in a residual stream, is a value to store.
            # Rebuilt from its terms it would accumulate the errors of all earlier layers.
            if all(large) and not large[0] & large[1]:
                return frozenset({var})
        return frozenset().union(*sources)

    def _jumps(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether the result is a discontinuous function of the inputs."""
        if eqn.primitive.name == "convert_element_type":
            is_inexact = jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
            return _is_floating(eqn.invars[0]) and not is_inexact
        return eqn.primitive.name in _JUMPS

    def _is_narrower_copy(self, eqn: core.JaxprEqn, roots: list[frozenset[core.Var]]) -> bool:
        """Returns whether a root is cast to fewer bytes: then the cast is stored instead."""
        if eqn.primitive.name != "convert_element_type" or not roots:
            return False
        before, after = eqn.invars[0], eqn.outvars[0]
        if _dtype(after).itemsize >= _dtype(before).itemsize or len(roots[0]) != 1:
            return False
        (root,) = roots[0]
        # The cast of an argument, such as a weight, is repeated from the argument.
        return root in self._makers and self.is_view(before, root)

    def _is_cheap(self, eqn: core.JaxprEqn) -> bool:
        name = eqn.primitive.name
        if self._rebuild or name in VIEWS:
            return is_cheap(eqn)
        if name != "convert_element_type":
            return False
        before, after = eqn.invars[0], eqn.outvars[0]
        wider = _dtype(before).itemsize <= _dtype(after).itemsize
        return wider and _is_floating(before) and _is_floating(after)


def _is_steep(eqn: core.JaxprEqn, residual: core.Var) -> bool:
    if 2 * _size(eqn.outvars[0]) <= _size(residual):
        return False
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return isinstance(divisor, core.Var) and 2 * _size(divisor) > _size(residual)
    return eqn.primitive.name in _STEEP


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


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation takes at most one pass over its data, and makes no code."""
    if eqn.primitive.name == "name":
        tag = Tag.decode(eqn.params["name"])
        return tag is None or not tag.is_code
    return eqn.primitive.name in VIEWS or eqn.primitive.name in _ELEMENTWISE


def _size(var: Any) -> int:
    return var.aval.size


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _is_floating(var: Any) -> bool:
    return jnp.issubdtype(_dtype(var), jnp.floating)
