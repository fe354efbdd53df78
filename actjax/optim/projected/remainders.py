"""The part of a gradient that a subspace leaves out, as an update without moments of its size.

`actjax.optim.subspace` updates a weight with `P ψ(R)`, `R = Pᵀ G`: an update of rank k. The rest
of the gradient, `S = G - P R`, has no moments. Scaled like the part that has some (Fira), it makes
the update full-rank at no cost in states.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ScaledRemainder:
    """The remainder with the step sizes of the subspace: `S_:j ‖ψ(R_:j)‖ / ‖R_:j‖`.

    Source: Fira (Chen et al., 2024, arXiv 2410.01623), equations 11 and 12 and Algorithm 1. The
    inner transform scales each column of the projected gradient by a factor; the same column of the
    remainder gets this factor. From one step to the next, the norm of the result grows at most by
    `limit`: the remainder has no moments that would smooth a sudden large gradient. As in the paper
    the `scale` of the subspace multiplies both parts; in the authors' program it multiplies one.

    State: one float32 for each weight.

    Attributes:
      limit: largest growth of the norm, γ; inf for none.
    """

    limit: float = 1.01

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int | float) or not self.limit > 1:
            raise ValueError(
                f"`limit` of ScaledRemainder must be a number above 1, got {self.limit!r}."
            )

    def init(self, shape: Sequence[int]) -> jax.Array:
        """Returns the norm of the last update of a weight [..., d, n] before the first step: 0."""
        return jnp.zeros(tuple(shape[:-2]), jnp.float32)

    def update(
        self,
        left_out: jax.Array,
        projected: jax.Array,
        adapted: jax.Array,
        axis: int,
        norm: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what is added to `P ψ(R)`, [..., d, n], and its norm.

        Args:
          left_out: `S = G - P R`, [..., d, n].
          projected: `R`, [..., k, n] on the input side, [..., d, k] on the output side.
          adapted: `ψ(R)`, what the inner transform made of it.
          axis: the axis of `R` that is projected: -2 or -1.
          norm: that of the last step.
        """
        return limit_growth(left_out * step_size(projected, adapted, axis), norm, self.limit)


def step_size(gradient: jax.Array, adapted: jax.Array, axis: int) -> jax.Array:
    """Returns `‖adapted‖ / ‖gradient‖` along an axis, which is kept; 0 where the gradient is 0."""
    before, after = (
        jnp.sqrt(jnp.sum(jnp.square(x), axis=axis, keepdims=True)) for x in (gradient, adapted)
    )
    return jnp.where(before > 0, after / jnp.where(before > 0, before, 1), 0)


def limit_growth(update: jax.Array, last: jax.Array, limit: float) -> tuple[jax.Array, jax.Array]:
    """Returns an update whose norm is at most `limit` times that of the last one, and its norm.

    Args:
      update: [..., d, n].
      last: norms of the last update, [...]; 0 before the first, which is not limited.
      limit: largest growth.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(update), axis=(-2, -1)))
    largest = limit * last
    is_above = (last > 0) & (norm > largest)
    factor = jnp.where(is_above, largest / jnp.where(is_above, norm, 1), 1)
    return update * factor[..., None, None], (norm * factor).astype(jnp.float32)
