"""Floating point operations of the products in a traced program."""

import math
from typing import Any

PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"})
"""Operations that multiply matrices."""


def product_flops(jaxpr: Any, loop_length: float = 1) -> float:
    """Returns the operations of all products and convolutions; two per multiply-add.

    Counts the body of a `scan` as often as it runs; `compiled.cost_analysis()` counts it once.
    Does not count factorizations, nor products in custom calls such as cuDNN's attention.

    Args:
      jaxpr: the program.
      loop_length: mean number of iterations of a `while_loop`, whose length is data.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            window = eqn.invars[1].aval
            features = window.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            depth = window.size / max(features, 1)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        # Branches by platform compute the same: only the default is counted.
        by_platform = eqn.params.get("branches_platforms") is not None
        bodies = _bodies(eqn.params)[-1:] if by_platform else _bodies(eqn.params)
        times = {"scan": eqn.params.get("length"), "while": loop_length}.get(name, 1)
        total += times * sum(product_flops(body, loop_length) for body in bodies)
    return total


def _bodies(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    bodies = [getattr(v, "jaxpr", v) for v in values]
    return [body for body in bodies if hasattr(body, "eqns")]
