"""How an error of a stored value grows on the way to the values that are rebuilt from it.

A code has an error in proportion to the range of its group. `exp`, `log`, a division and a sine of
a high frequency make a small error of their argument a large one of their result, whose own code
would have been accurate. This module runs the cheap operations of a program on a few samples of
each variable, in float64 NumPy, with a slope for each operand, and from these follows the error of
a value back to everything that it is computed from.

The samples are not taken from a batch: the choice of stored arrays must not depend on data. Results
of products and loops are assumed to be normal with one of `SPREADS`. That is more than a trained
network mostly has, so that networks with larger activations work too.
"""

import collections
import functools
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy import special

from actjax.residuals.graph.slopes import (
    COUNT,
    LARGEST,
    along_rows,
    bounded,
    nonzero,
    value_and_slopes,
)
from actjax.residuals.graph.variables import has_floats

SPREADS = (4.0, 8.0)
"""Standard deviations assumed for results of operations that are not cheap."""
_EXTREME = 1e6
"""Larger constants belong to a mask (-1e9) and do not count in the range of a group."""
_INFINITY = 1e50
"""Stands for such constants among the samples."""
_OF_SMALL = 16.0
"""Factor by which relative errors of small numbers may be larger than those of large ones."""
_ALL_WRONG = 12**0.5 * 255
"""Error of what a code of 8 bits rounds to zero."""

_QUANTILES = special.ndtri((np.arange(COUNT) + 0.5) / COUNT)
_ORDERS = np.array([np.random.default_rng(i).permutation(COUNT) for i in range(64)])
"""Variables that are computed apart get samples in different orders."""
_PASSED = ("gather", "dynamic_slice", "sort", "reduce_window_max")
"""Operations whose results are among the numbers of their first operand."""


def _is_ordinary(x: np.ndarray) -> np.ndarray:
    return np.abs(x) < 1e-10 * _INFINITY


def _least_extreme(dtype: Any) -> float:
    return min(_EXTREME, float(jnp.finfo(dtype).max) / 2)


def _range(x: np.ndarray) -> float:
    """Returns the range of ordinary numbers."""
    x = x[_is_ordinary(x)]
    return float(np.ptp(x)) if len(x) else 0.0


def _size(x: np.ndarray) -> float:
    """Returns the root mean square of ordinary numbers."""
    x = x[_is_ordinary(x)]
    return float(np.sqrt(np.mean(x**2))) if len(x) else 0.0


