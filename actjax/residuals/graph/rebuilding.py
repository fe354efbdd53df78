"""Chooses the values to store so that all residuals of a backward pass can be rebuilt from them.

Autodiff stores an array for almost every elementwise operation, although most of these follow from
one value: four for a GELU, five for a layer norm. This module traces each array back, through
operations that cost at most one pass over the data, to the values that it follows from: outputs of
matrix products and loops, arguments, and the sums that join a residual stream.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from actjax._core.tags import Tag
from actjax.residuals.graph.equations import run_equation

_VIEWS = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "name", "reshape", "rev", "slice", "split", "squeeze",
    "transpose", "unstack",
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
        self._price = price
        self._rebuild = rebuild
        self._makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        known = (*jaxpr.constvars, *jaxpr.invars, *self._makers)
        self._order = {var: i for i, var in enumerate(known)}
        self._roots = {var: frozenset({var}) for var in (*jaxpr.constvars, *jaxpr.invars)}
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                self._roots[out] = self._find_roots(eqn, out)

    def choose(self, residuals: Sequence[core.Var]) -> list[Any]:
        """Returns the variables to store so that all residuals can be rebuilt.

        Residuals with a common root form a cluster. Either the roots or the residuals of a cluster
        are stored, whichever takes fewer bytes.

        Args:
          residuals: the variables that a backward pass reads.
        """
        price = self._price
        clusters: list[tuple[set[core.Var], set[core.Var]]] = []
        for var in dict.fromkeys(residuals):
            members, roots = {var}, set(self._roots[var])
            # A mask that is rebuilt from decoded numbers could differ from the exact mask.
            if not _is_floating(var) and any(price(x) and _is_floating(x) for x in roots):
                roots = {var}
            apart = []
            for other_members, other_roots in clusters:
                # A root that is alive anyway does not connect residuals.
                if any(price(root) for root in roots & other_roots):
                    members, roots = members | other_members, roots | other_roots
                else:
                    apart.append((other_members, other_roots))
            clusters = [*apart, (members, roots)]
        to_store: dict[core.Var, None] = {}
        for members, roots in clusters:
            by_roots = sum(map(price, roots)) <= sum(map(price, members))
            chosen = roots if by_roots else members
            # A set has no order: sort by the order of the program.
            to_store |= dict.fromkeys(sorted(chosen, key=self._order.__getitem__))
        return list(to_store)

    def viewed(self, var: core.Var) -> Iterator[core.Var]:
        """Yields `var`, the variable that it is a view of, the one that this is a view of, ..."""
        x: Any = var
        while isinstance(x, core.Var):
            yield x
            eqn = self._makers.get(x)
            if eqn is None or eqn.primitive.name not in _VIEWS:
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
        used: set[core.Var] = set()
        seen: set[core.Var] = set()
        waiting = list(residuals)
        while waiting:
            x = waiting.pop()
            if x in stored:
                used.add(x)
            elif x not in seen and x in self._makers:
                waiting += [y for y in self._makers[x].invars if isinstance(y, core.Var)]
            seen.add(x)
        return used

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
            done[x] = value(x)
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
        if self._rebuild or name in _VIEWS:
            return is_cheap(eqn)
        if name != "convert_element_type":
            return False
        before, after = eqn.invars[0], eqn.outvars[0]
        wider = _dtype(before).itemsize <= _dtype(after).itemsize
        return wider and _is_floating(before) and _is_floating(after)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation takes at most one pass over its data, and makes no code."""
    if eqn.primitive.name == "name":
        tag = Tag.decode(eqn.params["name"])
        return tag is None or not tag.is_code
    return eqn.primitive.name in _VIEWS or eqn.primitive.name in _ELEMENTWISE


def _size(var: Any) -> int:
    return var.aval.size


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _is_floating(var: Any) -> bool:
    return jnp.issubdtype(_dtype(var), jnp.floating)
