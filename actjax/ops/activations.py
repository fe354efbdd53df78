"""The activations of operators: arrays, and sums of an array and a low-rank part."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from actjax._math.precision import matmul
from actjax.weights.lora import LowRankSum

Activation = jax.Array | LowRankSum

Lows = tuple[tuple[jax.Array, jax.Array] | None, ...]
"""For each activation its parts `left` and `right` if it is a `LowRankSum`, else None."""


def split_sums(activations: Sequence[Activation]) -> tuple[tuple[jax.Array, ...], Lows]:
    """Returns the arrays that a codec stores, and the low-rank parts that are kept as they are."""
    bases = tuple(x.base if isinstance(x, LowRankSum) else x for x in activations)
    lows = tuple((x.left, x.right) if isinstance(x, LowRankSum) else None for x in activations)
    return bases, lows


def of_sums(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Turns a function of (activations, others) into a function of (bases, (others, lows))."""

    def run(bases: Sequence[jax.Array], others: tuple[Any, Lows]) -> Any:
        fun_others, lows = others
        activations = tuple(
            base if low is None else base + matmul(*low).astype(base.dtype)
            for base, low in zip(bases, lows, strict=True)
        )
        return fun(activations, fun_others)

    return run
