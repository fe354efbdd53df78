"""Equations and products of traced programs."""

from typing import Any

import jax
from jax.extend import core


def equations(jaxpr: Any) -> list[core.JaxprEqn]:
    """Returns all equations of a program; bodies of loops count once."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append(eqn)
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += equations(value)
    return found


def products(fun, *args) -> list[tuple[int, ...]]:
    """Returns the shapes of all matrix products in a function; bodies of loops count once."""
    found = equations(jax.make_jaxpr(fun)(*args))
    return [e.outvars[0].aval.shape for e in found if e.primitive.name == "dot_general"]


def nbytes(tree: Any) -> int:
    """Returns the bytes of all arrays in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
