"""Checks of the arguments of optimizers."""

from typing import Any


def check_transform(name: str, tx: Any) -> None:
    """Raises a `TypeError` unless `tx` is an optax transform."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = " Call it: it returns a transform." if callable(tx) else ""
        raise TypeError(
            f"`{name}` must be an optax transform, such as optax.adam(1e-3), got {tx!r}.{hint}"
        )


def check_callable(name: str, fun: Any) -> None:
    """Raises a `TypeError` unless `fun` can be called."""
    if not callable(fun):
        raise TypeError(f"`{name}` must be a function, got {fun!r}.")
