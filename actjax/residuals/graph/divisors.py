"""Divisions, whose derivatives make an error of a small divisor a large one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from actjax.residuals.graph.equations import called, run_equation
from actjax.residuals.graph.products import PRODUCTS
from actjax.residuals.graph.variables import VIEWS, has_floats, size

_READERS = frozenset({"integer_pow", "mul", "square", *PRODUCTS})
"""Operations whose derivative reads their operand."""
_KEEP_ZEROS = frozenset({
    "abs", "convert_element_type", "gather", "integer_pow", "mul", "neg", "sqrt", "square", *VIEWS,
})  # fmt: skip
"""Operations whose result is zero where an operand is."""
_MAKE_ZEROS = frozenset({"clamp", "max", "min", "select_n"})
"""Operations whose result may be zero over a range of an operand."""


def quotients_read(jaxpr: core.Jaxpr) -> set[Any]:
    """Returns the results of divisions by large arrays that other operations read backwards.

    A divisor that belongs to whole rows, such as the sum of a softmax, is stored exactly, and the
    dividend is mostly needed anyway.
    """
    found: set[Any] = set()
    wanted: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        body = called(eqn)
        if body is not None:
            found |= quotients_read(body.jaxpr)
        elif eqn.primitive.name in _READERS and not _has_literal(eqn):
            wanted.update(eqn.invars)
        elif eqn.primitive.name in VIEWS and eqn.outvars[0] in wanted:
            wanted.update(x for x in eqn.invars[:1] if isinstance(x, core.Var))
        elif eqn.primitive.name == "div" and eqn.outvars[0] in wanted:
            divisor = eqn.invars[1]
            if has_floats(divisor) and size(divisor) == size(eqn.outvars[0]):
                found.add(eqn.outvars[0])
    return found


def run_decoded(eqn: core.JaxprEqn, inputs: list[Any], decoded: dict[core.Var, bool]) -> list[Any]:
    """Returns the outputs of an equation that may read decoded numbers, but divides by no zero.

    A small number may be decoded as zero. That it was none, a mask may say that is stored exactly.

    Args:
      eqn: the equation.
      inputs: its inputs.
      decoded: variables that follow from decoded numbers; True where they may be zero instead of
        small. Outputs are added.
    """
    name, divisor = eqn.primitive.name, _divisor_of(eqn)
    operands = [x for x in eqn.invars if isinstance(x, core.Var) and x in decoded]
    if operands and len(eqn.outvars) == 1 and has_floats(eqn.outvars[0]):
        keeps = name in _KEEP_ZEROS and any(decoded[x] for x in operands)
        makes = name in _MAKE_ZEROS and not _is_above_zero(eqn)
        decoded[eqn.outvars[0]] = keeps or makes
    if any(x is divisor and decoded[x] for x in operands):
        pairs = zip(eqn.invars, inputs, strict=True)
        inputs = [without_zeros(y) if x is divisor else y for x, y in pairs]
    return run_equation(eqn, inputs)


def _divisor_of(eqn: core.JaxprEqn) -> Any:
    """Returns the operand of an equation that must not be zero; None if all may be."""
    name = eqn.primitive.name
    if name == "div":
        return eqn.invars[1]
    is_inverse = name == "integer_pow" and eqn.params["y"] < 0
    return eqn.invars[0] if is_inverse or name in ("log", "rsqrt") else None


def without_zeros(x: jax.Array) -> jax.Array:
    """Returns numbers with half of the smallest of their row in the place of a zero."""
    if not jnp.ndim(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    sizes = jnp.where(x == 0, jnp.inf, jnp.abs(x))
    smallest = jnp.min(sizes, axis=-1, keepdims=True, initial=jnp.inf)
    smallest = jnp.where(jnp.isfinite(smallest), smallest / 2, 1).astype(x.dtype)
    return jnp.where(x == 0, smallest, x)


def _is_above_zero(eqn: core.JaxprEqn) -> bool:
    """Returns whether the largest of several numbers is at least a positive constant."""
    bounds = {"max": eqn.invars, "clamp": eqn.invars[:1]}.get(eqn.primitive.name, ())
    return any(isinstance(x, core.Literal) and np.ndim(x.val) == 0 and x.val > 0 for x in bounds)


def _has_literal(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operand is a constant: the derivative of a multiple reads no operand."""
    return any(isinstance(x, core.Literal) for x in eqn.invars)
