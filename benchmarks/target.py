"""Compiling for a GPU that is not there: XLA decides a program's memory when it compiles it."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"


@contextlib.contextmanager
def device(description: pathlib.Path | None) -> Iterator[Any]:
    """Gives a function that places shapes on the device to compile for, for programs within.

    Args:
      description: an XLA `GpuTargetConfigProto` in text form, such as that of an H100; needs the
        CUDA plugin of JAX, but no GPU. None for the devices of this machine.
    """
    if description is None:
        yield lambda tree: tree
        return
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=description.read_text()
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with (
        # The choice between cuDNN's attention and ours is made while tracing.
        mock.patch("jax.default_backend", return_value="gpu"),
        # These two ask the driver, which is as absent as the GPU.
        mock.patch(f"{_CUDNN}.check_cudnn_version", return_value=91000),
        mock.patch(f"{_CUDNN}.check_compute_capability"),
        jax.set_mesh(mesh),
    ):
        yield place
