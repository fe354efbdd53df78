"""Checks of the arguments of optimizers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from actjax._core.paths import named_leaves


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
      ValueError: it is `stochastic_rounding`.
    """
    check_transform(name, tx)
    if not isinstance(tx, OutermostTransformation):
        return
    if wrapper == "stochastic_rounding":
        raise ValueError(f"`{name}` of {wrapper} rounds weights already: drop one of both.")
    raise ValueError(
        f"`{name}` of {wrapper} rounds weights, which only the outermost transform can do:"
        f" instead of {wrapper}(stochastic_rounding(...)) write"
        f" stochastic_rounding({wrapper}(...))."
    )


def check_keeps_sign(owner: str, inner: optax.GradientTransformation) -> None:
    """Raises a `ValueError` if a transform turns a gradient around, as a learning rate does.

    Only sizes of its updates are read: their sign would be lost, and training would go uphill. A
    transform that cannot run on one matrix, or whose settings are not known, is not tried.
    """
    try:
        with jax.ensure_compile_time_eval():
            ones = {"w": jnp.ones((8, 8), jnp.float32)}
            tx = optax.with_extra_args_support(inner)
            updates, _ = tx.update(ones, tx.init(ones), ones)
            is_turned = bool(jnp.sum(jax.tree.leaves(updates)[0]) < 0)
    except Exception:  # A transform that wants other parameters may raise anything.
        return
    if is_turned:
        raise ValueError(
            f"`inner` of {owner} has a learning rate: it turns gradients around, and {owner} reads"
            " the sizes of its updates only, so that their sign would be lost. Pass one without a"
            " learning rate, such as optax.scale_by_adam(), and put optax.scale_by_learning_rate"
            " after it, in optax.chain or in the `outer` of a subspace."
        )


def check_parameters(owner: str, params: Any) -> None:
    """Raises a `TypeError` unless all parameters are arrays of floating-point numbers."""
    for name, x in named_leaves(params).items():
        if not hasattr(x, "dtype"):
            raise TypeError(
                f"{owner} takes arrays, but the parameter `{name}` is {x!r}: convert it with"
                " jnp.asarray."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{owner} takes floating-point numbers, but the parameter `{name}` is of"
                f" {x.dtype}: leave it out with optax.masked or optax.multi_transform."
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
