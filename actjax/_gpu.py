"""The GPU that programs of this process are compiled for."""

import jax

AMPERE = (8, 0)
"""The first compute capability with products of bfloat16, and that cuDNN's attention and Triton
support."""


def compute_capability() -> tuple[int, ...] | None:
    """Returns major and minor of the NVIDIA GPU; None on other backends."""
    if jax.default_backend() != "gpu":
        return None
    numbers = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def is_before_ampere() -> bool:
    """Returns whether the GPU is an NVIDIA GPU older than Ampere, such as a T4."""
    capability = compute_capability()
    return capability is not None and capability < AMPERE
