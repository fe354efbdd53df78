"""Traces arrays back to what they follow from, and rebuilds them from it.

Autodiff stores an array for almost every elementwise operation, although most of these follow from
one value: four for a GELU, five for a layer norm. This module traces each array back, through
operations that cost at most one pass over the data, to the values that it follows from: outputs of
matrix products and loops, arguments, and the sums that join a residual stream.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from actjax._core.tags import Tag
from actjax.residuals.graph.divisors import run_decoded
from actjax.residuals.graph.variables import VIEWS, has_floats, size

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
STEEP = frozenset({
    "cos", "cosh", "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "sinh", "tan",
})  # fmt: skip
"""Operations among these that make a small error of a large or tiny number a large one."""


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
        self.jaxpr, self.price, self._rebuild = jaxpr, price, rebuild
        self._near: Mapping[core.Var, Collection[core.Var]] = {}
        self._makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        known = (*jaxpr.constvars, *jaxpr.invars, *self._makers)
        self._order = {var: i for i, var in enumerate(known)}
        self._roots = {var: frozenset({var}) for var in (*jaxpr.constvars, *jaxpr.invars)}
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                self._roots[out] = self._find_roots(eqn, out)

    def _stops(self, residual: core.Var, var: core.Var) -> bool:
        """Returns whether a residual is rebuilt from a variable, if this is stored."""
        near = self._near.get(residual)
        return near is None or var in near or not self.sources(var)

    def rebuild_from(self, near: Mapping[core.Var, Collection[core.Var]]) -> None:
        """Takes the variables that residuals may be rebuilt from, if they are stored.

        Another residual may need a variable whose code would ruin this one.
        """
        self._near = near

    def maker(self, var: core.Var) -> core.JaxprEqn:
        """Returns the equation that makes a variable that is no input."""
        return self._makers[var]

    def is_priced(self, var: core.Var) -> bool:
        """Returns whether a variable does not follow from what is alive anyway."""
        return any(self.price(x) for x in self._roots[var])

    def sources(self, var: core.Var) -> list[core.Var]:
        """Returns the variables that `var` is computed from; none for a root."""
        if var in self._roots[var]:
            return []
        eqn = self._makers[var]
        inputs = dict.fromkeys(x for x in eqn.invars if isinstance(x, core.Var))
        return [x for x in inputs if self.is_priced(x)]

    def is_unsafe(self, var: core.Var) -> bool:
        """Returns whether it is a mask that, rebuilt from decoded numbers, could differ."""
        return not has_floats(var) and any(
            self.price(x) and has_floats(x) for x in self._roots[var]
        )

    def region(self, var: core.Var) -> list[core.Var]:
        """Returns `var` and all that it follows from cheaply, in reverse order of the program."""
        seen, waiting = {var}, [] if self.is_unsafe(var) else [var]
        while waiting:
            for x in self.sources(waiting.pop()):
                if x not in seen:
                    seen.add(x)
                    waiting.append(x)
        return sorted(seen, key=self._order.__getitem__, reverse=True)

    def ends(self, residuals: Sequence[core.Var], stored: Collection[core.Var]) -> list[core.Var]:
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
        # A set has no order: sort by that of the program.
        return sorted(ends, key=self._order.__getitem__)

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
        return root if size(root) == size(var) else None

    def is_view(self, var: Any, other: core.Var) -> bool:
        """Returns whether `var` is `other` or a view of it."""
        return any(x is other for x in self.viewed(var))

    def needed(self, residuals: Sequence[core.Var], stored: Collection[core.Var]) -> set[core.Var]:
        """Returns the stored variables from which the residuals are rebuilt."""
        return {x for x in self.ends(residuals, stored) if x in stored}

    def rebuild(
        self,
        var: core.Var,
        value: Callable[[core.Var], Any],
        decoded: dict[core.Var, bool] | None = None,
    ) -> dict[core.Var, Any]:
        """Returns the values of `var` and of everything it is computed from.

        Args:
          var: a residual.
          value: returns the value of a stored variable, and None for other variables.
          decoded: as for `run_decoded`; None if all values are exact.
        """
        decoded = {} if decoded is None else decoded
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
            done.update(zip(eqn.outvars, run_decoded(eqn, inputs, decoded), strict=True))
        return done

    def _find_roots(self, eqn: core.JaxprEqn, var: core.Var) -> frozenset[core.Var]:
        """Returns the variables that the output `var` of an equation follows from cheaply."""
        if not self.is_followed(eqn):
            return frozenset({var})
        sources = [self._roots[x] for x in eqn.invars if isinstance(x, core.Var)]
        if self._is_narrower_copy(eqn, sources):
            return frozenset({var})
        if jumps(eqn) and any(
            has_floats(root) and self.price(root) for roots in sources for root in roots
        ):
            # A mask of decoded values could differ from the exact mask, so the mask is stored.
            return frozenset({var})
        if eqn.primitive.name in ("add", "add_any", "sub") and len(sources) == 2:
            large = [{root for root in roots if 2 * size(root) > size(var)} for roots in sources]
            # The sum of two independent values, as in a residual stream, is a value to store.
            # Rebuilt from its terms it would accumulate the errors of all earlier layers.
            if all(large) and not large[0] & large[1]:
                return frozenset({var})
        return frozenset().union(*sources)

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

    def is_followed(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether results of an equation are rebuilt from its operands."""
        name = eqn.primitive.name
        if self._rebuild or name in VIEWS:
            return is_cheap(eqn)
        if name != "convert_element_type":
            return False
        before, after = eqn.invars[0], eqn.outvars[0]
        wider = _dtype(before).itemsize <= _dtype(after).itemsize
        return wider and has_floats(before) and has_floats(after)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation takes at most one pass over its data, and makes no code."""
    if eqn.primitive.name == "name":
        tag = Tag.decode(eqn.params["name"])
        return tag is None or not tag.is_code
    return eqn.primitive.name in VIEWS or eqn.primitive.name in _ELEMENTWISE


def jumps(eqn: core.JaxprEqn) -> bool:
    """Returns whether the result of a cheap operation is a discontinuous function of the inputs."""
    if eqn.primitive.name == "convert_element_type":
        is_inexact = jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
        return has_floats(eqn.invars[0]) and not is_inexact
    return eqn.primitive.name in _JUMPS


def _dtype(var: Any) -> Any:
    return var.aval.dtype
