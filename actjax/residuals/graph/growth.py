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
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy import special

from actjax.residuals.graph.variables import has_floats

SPREADS = (4.0, 8.0)
"""Standard deviations assumed for results of operations that are not cheap."""
_ROWS, _COLUMNS = 16, 32
_COUNT = _ROWS * _COLUMNS
"""Samples of each variable: a few rows, along which sums and maxima run."""
_STEP = 1e-6
"""Step of the central differences that give slopes, relative to a value."""
_LARGEST = 1e100
"""Bound of a sample."""
_EXTREME = 1e6
"""Larger constants belong to a mask (-1e9) and do not count in the range of a group."""
_OF_SMALL = 16.0
"""Factor by which relative errors of small numbers may be larger than those of large ones."""
_ALL_WRONG = 12**0.5 * 255
"""Error of what a code of 8 bits rounds to zero."""
_INFINITY = 1e50
"""Stands for such constants among the samples."""

_QUANTILES = special.ndtri((np.arange(_COUNT) + 0.5) / _COUNT)
_ORDERS = np.array([np.random.default_rng(i).permutation(_COUNT) for i in range(64)])
"""Variables that are computed apart get samples in different orders."""


def _positive(x: np.ndarray) -> np.ndarray:
    """Returns numbers that a logarithm or a root can have: a program gives them no other."""
    return np.abs(x) + 1e-12


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs, "acosh": lambda x: np.arccosh(1 + _positive(x)), "asinh": np.arcsinh,
    "acos": lambda x: np.arccos(np.tanh(x)), "asin": lambda x: np.arcsin(np.tanh(x)),
    "atan": np.arctan, "atanh": lambda x: np.arctanh(0.999 * np.tanh(x)), "cbrt": np.cbrt,
    "cos": np.cos, "cosh": np.cosh, "erf": special.erf, "erfc": special.erfc,
    "erf_inv": lambda x: special.erfinv(0.999 * np.tanh(x)), "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "log": lambda x: np.log(_positive(x)),
    "log1p": lambda x: np.log(_positive(1 + x)), "logistic": special.expit,
    "neg": np.negative, "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lambda x: _positive(x) ** -0.5, "sin": np.sin, "sinh": np.sinh,
    "sqrt": lambda x: _positive(x) ** 0.5, "square": np.square, "tan": np.tan, "tanh": np.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "add_any": np.add, "atan2": np.arctan2, "div": lambda x, y: x / _nonzero(y),
    "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "pow": lambda x, y: _positive(x) ** y, "rem": lambda x, y: np.fmod(x, _nonzero(y)),
    "sub": np.subtract,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "and": np.logical_and, "ceil": np.ceil, "eq": np.equal, "floor": np.floor,
    "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal,
    "lt": np.less, "ne": np.not_equal, "not": np.logical_not, "or": np.logical_or,
    "round": np.round, "sign": np.sign, "xor": np.not_equal,
}  # fmt: skip
"""Operations without a slope."""
_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "reduce_sum": np.mean, "reduce_max": np.max, "reduce_min": np.min,
}  # fmt: skip
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


def _along_rows(fun: Callable[..., np.ndarray], x: np.ndarray) -> np.ndarray:
    """Returns a statistic of each row in the place of its numbers."""
    return np.repeat(fun(x.reshape(_ROWS, _COLUMNS), axis=1), _COLUMNS)


