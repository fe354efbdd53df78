"""Clipping by the global norm: in a chain of optax, and where the norm is not known yet.

In a backward pass that updates weights, parts of a gradient are applied before its norm is known.
The parts come in the order of the backward pass: the gradient of `after`, of the layers from the
last to the first, and what `before` adds. Since the norms of layers grow and shrink together, the
norm of the whole can be estimated: parts that are not known yet have their typical norms, times the
growth of the known layers over theirs (geometric mean). In the first step they are taken to be as
large as the known layers are on average.
"""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

import actjax.factored.low_rank as low_rank
from actjax.factored.low_rank import clip_factor, global_norm, scale_tree

_DECAY = 0.8
"""Decay of typical norms. 0.5 to 0.9 estimate about equally well."""
_MOST_GROWTH = 1e12
"""Largest growth of a squared norm: layers with gradients of nearly zero must not give inf."""


def check_clip(name: str, clip: Any) -> None:
    """Raises a `ValueError` unless `clip` of a function is a number above 0."""
    if not isinstance(clip, numbers.Real) or not float(clip) > 0:
        raise ValueError(f"`clip` of {name} must be a number above 0, got {clip!r}.")


class PartNorms(NamedTuple):
    """Norms of the parts of a gradient, each [layers + 2] float32.

    Attributes:
      squares: squared norms; zeros for parts that are not known yet.
      estimates: estimated norms of the whole gradient, by which the parts were clipped; zeros for
        parts that are clipped by the norm itself.
    """

    squares: jax.Array
    estimates: jax.Array

    def add(self, part: jax.typing.ArrayLike, grads: Any, typical: jax.Array) -> "PartNorms":
        """Returns the norms with those of a part and with the estimate for it.

        Args:
          part: its place.
          grads: its gradient. The parts before are known.
          typical: typical squared norms of all parts.
        """
        squares = self.squares.at[part].set(squared_norm(grads))
        estimate = estimated_norm(squares, typical, part + 1)
        return PartNorms(squares, self.estimates.at[part].set(estimate))


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Clipping by the norm of a gradient, or an estimate of it.

    Attributes:
      largest: largest norm; inf for no clipping.
    """

    largest: float

    def clip(self, grads: Any, norm: jax.Array) -> Any:
        """Returns a part of a gradient, clipped by a norm of the whole."""
        if math.isinf(self.largest):
            return grads
        return scale_tree(grads, clip_factor(norm, self.largest))

    def error(self, estimates: jax.Array, norm: jax.Array) -> jax.Array:
        """Returns the largest `|f / f* - 1|`, as in `InBackwardState.clip_error`.

        Args:
          estimates: as in `PartNorms`.
          norm: of the whole gradient.
        """
        if math.isinf(self.largest):
            return jnp.zeros((), jnp.float32)
        factors = clip_factor(jnp.where(estimates > 0, estimates, norm), self.largest)
        return jnp.max(jnp.abs(factors / clip_factor(norm, self.largest) - 1))


def squared_norm(grads: Any) -> jax.Array:
    """Returns the squared norm of a gradient, float32."""
    return global_norm(grads).astype(jnp.float32) ** 2


def estimated_norm(
    squares: jax.Array, typical: jax.Array, count: jax.typing.ArrayLike
) -> jax.Array:
    """Returns the estimated norm of a gradient of which some parts are known.

    Args:
      squares: squared norms of the parts, [layers + 2]; zeros for those that are not known yet.
      typical: typical values of `squares`; zeros in the first step.
      count: number of known parts, at least 1.
    """
    part, layers = jnp.arange(typical.size), count - 1
    later = jnp.sum(jnp.where(part < count, 0, typical))
    # The growth of `after` says less about layers than that of layers.
    both = (squares > 0) & (typical > 0) & ((part > 0) | (layers == 0))
    logs = jnp.where(both, jnp.log(squares / jnp.where(both, typical, 1)), 0)
    counts = jnp.maximum(jnp.sum(both), 1), typical.size - count, jnp.maximum(layers, 1)
    seen, left, before = (jnp.asarray(n, squares.dtype) for n in counts)
    growth = jnp.exp(jnp.sum(logs) / seen)
    unknown = later * jnp.minimum(growth, _MOST_GROWTH)
    as_large = jnp.sum(squares[1:]) * left / before
    return jnp.sqrt(jnp.sum(squares) + jnp.where(jnp.any(typical > 0), unknown, as_large))


def followed(typical: jax.Array, squares: jax.Array) -> jax.Array:
    """Returns typical squared norms after a gradient; one of zero, inf or nan says nothing."""
    mean = jnp.exp(_DECAY * jnp.log(typical) + (1 - _DECAY) * jnp.log(squares))
    known = (squares > 0) & jnp.isfinite(squares)
    return jnp.where(known, jnp.where(typical > 0, mean, squares), typical)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm` for trees that contain `LowRank` gradients.

    For a plain optax loop: `optax.chain(actjax.optim.clip_by_global_norm(1.0), tx)`. Within
    `actjax.optim.apply` a transform sees one layer at a time: use `actjax.clip_by_global_norm`
    before it, or `clip` of `in_backward`.

    Args:
      max_norm: the largest norm; inf for no clipping.

    Raises:
      ValueError: `max_norm` is negative, or not a number.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(
            f"`max_norm` of clip_by_global_norm must be a number of at least 0, got {max_norm!r}."
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return low_rank.clip_by_global_norm(updates, max_norm)[0], state

    return optax.GradientTransformation(optax.init_empty_state, cast(Any, update))
