"""The sharding in the type of an array, under a mesh with explicit axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


def explicit_spec(x: Any, whole: Sequence[int] = ()) -> PartitionSpec | None:
    """Returns the partition spec in the type of an array; None without explicit mesh axes.

    Indexing needs it as `out_sharding`: JAX does not infer the sharding of its result.

    Args:
      x: the array.
      whole: axes that are not divided in the result.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    for axis in whole:
        spec[axis] = None
    return PartitionSpec(*spec)