def _bounded(x: np.ndarray) -> np.ndarray:
    """Returns finite numbers."""
    x = np.nan_to_num(x, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    return np.clip(x, -_LARGEST, _LARGEST)


def _nonzero(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 1e-12, 1e-12, x)


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
            for x, square in after.squares(end, ordered, np.ones(_COUNT)).items():
                of_leaf[x] = np.maximum(of_leaf.get(x, 0.0), square / size / size)
        result: dict[core.Var, np.ndarray] = {}
        for x, leaf in pairs:
            if isinstance(leaf, core.Var) and x in of_leaf:
                result[leaf] = np.maximum(result.get(leaf, 0.0), of_leaf[x])
        nothing = {leaf: np.zeros(_COUNT) for _, leaf in pairs if isinstance(leaf, core.Var)}
        return nothing | {x: np.sqrt(np.minimum(y, _LARGEST)) for x, y in result.items()}

    def equal_weights(self, residuals: Sequence[core.Var]) -> dict[core.Var, np.ndarray]:
        """Returns weights, as `weights` does, where it is not known what reads the residuals."""
        sizes = {x: max(_size(self._values[x]), 1e-100) for x in residuals}
        return {x: np.full(_COUNT, 1 / size) for x, size in sizes.items()}

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
        along = {x: np.zeros(_COUNT) for x in region}
        across = {x: np.zeros(_COUNT) for x in region}
        along[var] = weight
        with np.errstate(all="ignore"):
            for x in region:
                for y, slope, count in self._slopes.get(x, ()):
                    if y not in inside:
                        continue
                    if count:
                        square = _along_rows(np.mean, along[x] ** 2 + across[x])
                        across[y] = across[y] + slope**2 * count * square
                    else:
                        along[y] = along[y] + slope * along[x]
                        across[y] = across[y] + slope**2 * across[x]
            return {x: along[x] ** 2 + across[x] for x in region}

    def _error(self, var: Any, is_reciprocal: bool) -> np.ndarray:
        """Returns the range that the error of a code is proportional to, for each sample."""
        x = self._values[var]
        if not has_floats(var):  # Stored exactly.
            return np.zeros(_COUNT)
        if is_reciprocal:
            x = _nonzero(x)
            return _range(1 / x) * x**2
        return np.full(_COUNT, _range(x))

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
                return np.full(_COUNT, float(np.real(value)) if np.isrealobj(value) else 0.0)
            number = float(value)
            if abs(number) >= _least_extreme(np.asarray(x.val).dtype):
                number = math.copysign(_INFINITY, number)
            return np.full(_COUNT, number)
        return self._values[x]

    def _run(self, eqn: core.JaxprEqn) -> None:
        """Computes samples of the results of an equation, and their slopes in its operands."""
        if not self._is_cheap(eqn):
            for i, out in enumerate(eqn.outvars):
                self._values[out] = self._of_expensive(eqn, out, i)
            return
        inputs = [self._value(x) for x in eqn.invars]
        for out in eqn.outvars:
            value, slopes = self._of_cheap(eqn, out, inputs)
            self._values[out] = _bounded(value)
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
            return floats[0].mean() * length * (order / _COUNT) + fresh * length**0.5
        if name.startswith("scatter") and len(floats) > 1 and not _is_ordinary(floats[0]).all():
            return np.where(order % 2, floats[0], floats[-1])
        is_sum = name.startswith(("dot", "scatter", "reduce_window", "conv", "ragged"))
        if is_sum and all((x >= 0).all() for x in floats):
            return sum(x.mean() for x in floats) * np.exp(fresh / self._spread)
        return fresh

    def _of_cheap(
        self, eqn: core.JaxprEqn, out: Any, x: list[np.ndarray]
    ) -> tuple[np.ndarray, list[tuple[Any, float]]]:
        """Returns samples of a result, and for each operand its slope.

        A slope comes with the number of elements that are brought together; 0 if an element of the
        result depends on one of the operand.
        """
        name, params = eqn.primitive.name, eqn.params
        flat: tuple[Any, float] = (0.0, 0)
        steep: tuple[Any, float] = (1.0, 0)
        if name in _REDUCTIONS:
            operand: Any = eqn.invars[0].aval
            count = max(1, operand.size // max(1, out.aval.size))
            if count == 1:
                return x[0], [steep]
            value = _along_rows(_REDUCTIONS[name], x[0])
            if name == "reduce_sum":
                value = value * count
            return value, [(1.0, count if name == "reduce_sum" else 1)]
        if name in _UNARY:
            return _with_slopes(_UNARY[name], x)
        if name in _BINARY:
            return _with_slopes(_BINARY[name], x)
        is_mask = jnp.issubdtype(getattr(out.aval, "dtype", bool), jnp.integer)
        if name == "bitcast_convert_type" or (name in ("and", "or") and is_mask):
            # Some functions drop the last bits of a number.
            return x[0], [steep if i == 0 else flat for i in range(len(x))]
        if name in _COMPARISONS:
            return _COMPARISONS[name](*x).astype(float), [flat] * len(x)
        if name == "integer_pow":
            exponent = params["y"]
            base = _nonzero(x[0]) if exponent < 0 else x[0]
            return _with_slopes(lambda z: z ** float(exponent), [base])
        if name == "select_n":
            cases = np.stack(x[1:])
            which = np.clip(x[0].astype(int), 0, len(cases) - 1)
            value = cases[which, np.arange(_COUNT)]
            return value, [flat, *(((which == i).astype(float), 0) for i in range(len(cases)))]
        if name == "clamp":
            value = np.clip(x[1], x[0], x[2])
            return value, [flat, ((value == x[1]).astype(float), 0), flat]
        if name in ("concatenate", "stack"):
            part = np.arange(_COUNT) * len(x) // _COUNT
            value = np.stack(x)[part, np.arange(_COUNT)]
            # An operand is only a part of the result, but an error in this part counts as a whole.
            return value, [steep] * len(x)
        if name == "polynomial":
            return x[0], [steep]
        if not x or not has_floats(out):
            return self._fresh(out, name), [flat] * len(x)
        # Views, casts, padding, and other operations that pass numbers on.
        first = next((i for i, v in enumerate(eqn.invars) if has_floats(v)), None)
        if first is None:
            return x[0], [flat] * len(x)
        return x[first], [steep if i == first else flat for i in range(len(x))]


def _with_slopes(
    fun: Callable[..., np.ndarray], x: list[np.ndarray]
) -> tuple[np.ndarray, list[tuple[np.ndarray, float]]]:
    """Returns a function's value, and its slope in each operand from central differences."""
    slopes = []
    for i, operand in enumerate(x):
        step = _STEP * (1 + np.abs(operand))
        above, below = ([*x[:i], operand + s, *x[i + 1 :]] for s in (step, -step))
        slope = (fun(*above) - fun(*below)) / (2 * step)
        slopes.append((_bounded(slope), 0))
    return fun(*x), slopes
