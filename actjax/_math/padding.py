"""Features that are padding."""

from typing import Any

import jax
import jax.numpy as jnp


def zero_beyond(features: int | None, x: jax.Array, axis: int = -1) -> jax.Array:
    """Returns `x` with zeros from index `features` of an axis on; `x` itself if that is None."""
    if features is None:
        return x
    # Not a mask: before a loop XLA for GPUs writes one as large as `x`, which each iteration reads.
    axis %= x.ndim
    ends = [(0, 0, 0)] * x.ndim
    ends[axis] = (0, x.shape[axis] - features, 0)
    existing = jax.lax.slice_in_dim(x, 0, features, axis=axis)
    return jax.lax.pad(existing, jnp.zeros((), x.dtype), ends)


def check_features(features: Any, width: int) -> int | None:
    """Returns the number of features that are not padding; None if no feature is.

    Args:
      features: this number, or None.
      width: number of all features.

    Raises:
      ValueError: not an integer from 1 to `width`.
    """
    if features is None or features == width:
        return None
    is_integer = isinstance(features, int) and not isinstance(features, bool)
    if not is_integer or not 1 <= features <= width:
        raise ValueError(
            f"`features` must be the number of features that are not padding, an integer from 1 to"
            f" the width {width}, or None for all: got {features!r}."
        )
    return features
