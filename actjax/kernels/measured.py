"""The fastest implementation of a kernel on the GPU of this process, by measurement."""

import contextlib
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROUNDS, _CALLS = 5, 20
"""Rounds of measurement, and calls in a row in each: one alone would measure its launch."""


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
        rng = np.random.default_rng(0)
        try:
            arrays = [jnp.asarray(_random(rng, *shape)) for shape in shapes]
        except jax.errors.JaxRuntimeError:  # Out of memory.
            return None
        args = jax.tree.unflatten(structure, arrays)
        programs = {}
        for name in ("reference", "pallas", "triton"):
            if name == "reference" or kernel.refusal(name, args, options) is None:
                # A program that does not fit the GPU is none of the candidates.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    programs[name] = _program(kernel, name, args, options)
        # In turn, so that a GPU that slows down slows all of them.
        rounds = [
            {name: _seconds(run, args) for name, run in programs.items()} for _ in range(_ROUNDS)
        ]
    return min(
        programs, key=lambda name: statistics.median(times[name] for times in rounds), default=None
    )


def _program(kernel: Any, implementation: str, args: Any, options: dict[str, Any]) -> Any:
    """Returns a compiled program that has run once."""
    run = jax.jit(functools.partial(kernel, implementation=implementation, **options))
    compiled = run.lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return compiled


def _seconds(run: Any, args: Any) -> float:
    """Returns the time of some runs in a row."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        result = run(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - began


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.standard_normal(shape, np.float32).astype(dtype)
    # Small, since some are indices of channels or of segments.
    return rng.integers(0, 2, shape).astype(dtype)
