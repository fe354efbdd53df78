"""What is made of the part of a gradient that a subspace leaves out, without moments of its size.

`actjax.optim.subspace` updates a weight with `P ψ(R)`, `R = Pᵀ G`: an update of rank k. The rest
of the gradient, `S = G - P R`, has no moments. Scaled like the part that has some (Fira), or
reduced to its signs (FRUGAL), it makes the update full-rank at no cost in states.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Remainder(abc.ABC):
    """Makes an update of the remainder of a gradient."""

    def init(self, shape: Sequence[int]) -> Any:
        """Returns what is kept of a weight [..., d, n] before the first step."""
        del shape
        return ()

    @abc.abstractmethod
    def update(
        self, rest: jax.Array, projected: jax.Array, adapted: jax.Array, axis: int, kept: Any
    ) -> tuple[jax.Array, Any]:
        """Returns what is added to `P ψ(R)`, [..., d, n], and what is kept for the next step.

        Args:
          rest: `S = G - P R`, [..., d, n].
          projected: `R`, [..., k, n] on the input side, [..., d, k] on the output side.
          adapted: `ψ(R)`, what the inner transform made of it.
          axis: the axis of `R` that is projected: -2 or -1.
          kept: what the last step kept.
        """


@dataclasses.dataclass(frozen=True)
class ScaledRemainder(Remainder):
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
        check_growth("ScaledRemainder", self.limit)

    def init(self, shape: Sequence[int]) -> jax.Array:
        return jnp.zeros(tuple(shape[:-2]), jnp.float32)

    def update(
        self, rest: jax.Array, projected: jax.Array, adapted: jax.Array, axis: int, kept: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return limit_growth(rest * step_size(projected, adapted, (axis,)), kept, self.limit)


@dataclasses.dataclass(frozen=True)
class SignedRemainder(Remainder):
    """The signs of the remainder: the update of signSGD.

    Source: FRUGAL (Zmushko et al., ICML 2025, arXiv 2411.07837), with signSGD as the state-free
    optimizer. Its authors set the moments to zero at a refresh (`moments="reset"`).

    State: none.

    Attributes:
      scale: learning rate of the signs, as a share of that of the subspace: published as 1 for
        pretraining, 0.1 for fine-tuning.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.scale, int | float) or not 0 < self.scale < math.inf:
            raise ValueError(
                f"`scale` of SignedRemainder must be a finite number above 0, got {self.scale!r}."
            )

    def update(
        self, rest: jax.Array, projected: jax.Array, adapted: jax.Array, axis: int, kept: Any
    ) -> tuple[jax.Array, Any]:
        del projected, adapted, axis
        return self.scale * jnp.sign(rest), kept


def step_size(gradient: jax.Array, adapted: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns `‖adapted‖ / ‖gradient‖` along axes, which are kept; 0 where the gradient is 0."""
    before, after = (
        jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True)) for x in (gradient, adapted)
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


def check_growth(owner: str, limit: float) -> None:
    """Raises a `ValueError` unless `limit` is a number above 1."""
    if not isinstance(limit, int | float) or not limit > 1:
        raise ValueError(f"`limit` of {owner} must be a number above 1, got {limit!r}.")
