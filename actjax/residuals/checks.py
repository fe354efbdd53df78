"""Argument checks that the transforms share."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def check_function(fun: Any, caller: str) -> None:
    """Raises a `TypeError` unless `fun` is a function."""
    if not callable(fun):
        raise TypeError(f"`fun` of {caller} must be a function, got {fun!r}.")


def positions_of(argnums: int | Sequence[int], caller: str) -> frozenset[int]:
    """Returns positions of arguments as a set, or raises a `TypeError`."""
    numbers = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    if not all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in numbers):
        raise TypeError(
            f"`activations` of {caller} must be positions of arguments, 0 or above: {argnums!r}."
        )
    return frozenset(int(i) for i in numbers)


def check_positions(positions: frozenset[int], args: Sequence[Any], caller: str) -> None:
    """Raises a `ValueError` unless the function was called with an argument at every position."""
    if max(positions, default=-1) >= len(args):
        raise ValueError(
            f"`activations` of {caller} has position {max(positions)}, but the function was called"
            f" with {len(args)} positional arguments."
        )
