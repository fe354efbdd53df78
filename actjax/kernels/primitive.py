"""A kernel as a primitive: one equation of a traced program, whatever that is lowered for.

`jax.lax.platform_dependent` traces all its branches wherever it stands, and leaves conditionals
that XLA has to remove. Here a program is traced where it is lowered for its platform, and equal
calls share one function of the lowered program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir

Static = tuple[tuple[str, Any], ...]
"""Options of a kernel, as sorted items of hashable values."""


class Computation(Protocol):
    """A function that is computed in several ways, such as an `actjax.kernels.dispatch.Kernel`."""

    @property
    def name(self) -> str:
        """Name in traced programs."""
        ...

    @property
    def reference(self) -> Callable[..., Any]:
        """The definition."""
        ...

    def compute(self, platform: str | None, chosen: Any, static: Static, *args: Any) -> Any:
        """Computes the function in a program that is lowered for a platform.

        Args:
          platform: "cuda" or "tpu"; None for any other.
          chosen: "reference" for the definition, which has the derivatives; or another way.
          static: the options.
          *args: the arguments.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays. It is hashable: equal ones are lowered once.

    Attributes:
      kernel: what is computed.
      chosen: how it is computed, as for `Computation.compute`.
      options: static arguments.
      arguments: structure of the arguments.
      results: shape and dtype of each array that the call returns.
      axes: for each `jax.vmap` around the call, innermost first, the mapped axes of the leaves.
    """

    kernel: Computation
    chosen: Any
    options: Static
    arguments: Any
    results: tuple[tuple[tuple[int, ...], Any], ...]
    axes: tuple[tuple[int | None, ...], ...] = ()

    def __repr__(self) -> str:
        return self.kernel.name

    def on(self, platform: str | None) -> Callable[..., list[jax.Array]]:
        """Returns what a platform computes, as a function of leaves that returns leaves.

        Args:
          platform: "cuda" or "tpu"; None for any other.
        """

        def run(*leaves: jax.Array) -> list[jax.Array]:
            args = jax.tree.unflatten(self.arguments, leaves)
            return jax.tree.leaves(self.kernel.compute(platform, self.chosen, self.options, *args))

        return functools.reduce(jax.vmap, self.axes, run)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def traced_once(program: Callable, options: Static, *args: Any) -> Any:
    """Returns `program(*args, **options)`. It is jitted, so that equal calls share one trace.

    Args:
      program: a function of pytrees of arrays.
      options: its options.
      *args: its arguments.
    """
    return program(*args, **dict(options))


def call(kernel: Computation, chosen: Any, options: Static, *args: Any) -> Any:
    """Returns what a kernel computes; the program is chosen where the call is lowered.

    Args:
      kernel: what to compute.
      chosen: how, as for `Computation.compute`.
      options: its options.
      *args: its arguments, pytrees of arrays.
    """
    leaves, arguments = jax.tree.flatten(args)
    results = traced_once.eval_shape(kernel.reference, options, *args)
    shapes, returned = jax.tree.flatten(results)
    known = tuple((x.shape, x.dtype) for x in shapes)
    outputs = _kernel.bind(*leaves, call=_Call(kernel, chosen, options, arguments, known))
    return jax.tree.unflatten(returned, outputs)


_kernel = core.Primitive("actjax_kernel")
_kernel.multiple_results = True


@_kernel.def_impl
@functools.partial(jax.jit, static_argnames="call")
def _run(*leaves: jax.Array, call: _Call) -> list[jax.Array]:
    return _kernel.bind(*leaves, call=call)


@_kernel.def_abstract_eval
def _results(*leaves: Any, call: _Call) -> list[ShapedArray]:
    del leaves
    return [ShapedArray(shape, dtype) for shape, dtype in call.results]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call
) -> tuple[list[Any], list[Any]]:
    """Differentiates the definition."""
    moved = tuple(ad.instantiate_zeros(t) for t in tangents)
    definition = dataclasses.replace(call, chosen="reference").on(None)
    return jax.jvp(definition, tuple(primals), moved)


def _batched(
    leaves: Sequence[Any], axes: Sequence[Any], *, call: _Call
) -> tuple[list[Any], list[int]]:
    """Maps the program over an axis, as `jax.vmap` does; all results have it in front."""
    mapped = tuple(a if isinstance(a, int) else None for a in axes)
    size = next(x.shape[a] for x, a in zip(leaves, mapped, strict=True) if a is not None)
    results = tuple(((size, *shape), dtype) for shape, dtype in call.results)
    batched = dataclasses.replace(call, results=results, axes=(*call.axes, mapped))
    outputs = _kernel.bind(*leaves, call=batched)
    return outputs, [0] * len(outputs)


def _lowered(platform: str | None, ctx: mlir.LoweringRuleContext, *values: Any, call: _Call) -> Any:
    return mlir.lower_fun(call.on(platform), multiple_results=True)(ctx, *values)


ad.primitive_jvps[_kernel] = _jvp
batching.primitive_batchers[_kernel] = _batched
for _platform in ("cuda", "tpu", None):
    mlir.register_lowering(_kernel, functools.partial(_lowered, _platform), _platform, inline=False)