class Growth:
    """The growth of errors along the cheap operations of a program."""

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        is_cheap: Callable[[core.JaxprEqn], bool],
        spread: float,
        known: Mapping[Any, np.ndarray] | None = None,
    ) -> None:
        """Computes samples of all variables.

        Args:
          jaxpr: a program without calls.
          is_cheap: whether the results of an equation are rebuilt. Errors are followed through
            these equations only.
          spread: standard deviation of the results of all other equations.
          known: samples of some of its inputs.
        """
        self._is_cheap, self._spread = is_cheap, spread
        self._jaxpr = jaxpr
        self._values: dict[Any, np.ndarray] = {}
        self._drawn: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for x in (*jaxpr.constvars, *jaxpr.invars):
            fresh = self._fresh(x, "input") / spread
            self._values[x] = fresh if known is None else known.get(x, fresh)
        self._slopes: dict[Any, list[tuple[Any, Any, float]]] = {}
        sums = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum")
        self._summed = {x for eqn in sums for x in eqn.invars if isinstance(x, core.Var)}
        equations = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("ne", "eq"))
        self._tested: set[Any] = {
            eqn.invars[0]
            for eqn in equations
            if eqn.invars[0] is eqn.invars[1] and isinstance(eqn.invars[0], core.Var)
        }
        with np.errstate(all="ignore"):
            for eqn in jaxpr.eqns:
                self._run(eqn)
                if is_cheap(eqn) and any(
                    isinstance(x, core.Var) and x in self._tested for x in eqn.invars
                ):
                    self._tested |= {x for x in eqn.outvars if has_floats(x)}

    def weights(self, backward: core.Jaxpr, leaves: Sequence[Any]) -> dict[core.Var, np.ndarray]:
        """Returns how much an error of each residual counts, for each sample.

        That is the derivative of a value that the backward pass computes from it by cheap
        operations, over the root mean square of this value; the largest for all such values that a
        product reads or that are results.

        Args:
          backward: the pullback, without calls.
          leaves: its residuals, its first inputs, as variables of this program.
        """
        pairs = list(zip(backward.invars, leaves, strict=False))
        known = {x: self._value(leaf) for x, leaf in pairs}
        after = Growth(backward, self._is_cheap, self._spread, known)
        makers = {out: eqn for eqn in backward.eqns for out in eqn.outvars}
        ends = dict.fromkeys(x for x in backward.outvars if isinstance(x, core.Var))
        for eqn in backward.eqns:
            if not self._is_cheap(eqn):
                ends |= dict.fromkeys(x for x in eqn.invars if isinstance(x, core.Var))
        order = {x: i for i, x in enumerate((*backward.invars, *makers))}
        of_leaf: dict[Any, np.ndarray] = {}
        for end in ends:
            region, waiting = {end}, [end]
            while waiting:
                for y, _, _ in after._slopes.get(waiting.pop(), ()):
                    if y not in region:
                        region.add(y)
                        waiting.append(y)
            ordered = sorted(region, key=lambda x: order.get(x, -1), reverse=True)
            size = max(_size(after._values[end]), 1e-50)
            for x, square in after.squares(end, ordered, np.ones(COUNT)).items():
                of_leaf[x] = np.maximum(of_leaf.get(x, 0.0), square / size / size)
        result: dict[core.Var, np.ndarray] = {}
        for x, leaf in pairs:
            if isinstance(leaf, core.Var) and x in of_leaf:
                result[leaf] = np.maximum(result.get(leaf, 0.0), of_leaf[x])
        nothing = {leaf: np.zeros(COUNT) for _, leaf in pairs if isinstance(leaf, core.Var)}
        return nothing | {x: np.sqrt(np.minimum(y, LARGEST)) for x, y in result.items()}

    def equal_weights(self, residuals: Sequence[core.Var]) -> dict[core.Var, np.ndarray]:
        """Returns weights, as `weights` does, where it is not known what reads the residuals."""
        sizes = {x: max(_size(self._values[x]), 1e-100) for x in residuals}
        return {x: np.full(COUNT, 1 / size) for x, size in sizes.items()}

    def may_be_nan(self, var: core.Var) -> bool:
        """Returns whether a variable follows from one that the program compares with itself.

        That is a test for NaN, which is expected there: the infinite logarithms of `logaddexp`.
        """
        return var in self._tested

    def limit(self, var: Any) -> float | None:
        """Returns a bound of the ordinary numbers of a variable; None if it has no extreme ones.

        Extreme numbers are the -1e9 or infinity that a program writes where a mask is off.
        """
        return None if _is_ordinary(self._values[var]).all() else _least_extreme(var.aval.dtype)

    def errors(
        self, region: Sequence[core.Var], weight: np.ndarray, reciprocal: Collection[core.Var]
    ) -> dict[core.Var, float]:
        """Returns the error of what reads a residual, for each variable that it may follow from.

        That is a root mean square, relative, if a code of this variable alone is stored whose error
        is the range of its group. (With b bits it is smaller by `√12 (2^b - 1)`.)

        Args:
          region: the residual, and the variables that it is computed from cheaply, in reverse order
            of the program.
          weight: how much its errors count, from `weights`.
          reciprocal: variables of whose reciprocals a code is stored.
        """
        result = {}
        with np.errstate(all="ignore"):
            squares = [self.squares(region[0], region, weight)]
            small = self._weight_of_small_numbers(region[0])
            if small is not None:
                squares.append(self.squares(region[0], region, small))
            for x in region:
                error = self._error(x, x in reciprocal) ** 2
                total = max(float(np.mean(s[x] * error)) for s in squares)
                result[x] = total**0.5 if np.isfinite(total) else np.inf
        return result

    def _weight_of_small_numbers(self, var: core.Var) -> np.ndarray | None:
        """Returns weights for relative errors of a softmax; None for other variables.

        Small probabilities that are all rounded to zero have errors of one sign, which add up in
        the gradient, although each is small beside the largest probabilities.
        """
        x = self._values[var]
        if var not in self._summed or not has_floats(var) or (x < 0).any():
            return None
        least = _range(x) / _ALL_WRONG
        return np.where(x > 0, 1 / (_OF_SMALL * np.maximum(x, max(least, 1e-100))), 0.0)

    def squares(
        self, var: core.Var, region: Sequence[core.Var], weight: np.ndarray
    ) -> dict[core.Var, np.ndarray]:
        """Returns the squared derivative of `weight * var` in each variable of its region."""
        inside = set(region)
        # Derivatives in the element of the other array at the same place, with their signs, and the
        # squares of those in other places, which a sum brings together.
        along = {x: np.zeros(COUNT) for x in region}
        across = {x: np.zeros(COUNT) for x in region}
        along[var] = weight
        with np.errstate(all="ignore"):
            for x in region:
                for y, slope, count in self._slopes.get(x, ()):
                    if y not in inside:
                        continue
                    if count:
                        square = along_rows(np.mean, along[x] ** 2 + across[x])
                        across[y] = across[y] + slope**2 * count * square
                    else:
                        along[y] = along[y] + slope * along[x]
                        across[y] = across[y] + slope**2 * across[x]
            return {x: along[x] ** 2 + across[x] for x in region}

    def _error(self, var: Any, is_reciprocal: bool) -> np.ndarray:
        """Returns the range that the error of a code is proportional to, for each sample."""
        x = self._values[var]
        if not has_floats(var):  # Stored exactly.
            return np.zeros(COUNT)
        if is_reciprocal:
            x = nonzero(x)
            return _range(1 / x) * x**2
        return np.full(COUNT, _range(x))

    def _fresh(self, var: Any, *origin: Any) -> np.ndarray:
        """Returns samples of a result, in an order that other results do not change."""
        dtype, order = getattr(var.aval, "dtype", None), self._order(var, *origin)
        if dtype is not None and jnp.issubdtype(dtype, jnp.bool_):
            return (order % 2).astype(float)
        if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
            return (order % 16).astype(float)
        return self._spread * _QUANTILES[order]

    def _order(self, var: Any, *origin: Any) -> np.ndarray:
        key = (*origin, getattr(var.aval, "shape", ()))
        self._drawn[key] += 1
        return _ORDERS[zlib.crc32(f"{key} {self._drawn[key]}".encode()) % len(_ORDERS)]

    def _value(self, x: Any) -> np.ndarray:
        if isinstance(x, core.Literal):
            value = np.ravel(np.asarray(x.val))[0] if np.size(x.val) else 0.0
            if not has_floats(x):
                return np.full(COUNT, float(np.real(value)) if np.isrealobj(value) else 0.0)
            number = float(value)
            if abs(number) >= _least_extreme(np.asarray(x.val).dtype):
                number = math.copysign(_INFINITY, number)
            return np.full(COUNT, number)
        return self._values[x]

    def _run(self, eqn: core.JaxprEqn) -> None:
        """Computes samples of the results of an equation, and their slopes in its operands."""
        if not self._is_cheap(eqn):
            for i, out in enumerate(eqn.outvars):
                self._values[out] = self._of_expensive(eqn, out, i)
            return
        inputs = [self._value(x) for x in eqn.invars]
        for out in eqn.outvars:
            draw = functools.partial(self._fresh, out, eqn.primitive.name)
            value, slopes = value_and_slopes(eqn, out, inputs, draw)
            self._values[out] = bounded(value)
            self._slopes[out] = [
                (x, slope, count)
                for x, (slope, count) in zip(eqn.invars, slopes, strict=False)
                if isinstance(x, core.Var)
            ]

    def _of_expensive(self, eqn: core.JaxprEqn, out: Any, place: int) -> np.ndarray:
        name = eqn.primitive.name
        fresh = self._fresh(out, name, place)
        floats = [self._value(x) for x in eqn.invars if has_floats(x)]
        if not has_floats(out) or not floats:
            return fresh
        order = self._order(out, name, place)
        if name in _PASSED:
            return floats[0][order]
        if name.startswith("cum") and name != "cummax":
            operand: Any = eqn.invars[0].aval
            length = operand.shape[eqn.params["axis"]]
            return floats[0].mean() * length * (order / COUNT) + fresh * length**0.5
        if name.startswith("scatter") and len(floats) > 1 and not _is_ordinary(floats[0]).all():
            return np.where(order % 2, floats[0], floats[-1])
        is_sum = name.startswith(("dot", "scatter", "reduce_window", "conv", "ragged"))
        if is_sum and all((x >= 0).all() for x in floats):
            return sum(x.mean() for x in floats) * np.exp(fresh / self._spread)
        return fresh
