"""The time of a step on a GPU, predicted from the work of its kernels.

The model is a sum: products at a share of the peak, bytes outside of products at a share of the
bandwidth, a constant for each kernel, and bytes between device and host. Nothing overlaps.

The shares were fitted once, to 24 steps of `llama_1b` (8 x 1024 tokens, bf16 weights) measured on
an H100 and an H200 with JAX 0.11.2 (`benchmarks/results/gpu.json`, `gpu_queue.json`). Their
programs were compiled from commit b619dc0 by JAX 0.10.2 for an H100; the measured ones are of
commits aae8859 and 9aea4c3, with autotuned products. The error is 3.0% (root mean square) and at
most 7%:

    milliseconds                        measured  predicted
    H200, products in cuBLAS
      jax.checkpoint, dots                 152.5      146.0   -4.3%
      jax.checkpoint, full                 167.4      162.1   -3.1%
      exact (mean of two parts)            173.1      174.3   +0.7%
      remat, 8 bits, in backward           199.9      196.9   -1.5%
      remat of codes (compressed_remat)    200.4      198.7   -0.8%
      lean_subspace, rank 512              217.3      207.2   -4.7%
      lean                                 234.2      222.0   -5.2%
    H200, width 5504, cuBLAS: exact        162.6      173.8   +6.9%
                              lean         221.0      218.1   -1.3%
    H200, width 5504, Triton: exact        166.1      168.4   +1.4%
                              lean         213.5      211.8   -0.8%
    H200, width 5461, Triton: exact        259.0      266.2   +2.8%
                              remat        296.8      305.6   +3.0%
                              lean         317.5      309.5   -2.5%
    H100, width 5461, Triton (10 steps)  263-353             -4.7% to +1.5%

Steps outside of the fit, in the same way: on the H200 `exact`, 32 x 1024 in 4 micro-batches +1.4%,
`lean`, 64 x 1024 in 8, -3.8%, and `llama3_8b`, 1 x 1024, most of whose 252 ms are the update, +18%.
On the H100 `llama_7b`, 4 x 1024, with an allocator of 22 GiB took 1,464 ms, and 566 are predicted:
the reason is not known.

Other GPUs are taken to reach the same shares of their data sheets, which nobody has measured.
"""

from collections.abc import Iterable
from typing import NamedTuple

from train.planning.traffic import ATTENTION, PRODUCTS, Kernel
from train.run.gpus import Gpu

PRODUCTS_SHARE = 0.72
"""Share of the peak that products in cuBLAS reach, and in Triton if rows are aligned."""
UNALIGNED_SHARE = 0.26
"""Share that products in Triton reach if rows do not begin at multiples of 16 bytes."""
ATTENTION_SHARE = 0.24
"""Share that cuDNN's attention reaches over 1,024 causal tokens: 12.4 ms of `exact`."""
BANDWIDTH_SHARE = 0.88
"""Share of the bandwidth that all other kernels reach, as if there were no caches."""
KERNEL_SECONDS = 5e-6
"""Time of a kernel beside its bytes and operations. Copies took 8e-6 in a profile."""


class Work(NamedTuple):
    """The work of a step.

    Attributes:
      products: operations of products with aligned rows.
      unaligned: operations of the others.
      attention: operations of attention.
      moved: bytes that kernels move outside of products and attention.
      kernels: number of kernels that run.
      bus: bytes between device and host.
    """

    products: float = 0.0
    unaligned: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    bus: float = 0.0


class Speed(NamedTuple):
    """Peaks of a device, a second: operations, bytes of its memory, bytes to the host."""

    flops: float
    bandwidth: float
    bus: float


def work_of(kernels: Iterable[Kernel], bus: float = 0.0) -> Work:
    """Returns the work of the kernels of a step.

    Args:
      kernels: those of the compiled step.
      bus: bytes between device and host.
    """
    total: dict[str, float] = dict.fromkeys(Work._fields, 0.0)
    for kernel in kernels:
        total["kernels"] += kernel.runs
        if kernel.operator == PRODUCTS:
            total["products" if kernel.is_aligned else "unaligned"] += kernel.flops
        elif kernel.operator == ATTENTION:
            total["attention"] += kernel.flops
        else:
            total["moved"] += kernel.moved
    return Work(**total | {"bus": bus})


def predicted_seconds(work: Work, gpu: Gpu | Speed) -> float:
    """Returns the time of a step on a GPU, or on a device with the same shares of its peaks."""
    operations = (
        work.products / PRODUCTS_SHARE
        + work.unaligned / UNALIGNED_SHARE
        + work.attention / ATTENTION_SHARE
    )
    moved = work.moved / BANDWIDTH_SHARE
    waiting = work.kernels * KERNEL_SECONDS + work.bus / gpu.bus
    return operations / gpu.flops + moved / gpu.bandwidth + waiting
