"""A kernel as a primitive: one equation of a traced program, whatever that is lowered for.

`jax.lax.platform_dependent` traces all its branches wherever it stands, and leaves conditionals
that XLA has to remove. Here a program is traced where it is lowered for its platform, and equal
calls share one function of the lowered program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a call computes, as functions of pytrees of arrays.

    Attributes:
      name: name of the kernel.
      definition: computes it on any platform, and has its derivatives.
      cuda: the program for NVIDIA GPUs; None if there is none, or it cannot take the arguments.
      tpu: that for TPUs.
    """

    name: str
    definition: Callable[..., Any]
    cuda: Callable[..., Any] | None = None
    tpu: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays. It is hashable: equal ones are lowered once.

    Attributes:
      programs: functions to call.
      options: their options, as sorted items.
      arguments: structure of their arguments.
      results: shape and dtype of each array that they return.
      axes: for each `jax.vmap` around the call, innermost first, the mapped axes of the leaves.
    """

    programs: Programs
    options: tuple[tuple[str, Any], ...]
    arguments: Any
    results: tuple[tuple[tuple[int, ...], Any], ...]
    axes: tuple[tuple[int | None, ...], ...] = ()

    def __repr__(self) -> str:
        return self.programs.name

    def on(self, platform: str | None) -> Callable[..., list[jax.Array]]:
        """Returns what a platform computes, as a function of leaves that returns leaves.

        Args:
          platform: "cuda" or "tpu"; None for any other.
        """
        own = None if platform is None else getattr(self.programs, platform)
        program = self.programs.definition if own is None else own

        def run(*leaves: jax.Array) -> list[jax.Array]:
            args = jax.tree.unflatten(self.arguments, leaves)
            return jax.tree.leaves(traced_once(program, self.options, *args))

        return functools.reduce(jax.vmap, self.axes, run)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def traced_once(program: Callable, options: tuple[tuple[str, Any], ...], *args: Any) -> Any:
    """Returns `program(*args, **options)`. It is jitted, so that equal calls share one trace.

    Args:
      program: a function of pytrees of arrays.
      options: its options, as sorted items of hashable values.
      *args: its arguments.
    """
    return program(*args, **dict(options))


def call(programs: Programs, options: tuple[tuple[str, Any], ...], *args: Any) -> Any:
    """Returns what a kernel computes; the program is chosen where the call is lowered.

    Args:
      programs: the functions to choose from.
      options: their options, as sorted items of hashable values.
      *args: their arguments, pytrees of arrays.
    """
    leaves, arguments = jax.tree.flatten(args)
    results = traced_once.eval_shape(programs.definition, options, *args)
    shapes, returned = jax.tree.flatten(results)
    known = tuple((x.shape, x.dtype) for x in shapes)
    outputs = _kernel.bind(*leaves, call=_Call(programs, options, arguments, known))
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
    return jax.jvp(call.on(None), tuple(primals), moved)


def _batched(
    leaves: Sequence[Any], axes: Sequence[Any], *, call: _Call
) -> tuple[list[Any], list[int]]:
    """Maps the program over an axis, as `jax.vmap` does; all results have it in front."""
    own = tuple(a if isinstance(a, int) else None for a in axes)
    size = next(x.shape[a] for x, a in zip(leaves, own, strict=True) if a is not None)
    results = tuple(((size, *shape), dtype) for shape, dtype in call.results)
    mapped = dataclasses.replace(call, results=results, axes=(*call.axes, own))
    outputs = _kernel.bind(*leaves, call=mapped)
    return outputs, [0] * len(outputs)


def _lowered(platform: str | None, ctx: mlir.LoweringRuleContext, *values: Any, call: _Call) -> Any:
    return mlir.lower_fun(call.on(platform), multiple_results=True)(ctx, *values)


ad.primitive_jvps[_kernel] = _jvp
batching.primitive_batchers[_kernel] = _batched
for _platform in ("cuda", "tpu", None):
    mlir.register_lowering(_kernel, functools.partial(_lowered, _platform), _platform, inline=False)
