"""A program for NVIDIA GPUs that is traced only where it is lowered for one.

All branches of `jax.lax.platform_dependent` are traced, whatever the platform. A kernel takes much
longer to trace than its definition, and on a CPU nothing would use it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir

_kernel = core.Primitive("actjax_kernel")
_kernel.multiple_results = True


def deferred(program: Callable[..., Any], results: Any, *args: Any) -> Any:
    """Returns `program(*args)`; it is traced when it is lowered.

    Args:
      program: a function of pytrees of arrays. It has no derivative.
      results: the pytree that it returns, with a `jax.ShapeDtypeStruct` for each array.
      *args: its arguments.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes, returned = jax.tree.flatten(results)

    def run(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(program(*jax.tree.unflatten(structure, leaves)))

    flat = tuple((x.shape, x.dtype) for x in shapes)
    return jax.tree.unflatten(returned, _kernel.bind(*leaves, run=run, results=flat))


@_kernel.def_impl
def _run(*leaves: jax.Array, run: Callable[..., list], results: Sequence[tuple]) -> list[jax.Array]:
    del results
    return run(*leaves)


@_kernel.def_abstract_eval
def _results(*leaves: Any, run: Callable[..., list], results: Sequence[tuple]) -> list[Any]:
    del leaves, run
    return [ShapedArray(shape, dtype) for shape, dtype in results]


def _batched(
    leaves: Sequence[Any],
    axes: Sequence[Any],
    *,
    run: Callable[..., list],
    results: Sequence[tuple],
) -> tuple[list[Any], list[int]]:
    """Maps the program over an axis, as `jax.vmap` does; all results have it in front."""
    size = next(x.shape[a] for x, a in zip(leaves, axes, strict=True) if isinstance(a, int))
    axes = tuple(a if isinstance(a, int) else None for a in axes)
    flat = tuple(((size, *shape), dtype) for shape, dtype in results)
    outputs = _kernel.bind(*leaves, run=jax.vmap(run, axes), results=flat)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_kernel] = _batched
mlir.register_lowering(
    _kernel,
    lambda ctx, *values, run, results: mlir.lower_fun(run, multiple_results=True)(ctx, *values),
    platform="cuda",
)
