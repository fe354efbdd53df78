"""Sharding of arrays: fully sharded data parallelism over one axis of devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("fsdp",)


def make_mesh(text: str) -> Mesh:
    """Returns the mesh of a description such as "fsdp=4"; one device for an empty description.

    Raises:
      ValueError: a malformed description, an unknown axis, or more devices than there are.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(
                f"`--mesh` {text!r}: {part!r} is not AXIS=SIZE with axis {', '.join(AXES)} and a"
                " size of at least 1, for example fsdp=4."
            )
        sizes[axis] = int(size)
    count, devices = math.prod(sizes.values()), jax.devices()
    if count > len(devices):
        raise ValueError(
            f"`--mesh` {text!r} asks for {count} devices, but there are {len(devices)}"
            f" ({devices[0].platform}). To simulate them on a CPU, set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch [B, ...] over its sequences."""
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns a sharding for each array of a training state (or of its shapes).

    An array is sharded along its largest axis whose size is a multiple of the number of devices,
    but not along the axis of stacked layers: every device needs a slice of each layer. Arrays
    without such an axis, such as scalars, are replicated.
    """
    return jax.tree_util.tree_map_with_path(_sharding_of(mesh), state)


def _sharding_of(mesh: Mesh) -> Callable[[tuple, Any], NamedSharding]:
    count = mesh.shape["fsdp"]

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        stacked = any(entry_name(entry) == "layers" for entry in path)
        axes = [i for i in range(int(stacked), leaf.ndim) if leaf.shape[i] % count == 0]
        if count == 1 or not axes:
            return NamedSharding(mesh, PartitionSpec())
        largest = max(axes, key=lambda i: leaf.shape[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * largest, "fsdp"))

    return sharding


def entry_name(entry: Any) -> str:
    """Returns the name in one entry of a pytree path, for every kind of node."""
    return str(getattr(entry, "name", getattr(entry, "key", "")))
