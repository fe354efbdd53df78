"""Floating point operations of matrix products, counted in a traced program."""

import math
from typing import Any

import jax

ATTENTION_BLOCK = 256
"""Queries, and keys, of a block of `actjax.attention` in its blockwise form."""


def matmul_flops(fun: Any, *args: Any, loop_length: float = 1) -> int:
    """Returns the operations (two a multiply-add) of every product in `fun(*args)`.

    Bodies of `scan` count as often as they run; `compiled.cost_analysis()` counts them once. What
    XLA runs inside a custom call, such as cuDNN's attention, is not seen, nor are factorisations.

    Args:
      fun: a function that JAX can trace.
      *args: its arguments, or their shapes.
      loop_length: how often a `while_loop` whose length is data runs on average, such as that of
        causal attention over the blocks of keys: see `causal_loop_length`.
    """
    return round(_count(jax.make_jaxpr(fun)(*args).jaxpr, loop_length))


def causal_loop_length(seq_len: int) -> float:
    """Returns how many blocks of keys a block of queries meets in causal attention, on average."""
    return (1 + -(-seq_len // ATTENTION_BLOCK)) / 2


def _count(jaxpr: Any, loop_length: float) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        # Of branches by platform the default is counted: other ones compute the same.
        by_platform = eqn.params.get("branches_platforms") is not None
        bodies = _bodies(eqn.params)[-1:] if by_platform else _bodies(eqn.params)
        times = {"scan": eqn.params.get("length"), "while": loop_length}.get(eqn.primitive.name, 1)
        total += times * sum(_count(body, loop_length) for body in bodies)
    return total


def _bodies(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    bodies = [getattr(v, "jaxpr", v) for v in values]
    return [body for body in bodies if hasattr(body, "eqns")]
