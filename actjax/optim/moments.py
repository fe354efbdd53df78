"""Which arrays of an optax state are moments, and what a new basis does to them."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from actjax._math.precision import matmul
from actjax.optim.codes import is_code
from actjax.optim.paths import map_state
from actjax.optim.projections import Projection

FIRST_MOMENTS = ("mu", "trace", "m1", "m2")
"""Fields of optax states that hold means of gradients."""
SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "e_g", "e_x")
"""Fields of optax states that hold means of squares, which are never negative."""

Moments = Literal["keep", "reset", "rotate"]


def move_moments(
    policy: Moments,
    state: Any,
    params: Any,
    projections: Mapping[str, Projection],
    old: Mapping[str, jax.Array],
    new: Mapping[str, jax.Array],
) -> Any:
    """Returns a state with the moments of projected weights moved to their new bases.

    Args:
      policy: "keep", "reset" or "rotate", as in `actjax.optim.subspace`.
      state: state of the inner transform.
      params: the parameters, or their shapes.
      projections: from the path of a projected weight to its projection.
      old: bases by name.
      new: the bases that replace them.

    Raises:
      ValueError: moments that "rotate" cannot move, because they are factored.
    """
    if policy == "keep":
        return state
    rotations = {name: matmul(new[name].mT, basis) for name, basis in old.items()}

    def move(fields: list[str], weight: str | None, leaf: Any) -> Any:
        if weight is None or weight not in projections:
            return leaf
        is_coded = is_code(leaf)
        moment = leaf.decode() if is_coded else leaf
        if policy == "reset":
            moved = jnp.zeros_like(moment)
        else:
            is_second = any(field in SECOND_MOMENTS for field in fields)
            if not is_second and not any(field in FIRST_MOMENTS for field in fields):
                raise ValueError(
                    f"`moments='rotate'` cannot rotate `{'.'.join(fields)}` of `{weight}`, which is"
                    ' neither a mean of gradients nor of their squares: use "keep" or "reset".'
                )
            moved = _rotated(moment, projections[weight], rotations, squared=is_second)
        return leaf.encode(moved) if is_coded else moved

    return map_state(move, state, params, is_leaf=is_code)


def _rotated(
    moment: jax.Array,
    projection: Projection,
    rotations: Mapping[str, jax.Array],
    *,
    squared: bool,
) -> jax.Array:
    """Returns `R m` with `R = newᵀ old`, or with the squared entries of `R`, on each side."""

    def matrix(name: str) -> jax.Array:
        return jnp.square(rotations[name]) if squared else rotations[name]

    moved = moment
    if projection.input_basis is not None:
        moved = matmul(matrix(projection.input_basis), moved)
    if projection.output_basis is not None:
        moved = matmul(moved, matrix(projection.output_basis).mT)
    return moved.astype(moment.dtype)
