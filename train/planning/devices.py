"""Compiling for a GPU that is not there: XLA decides a program's memory when it compiles."""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from actjax._host import read_right
from train.run.gpus import GIB, GPUS, Gpu, gpu_of_kind
from train.run.sharding import mesh_of
from train.settings.messages import check_known


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The properties of a TPU chip.

    Attributes:
      name: the vendor's name.
      generation: its name in topologies, such as "v5e".
      memory: bytes of a chip.
      bandwidth: memory bandwidth of a chip, bytes per second.
      flops: bfloat16 matrix products of a chip, operations per second.
      axes: number of axes of the torus that joins chips.
    """

    name: str
    generation: str
    memory: int
    bandwidth: float
    flops: float
    axes: int

    def topology(self, count: int) -> str:
        """Returns the name of a topology of `count` chips, as near to a cube as it can be.

        Raises:
          ValueError: `count` is not a power of two.
        """
        if count & (count - 1):
            raise ValueError(
                f"{self.name}: chips come in powers of two, and `--mesh` has {count}: change it."
            )
        power = int(math.log2(count))
        sizes = sorted(2 ** ((power + i) // self.axes) for i in range(self.axes))
        return f"{self.generation}:{'x'.join(map(str, sizes))}"


TPUS: dict[str, Tpu] = {
    "v5e": Tpu("Google TPU v5e", "v5e", 16 * GIB, 0.819e12, 197e12, axes=2),
    "v5p": Tpu("Google TPU v5p", "v5p", 95 * GIB, 2.765e12, 459e12, axes=3),
    "v6e": Tpu("Google TPU v6e", "v6e", 32 * GIB, 1.64e12, 918e12, axes=2),
}
"""TPUs by name."""

HERE = "here"
"""The devices of this machine."""

Device = Gpu | Tpu
DEVICES: dict[str, Device] = {**GPUS, **TPUS}
"""Devices that steps can be compiled for, by name."""


def find_device(name: str) -> Device | None:
    """Returns a device by its name; None for this machine.

    Raises:
      ValueError: an unknown name.
    """
    if name == HERE:
        return None
    # Without a hint: names that differ in one character are devices with other memory.
    check_known("device", name, (HERE, *DEVICES), cutoff=1)
    return DEVICES[name]


def gpu_of(name: str) -> Gpu | None:
    """Returns a GPU whose data sheet is known; None for another device.

    Args:
      name: the device; for `HERE`, it is the GPU of this machine.
    """
    if name == HERE:
        return gpu_of_kind(jax.devices()[0].device_kind)
    device = find_device(name)
    return device if isinstance(device, Gpu) else None


def free_memory(name: str) -> int:
    """Returns the bytes that a program can use on a device: on this machine, what is free now.

    Raises:
      ValueError: the device of this machine does not tell.
    """
    if name != HERE:
        return DEVICES[name].memory
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"`--budget auto`: the device ({device.device_kind}) does not tell its free memory:"
            " pass a size such as 16GiB."
        )
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_dtype(name: str, compute_dtype: str) -> None:
    """Raises a `ValueError` if a device has no matrix products of a dtype.

    XLA would compute them in float32, without the matrix units. Weights in bfloat16 are only
    stored, and are allowed.

    Args:
      name: the device.
      compute_dtype: dtype of matrix products.
    """
    device = find_device(name)
    if isinstance(device, Gpu) and compute_dtype == "bfloat16" and not device.has_bfloat16:
        raise ValueError(
            f"`--device {name}` has no matrix products of bfloat16: pass `--compute-dtype float16`"
            " or `--compute-dtype float32`."
        )


@contextlib.contextmanager
def compile_for(device: Device | None) -> Iterator[Any]:
    """Gives a function that places shapes on the device to compile for.

    Args:
      device: the device; None for those of this machine.

    Raises:
      ValueError: the compiler for the device is not installed, or JAX has dropped it.
      RuntimeError: this version of JAX lacks a function that must be replaced.
    """
    if device is None:
        yield lambda tree: tree
        return
    with compile_for_mesh(device, {"device": 1}) as mesh:
        sharding = NamedSharding(mesh, PartitionSpec())
        yield lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )


@contextlib.contextmanager
def compile_for_mesh(device: Device, sizes: dict[str, int]) -> Iterator[Mesh]:
    """Gives a mesh of devices to compile for, and sets it.

    Args:
      device: the kind of device.
      sizes: devices along each axis. GPUs are all joined as those of one host are.

    Raises:
      ValueError: the compiler for the device is not installed, or JAX has dropped it.
      RuntimeError: this version of JAX lacks a function that must be replaced.
    """
    read_right()
    count = math.prod(sizes.values())
    topology = _gpus(device, count) if isinstance(device, Gpu) else _tpus(device, count)
    mesh = mesh_of(sizes, topology.devices)
    with _tracing_on(device), jax.set_mesh(mesh):
        yield mesh


def _gpus(device: Gpu, count: int) -> Any:
    """Returns GPUs of one host."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(
            "compiling for a GPU needs JAX's CUDA plugin, though no GPU: pip install 'jax[cuda12]'."
        )
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{count}", target_config=device.describe()
        )
    except NotImplementedError as error:
        raise ValueError(
            "JAX found no GPU and has dropped its CUDA plugin, which compiles for one: set the"
            " environment variable JAX_PLATFORMS=cpu before the program starts."
        ) from error


_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""libtpu would ask the network which TPU this machine has, and let one process in at a time."""


def _tpus(device: Tpu, count: int) -> Any:
    """Returns TPU chips."""
    name = device.topology(count)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs libtpu, though no TPU: pip install 'jax[tpu]'.")
    for variable, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # A host has four chips, [2, 2, 1], unless there are fewer or they are arranged otherwise.
    sizes = [int(size) for size in name.partition(":")[2].split("x")]
    bounds = (*sizes, *(1 for _ in range(3 - len(sizes)))) if count <= 4 else (2, 2, 1)
    return topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=bounds
    )


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_REPLACED: tuple[tuple[str, str, Any], ...] = (
    # cuDNN's attention asks the driver for its version and for the compute capability of the GPU.
    # Neither exists here; `jax.experimental.topologies` has no setting that answers instead.
    (_CUDNN, "check_cudnn_version", 91000),
    (_CUDNN, "check_compute_capability", None),
)
"""Functions of JAX that ask for a GPU while tracing: module, name, and what they return instead."""


@contextlib.contextmanager
def _tracing_on(device: Device) -> Iterator[None]:
    """Replaces the functions that ask for a device. The only place that touches them."""
    # Attention and kernels are chosen by the backend of this process and its GPU.
    replaced: tuple[tuple[str, str, Any], ...] = (("jax", "default_backend", "tpu"),)
    if isinstance(device, Gpu):
        capability = ("actjax._gpu", "compute_capability", device.capability)
        replaced = (("jax", "default_backend", "gpu"), capability, *_REPLACED)
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            try:
                stack.enter_context(
                    mock.patch.object(importlib.import_module(module), name, return_value=value)
                )
            except (ImportError, AttributeError) as error:
                raise RuntimeError(
                    f"JAX {jax.__version__} has no `{module}.{name}`, which"
                    " `train.planning.devices` replaces to compile for a GPU that is not there: put"
                    " its successor into `_REPLACED`, or compile on a machine with the GPU"
                    " (`--device here`)."
                ) from error
        yield
