"""Checks of the arguments of optimizers."""

from typing import Any

import jax
import optax
from jax.core import Tracer


class OutermostTransformation(optax.GradientTransformationExtraArgs):
    """A transform that no other may go around, because its updates must be added unchanged."""


def check_transform(name: str, tx: Any) -> None:
    """Raises a `TypeError` unless `tx` is an optax transform."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = " Call it: it returns a transform." if callable(tx) else ""
        raise TypeError(
            f"`{name}` must be an optax transform, such as optax.adam(1e-3), got {tx!r}.{hint}"
        )


def check_inner(wrapper: str, name: str, tx: Any) -> None:
    """Raises an error unless `tx` is an optax transform that `wrapper` may go around.

    Raises:
      TypeError: it is not a transform.
      ValueError: it is `stochastic_rounding` or `compensated`.
    """
    check_transform(name, tx)
    if not isinstance(tx, OutermostTransformation):
        return
    if wrapper in ("stochastic_rounding", "compensated"):
        raise ValueError(f"`{name}` of {wrapper} rounds weights already: drop one of both.")
    raise ValueError(
        f"`{name}` of {wrapper} rounds weights, which only the outermost transform can do:"
        f" instead of {wrapper}(stochastic_rounding(...)) write"
        f" stochastic_rounding({wrapper}(...)), and compensated likewise."
    )


def check_callable(name: str, fun: Any) -> None:
    """Raises a `TypeError` unless `fun` can be called."""
    if not callable(fun):
        raise TypeError(f"`{name}` must be a function, got {fun!r}.")


def raise_if(condition: jax.Array, message: str) -> None:
    """Raises a `ValueError` if a scalar is true; in a compiled program, when that runs."""
    if not isinstance(condition, Tracer):
        if condition:
            raise ValueError(message)
        return

    def raise_error(is_true: Any) -> None:
        if is_true:
            raise ValueError(message)

    # Under `vmap` both branches run, and so the callback looks at the condition itself.
    jax.lax.cond(condition, lambda: jax.debug.callback(raise_error, condition), lambda: None)
