"""Arrays in the memory of the host, within compiled programs."""

import os
from typing import Any

import jax
import jaxlib

_READ_WRONG = ("0.10.2", "0.11.0")
"""Versions of jaxlib that, on GPUs, read a stack on the host at `n` where a loop over `n` reads
`count - 1 - n`, as every backward pass does (openxla/xla#46231)."""
_PASS = "dynamic-slice-annotator"
_FLAG = "--xla_disable_hlo_passes"


def is_on_host(x: Any) -> bool:
    """Returns whether a program has an array in the memory of the host."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def fetched(tree: Any) -> Any:
    """Returns arrays in the memory of the device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def reads_wrong() -> bool:
    """Returns whether programs for GPUs read wrong parts of stacks on the host."""
    version = getattr(jaxlib, "__version__", "")
    return version in _READ_WRONG and _PASS not in os.environ.get("XLA_FLAGS", "")


def check_reads() -> None:
    """Raises a `RuntimeError` if a backward pass on this GPU would read wrong arrays."""
    if jax.default_backend() != "gpu" or not reads_wrong():
        return
    raise RuntimeError(
        "this version of jaxlib reads wrong arrays from the memory of the host in loops that run"
        f" backwards (openxla/xla#46231). Set XLA_FLAGS={_FLAG}={_PASS} before the program starts,"
        f" or use a jaxlib other than {' and '.join(_READ_WRONG)}."
    )


def read_right() -> None:
    """Sets the flag that `check_reads` asks for. To be called before JAX compiles anything."""
    if not reads_wrong():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if f"{_FLAG}=" in flags:
        os.environ["XLA_FLAGS"] = flags.replace(f"{_FLAG}=", f"{_FLAG}={_PASS},")
    else:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={_PASS}".strip()
