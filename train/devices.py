"""Compiling for a GPU that is not there: XLA decides a program's memory when it compiles."""

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.gpus import GIB as GIB
from train.gpus import GPUS as GPUS
from train.gpus import Gpu
from train.options import near_hint

HERE = "here"
"""The devices of this machine."""


def gpu(name: str) -> Gpu:
    """Returns a GPU by its name.

    Raises:
      ValueError: an unknown name.
    """
    if name not in GPUS:
        hint = near_hint(name, GPUS, cutoff=0.3)
        raise ValueError(f"unknown device {name!r}.{hint} There are: {', '.join((HERE, *GPUS))}.")
    return GPUS[name]


def description_of(name: str) -> str | None:
    """Returns the description of a device by its name; None for this machine.

    Raises:
      ValueError: an unknown name.
    """
    return None if name == HERE else gpu(name).describe()


@contextlib.contextmanager
def compile_for(description: str | None) -> Iterator[Any]:
    """Gives a function that places shapes on the device to compile for.

    Args:
      description: of a GPU, from `Gpu.describe`; None for the devices of this machine.

    Raises:
      ValueError: the compiler for GPUs is not installed, or JAX has dropped it.
      RuntimeError: this version of JAX lacks a function that must be replaced.
    """
    if description is None:
        yield lambda tree: tree
        return
    with compile_for_mesh(description, {"device": 1}) as mesh:
        sharding = NamedSharding(mesh, PartitionSpec())
        yield lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )


@contextlib.contextmanager
def compile_for_mesh(description: str, sizes: dict[str, int]) -> Iterator[Mesh]:
    """Gives a mesh of GPUs to compile for, and sets it.

    Args:
      description: of a GPU, from `Gpu.describe`.
      sizes: devices along each axis. All are joined as those of one host are.

    Raises:
      ValueError: the compiler for GPUs is not installed, or JAX has dropped it.
      RuntimeError: this version of JAX lacks a function that must be replaced.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(
            "compiling for a GPU needs JAX's CUDA plugin, though no GPU: pip install 'jax[cuda12]'."
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{math.prod(sizes.values())}",
            target_config=description,
        )
    except NotImplementedError as error:
        raise ValueError(
            "JAX found no GPU and has dropped its CUDA plugin, which compiles for one: set the"
            " environment variable JAX_PLATFORMS=cpu before the program starts."
        ) from error
    devices = np.array(topology.devices).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes))
    with _tracing_as_on_a_gpu(), jax.set_mesh(mesh):
        yield mesh


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_REPLACED: tuple[tuple[str, str, Any], ...] = (
    # JAX chooses cuDNN's attention while tracing, by the backend of this process.
    ("jax", "default_backend", "gpu"),
    # cuDNN's attention asks the driver for its version and for the compute capability of the GPU.
    # Neither exists here; `jax.experimental.topologies` has no setting that answers instead.
    (_CUDNN, "check_cudnn_version", 91000),
    (_CUDNN, "check_compute_capability", None),
)
"""Functions of JAX that ask for a GPU while tracing: module, name, and what they return instead."""


@contextlib.contextmanager
def _tracing_as_on_a_gpu() -> Iterator[None]:
    """Replaces the functions of JAX that ask for a GPU. The only place that touches them."""
    with contextlib.ExitStack() as stack:
        for module, name, value in _REPLACED:
            try:
                replaced = mock.patch.object(
                    importlib.import_module(module), name, return_value=value
                )
                stack.enter_context(replaced)
            except (ImportError, AttributeError) as error:
                raise RuntimeError(
                    f"JAX {jax.__version__} has no `{module}.{name}`, which `train.devices`"
                    " replaces to compile for a GPU that is not there: put its successor into"
                    " `_REPLACED`, or compile on a machine with the GPU (`--device here`)."
                ) from error
        yield
