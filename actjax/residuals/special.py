"""Runs equations that have no derivative, a custom one, or one that reads other values."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from actjax.residuals.graph.equations import (
    CUSTOM_VJP,
    closed_over,
    context_of,
    is_foreign_rule,
    run_equation,
    run_marked,
)
from actjax.residuals.graph.one_way import ONE_WAY


def run_special(
    eqn: core.JaxprEqn,
    x: list[Any],
    numbers: Iterator[int] = itertools.repeat(0),
    again: Collection[int] = (),
    quotients: Collection[Any] = (),
) -> list[Any] | None:
    """Runs an equation without a derivative or with a custom one, or a division; else returns None.

    Args:
      eqn: the equation.
      x: its inputs.
      numbers: gives each custom rule of others a number.
      again: numbers of those that are run again in the backward pass.
      quotients: results of divisions whose derivatives are to read them.
    """
    if eqn.outvars and eqn.outvars[0] in quotients:
        return [_division(eqn)(*x)]
    if eqn.primitive.name in ONE_WAY:
        return run_equation(eqn, [jax.lax.stop_gradient(y) for y in x])
    if eqn.primitive.name in CUSTOM_VJP:
        count = closed_over(eqn)
        x = [*map(jax.lax.stop_gradient, x[:count]), *x[count:]]
    if not is_foreign_rule(eqn):
        return run_equation(eqn, x) if eqn.primitive.name in CUSTOM_VJP else None
    number = next(numbers)
    # A `shard_map` may hold a whole model: its residuals are stored exactly instead.
    if number in again and eqn.primitive.name != "shard_map" and not eqn.effects:
        return jax.checkpoint(lambda *x: run_marked(eqn, x, number))(*x)
    return run_marked(eqn, x, number)


def _division(eqn: core.JaxprEqn) -> Callable[[Any, Any], Any]:
    """Returns a division with a derivative that reads the quotient.

    That of JAX reads the dividend, and divides it by the square of the divisor: where the divisor
    is small, an error of a code of the dividend would be large. The quotient fits the values that
    the forward pass used, and another operation reads it anyway.
    """

    @jax.custom_jvp
    def divide(x: Any, y: Any) -> Any:
        return run_equation(eqn, [x, y])[0]

    @functools.partial(divide.defjvp, symbolic_zeros=True)
    def slope(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        (x, y), (dx, dy) = primals, tangents
        quotient = divide(x, y)
        with context_of(eqn):
            changes = [] if isinstance(dx, SymbolicZero) else [dx]
            changes += [] if isinstance(dy, SymbolicZero) else [-quotient * dy]
            return quotient, sum(changes[1:], changes[0]) / y

    return divide
