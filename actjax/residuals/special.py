"""Runs single equations that have no derivative, or a custom one."""

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax.extend import core

from actjax.residuals.graph.equations import (
    CUSTOM_VJP,
    closed_over,
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
) -> list[Any] | None:
    """Runs an equation without a derivative or with a custom one; returns None for the rest.

    Args:
      eqn: the equation.
      x: its inputs.
      numbers: gives each custom rule of others a number.
      again: numbers of those that are run again in the backward pass.
    """
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
