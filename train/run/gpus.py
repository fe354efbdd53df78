"""Data sheets of GPUs, as XLA's compiler takes them (`GpuTargetConfigProto`)."""

import dataclasses
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that XLA's compiler reads.

    Attributes:
      name: the vendor's name.
      capability: compute capability, major and minor.
      memory: bytes that a program can use.
      bandwidth: memory bandwidth, bytes per second.
      flops: dense matrix products of 16-bit numbers with float32 sums, operations per second.
      cores: number of streaming multiprocessors.
      clock_ghz: boost clock.
      l2_cache: bytes.
      shared_memory: bytes per core.
      threads: most threads per core.
      fpus: float32 units per core.
      bus: bytes per second to the memory of the host. 60 GB/s were measured on an H100 and an H200
        (PCIe 5), and no computation beside them; half of it is assumed for PCIe 4.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    flops: float
    cores: int
    clock_ghz: float
    l2_cache: int
    shared_memory: int
    threads: int
    fpus: int
    bus: float = 30e9

    @property
    def has_bfloat16(self) -> bool:
        """Whether it has matrix products of bfloat16, as GPUs from Ampere on."""
        return self.capability >= (8, 0)

    def describe(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        # From Ampere on, CUDA takes a KiB of the shared memory of each block.
        reserved = 1024 if major >= 8 else 0
        accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        versions = 'driver_version: "13.0.0" runtime_version: "12.9.0"'
        return f"""
gpu_device_info {{
  name: "{self.name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  platform_version: "Compute Capability {major}.{minor}"
  device_memory_size: {self.memory} memory_bandwidth: {int(self.bandwidth)}
  clock_rate_ghz: {self.clock_ghz} l2_cache_size: {self.l2_cache} ecc_enabled: true
  core_count: {self.cores} fpus_per_core: {self.fpus}
  threads_per_core_limit: {self.threads} threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_core: {self.shared_memory} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory - reserved}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 {versions} compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


_HOPPER: dict[str, Any] = {
    "capability": (9, 0), "cores": 132, "fpus": 128, "clock_ghz": 1.98, "l2_cache": 50 << 20,
    "shared_memory": 228 << 10, "threads": 2048, "flops": 989e12, "bus": 60e9,
}  # fmt: skip
_A100: dict[str, Any] = {
    "capability": (8, 0), "cores": 108, "fpus": 64, "clock_ghz": 1.41, "l2_cache": 40 << 20,
    "shared_memory": 164 << 10, "threads": 2048, "flops": 312e12,
}  # fmt: skip
_SMALL: dict[str, Any] = {"shared_memory": 100 << 10, "threads": 1536, "fpus": 128}

GPUS: dict[str, Gpu] = {
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 178 * GIB, 8e12, 2250e12, cores=148, clock_ghz=1.965,
        l2_cache=126 << 20, shared_memory=228 << 10, threads=2048, fpus=128, bus=60e9,
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", memory=79 * GIB, bandwidth=3.35e12, **_HOPPER),
    "h200": Gpu("NVIDIA H200", memory=139 * GIB, bandwidth=4.8e12, **_HOPPER),
    "a100_80": Gpu("NVIDIA A100-SXM4-80GB", memory=79 * GIB, bandwidth=2.04e12, **_A100),
    "a100_40": Gpu("NVIDIA A100-SXM4-40GB", memory=39 * GIB, bandwidth=1.56e12, **_A100),
    "rtx_5090": Gpu(
        "NVIDIA GeForce RTX 5090", (12, 0), 31 * GIB, 1.79e12, 209e12, cores=170, clock_ghz=2.41,
        l2_cache=96 << 20, bus=60e9, **_SMALL,
    ),
    "rtx_4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 23 * GIB, 1.01e12, 165e12, cores=128, clock_ghz=2.52,
        l2_cache=72 << 20, **_SMALL,
    ),
    "rtx_3090": Gpu(
        "NVIDIA GeForce RTX 3090", (8, 6), 23 * GIB, 0.936e12, 71e12, cores=82, clock_ghz=1.7,
        l2_cache=6 << 20, **_SMALL,
    ),
    "l4": Gpu(
        "NVIDIA L4", (8, 9), 22 * GIB, 0.3e12, 121e12, cores=58, clock_ghz=2.04,
        l2_cache=48 << 20, **_SMALL,
    ),
    "a10g": Gpu(
        "NVIDIA A10G", (8, 6), 22 * GIB, 0.6e12, 70e12, cores=80, clock_ghz=1.71,
        l2_cache=6 << 20, **_SMALL,
    ),
    "t4": Gpu(
        "Tesla T4", (7, 5), 14 * GIB, 0.32e12, 65e12, cores=40, clock_ghz=1.59,
        l2_cache=4 << 20, shared_memory=64 << 10, threads=1024, fpus=64,
        bus=15e9,
    ),
}  # fmt: skip
"""GPUs by name. `memory` is what CUDA reports, rounded down: 14.7 of the 16 GB of a T4."""


def gpu_of_kind(kind: str) -> Gpu | None:
    """Returns the GPU that JAX names so, as `device_kind` does; None for another device."""
    return next((gpu for gpu in GPUS.values() if gpu.name == kind), None)
