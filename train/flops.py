"""Floating point operations of matrix products, counted in a traced program."""

import math
from typing import Any

import jax

ATTENTION_BLOCK = 256
"""Queries, and keys, of a block in the blockwise form of `actjax.attention`."""


def matmul_flops(fun: Any, *args: Any, loop_length: float = 1) -> int:
    """Returns the operations of all matrix products in `fun(*args)`; two per multiply-add.

    Counts the body of a `scan` as often as it runs; `compiled.cost_analysis()` counts it once.
    Does not count factorizations, nor products in custom calls such as cuDNN's attention.

    Args:
      fun: a function that JAX can trace.
      *args: its arguments, or their shapes.
      loop_length: mean number of iterations of a `while_loop`, whose length is data. For causal
        attention over blocks of keys, see `causal_loop_length`.
    """
    return round(_count(jax.make_jaxpr(fun)(*args).jaxpr, loop_length))


def causal_loop_length(seq_len: int) -> float:
    """Returns the mean number of key blocks that a query block attends to in causal attention."""
    return (1 + -(-seq_len // ATTENTION_BLOCK)) / 2


def _count(jaxpr: Any, loop_length: float) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        # Branches by platform compute the same: only the default is counted.
        by_platform = eqn.params.get("branches_platforms") is not None
        bodies = _bodies(eqn.params)[-1:] if by_platform else _bodies(eqn.params)
        times = {"scan": eqn.params.get("length"), "while": loop_length}.get(eqn.primitive.name, 1)
        total += times * sum(_count(body, loop_length) for body in bodies)
    return total


def _bodies(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    bodies = [getattr(v, "jaxpr", v) for v in values]
    return [body for body in bodies if hasattr(body, "eqns")]
