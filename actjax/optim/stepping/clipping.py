"""Clipping by the global norm, as a transform of gradients that may be factored."""

from typing import Any, cast

import optax

import actjax.factored.low_rank as low_rank


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
