"""Floating point operations of matrix products, counted in a traced program."""

import math
from typing import Any

import jax


def matmul_flops(fun: Any, *args: Any) -> int:
    """Returns the operations (two a multiply-add) of every product in `fun(*args)`.

    Bodies of `scan` count as often as they run; `compiled.cost_analysis()` counts them once. A
    `while_loop` whose length is data (attention's blocks) counts once. What XLA runs inside a
    custom call, such as cuDNN's attention, is not seen.
    """
    return _count(jax.make_jaxpr(fun)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(_count(body) for body in _bodies(eqn.params))
    return total


def _bodies(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    bodies = [getattr(v, "jaxpr", v) for v in values]
    return [body for body in bodies if hasattr(body, "eqns")]
