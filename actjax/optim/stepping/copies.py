"""Small results of a layer that one kernel writes into their stacks."""

from collections.abc import Container, Sequence
from typing import Any

from jax.extend import core

from actjax.kernels import primitive
from actjax.kernels.copies.api import KERNEL
from actjax.kernels.tail import DTYPES

_LARGEST = 2**20
"""Most bytes of an array: XLA writes a larger one into its stack where it computes it."""


def with_copies(
    jaxpr: core.Jaxpr, placed: Sequence[int], in_place: Container[core.Var]
) -> core.Jaxpr:
    """Returns a program that copies small results, if there are several.

    Args:
      jaxpr: a program without calls.
      placed: numbers of the results that are written into stacks.
      in_place: variables that kernels write there.
    """
    made = {x for eqn in jaxpr.eqns for x in eqn.outvars}
    results = [x for i in placed if isinstance(x := jaxpr.outvars[i], core.Var) and x in made]
    small = [x for x in dict.fromkeys(results) if x not in in_place and _is_small(x)]
    if len(small) < 2:
        return jaxpr
    copied = {x: core.Var(x.aval) for x in small}
    chosen = KERNEL.chosen(None, (), {})
    call = primitive.equation(KERNEL, chosen, (small,), [*copied.values()], jaxpr.eqns[-1])
    outvars = [*jaxpr.outvars]
    for i in placed:
        x = outvars[i]
        outvars[i] = copied.get(x, x) if isinstance(x, core.Var) else x
    return jaxpr.replace(eqns=[*jaxpr.eqns, call], outvars=outvars)


def _is_small(x: Any) -> bool:
    dtype = x.aval.dtype
    return str(dtype) in DTYPES - {"bool"} and 0 < x.aval.size * dtype.itemsize <= _LARGEST
