"""Values and slopes of single operations, on samples of their operands, in float64 NumPy."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy import special

from actjax.residuals.graph.variables import has_floats

ROWS, COLUMNS = 16, 32
COUNT = ROWS * COLUMNS
"""Samples of each variable: a few rows, along which sums and maxima run."""
LARGEST = 1e100
"""Bound of a sample."""
_STEP = 1e-6
"""Step of the central differences that give slopes, relative to a value."""


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
    "add": np.add, "add_any": np.add, "atan2": np.arctan2, "div": lambda x, y: x / nonzero(y),
    "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "pow": lambda x, y: _positive(x) ** y, "rem": lambda x, y: np.fmod(x, nonzero(y)),
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


def value_and_slopes(
    eqn: core.JaxprEqn, out: Any, x: list[np.ndarray], fresh: Callable[[], np.ndarray]
) -> tuple[np.ndarray, list[tuple[Any, float]]]:
    """Returns samples of a result, and for each operand its slope.

    A slope comes with the number of elements that are brought together; 0 if an element of the
    result depends on one of the operand.

    Args:
      eqn: the equation.
      out: the result.
      x: samples of its operands.
      fresh: draws samples of a result that has no numbers of operands.
    """
    name, params = eqn.primitive.name, eqn.params
    flat: tuple[Any, float] = (0.0, 0)
    steep: tuple[Any, float] = (1.0, 0)
    if name in _REDUCTIONS:
        operand: Any = eqn.invars[0].aval
        count = max(1, operand.size // max(1, out.aval.size))
        if count == 1:
            return x[0], [steep]
        value = along_rows(_REDUCTIONS[name], x[0])
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
        base = nonzero(x[0]) if exponent < 0 else x[0]
        return _with_slopes(lambda z: z ** float(exponent), [base])
    if name == "select_n":
        cases = np.stack(x[1:])
        which = np.clip(x[0].astype(int), 0, len(cases) - 1)
        value = cases[which, np.arange(COUNT)]
        return value, [flat, *(((which == i).astype(float), 0) for i in range(len(cases)))]
    if name == "clamp":
        value = np.clip(x[1], x[0], x[2])
        return value, [flat, ((value == x[1]).astype(float), 0), flat]
    if name in ("concatenate", "stack"):
        part = np.arange(COUNT) * len(x) // COUNT
        value = np.stack(x)[part, np.arange(COUNT)]
        # An operand is only a part of the result, but an error in this part counts as a whole.
        return value, [steep] * len(x)
    if name == "polynomial":
        return x[0], [steep]
    if not x or not has_floats(out):
        return fresh(), [flat] * len(x)
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
        slopes.append((bounded(slope), 0))
    return fun(*x), slopes


def along_rows(fun: Callable[..., np.ndarray], x: np.ndarray) -> np.ndarray:
    """Returns a statistic of each row in the place of its numbers."""
    return np.repeat(fun(x.reshape(ROWS, COLUMNS), axis=1), COLUMNS)


def bounded(x: np.ndarray) -> np.ndarray:
    """Returns finite numbers."""
    x = np.nan_to_num(x, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    return np.clip(x, -LARGEST, LARGEST)


def nonzero(x: np.ndarray) -> np.ndarray:
    """Returns numbers that one can divide by."""
    return np.where(np.abs(x) < 1e-12, 1e-12, x)
