"""The fastest implementation of a kernel on the GPU of this process, by measurement."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RUNS = 10
"""Timed runs of each implementation, of which the median counts."""


def fastest(kernel: Any, args: tuple, options: dict[str, Any]) -> Any:
    """Returns the implementation that takes the least time; None for the default.

    It is measured at the first call with these shapes, on random arrays, and kept. Without a GPU,
    or where the arrays of a measurement do not fit the memory, it is the default.

    Args:
      kernel: an `actjax.kernels.dispatch.Kernel`.
      args: its arguments, pytrees of arrays or tracers.
      options: its options.
    """
    if jax.default_backend() != "gpu":
        return None
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
    return _measured(kernel, structure, shapes, tuple(sorted(options.items())))


@functools.cache
def _measured(kernel: Any, structure: Any, shapes: tuple, static: tuple) -> Any:
    options = dict(static)
    with jax.ensure_compile_time_eval():
        try:
            rng = np.random.default_rng(0)
            arrays = [jnp.asarray(_random(rng, *shape)) for shape in shapes]
            args = jax.tree.unflatten(structure, arrays)
            times = {
                name: _seconds(kernel, name, args, options)
                for name in ("reference", "pallas", "triton")
                if name == "reference" or kernel.refusal(name, args, options) is None
            }
        except jax.errors.JaxRuntimeError:  # Out of memory.
            return None
    return min(times, key=lambda name: times[name])


def _seconds(kernel: Any, implementation: str, args: Any, options: dict[str, Any]) -> float:
    """Returns the median time of a run."""
    run = jax.jit(functools.partial(kernel, implementation=implementation, **options))
    compiled = run.lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    taken = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.standard_normal(shape, np.float32).astype(dtype)
    # Small, since some are indices of channels or of segments.
    return rng.integers(0, 2, shape).astype(dtype)
