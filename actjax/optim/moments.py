"""Which arrays of an optax state are moments, and what a new basis does to them."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from actjax._math.precision import matmul
from actjax.kernels.blockwise import is_blockwise
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
    changed: dict[str, tuple[Projection, jax.Array, jax.Array]],
) -> Any:
    """Returns a state with the moments of projected weights moved to their new bases.

    Args:
      policy: "keep", "reset" or "rotate", as in `actjax.optim.subspace`.
      state: state of the inner transform.
      params: the parameters, or their shapes.
      changed: from the path of a projected weight to its projection, old and new basis.
    """
    if policy == "keep":
        return state

    def move(fields: list[str], weight: str | None, leaf: Any) -> Any:
        if weight not in changed:
            return leaf
        moment = leaf.decode() if is_blockwise(leaf) else leaf
        if policy == "reset":
            moved = jnp.zeros_like(moment)
        else:
            is_second = any(field in SECOND_MOMENTS for field in fields)
            moved = _rotated(moment, *changed[weight], squared=is_second)
        return leaf.encode(moved) if is_blockwise(leaf) else moved

    return map_state(move, state, params, is_leaf=is_blockwise)


def _rotated(
    moment: jax.Array, projection: Projection, old: jax.Array, new: jax.Array, *, squared: bool
) -> jax.Array:
    """Returns `R m` with `R = newᵀ old`, or with the squared entries of `R`."""
    rotation = matmul(new.mT, old)
    if squared:
        rotation = jnp.square(rotation)
    if projection.on_input:
        return matmul(rotation, moment).astype(moment.dtype)
    return matmul(moment, rotation.mT).astype(moment.dtype)
