"""A kernel as a primitive: one equation of a traced program, whatever that is lowered for.

`jax.lax.platform_dependent` traces all its branches wherever it stands, and leaves conditionals
that XLA has to remove. Here a program is traced where it is lowered for its platform, and equal
calls share one function of the lowered program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from actjax.kernels.layers import Layer, is_layer_of_stack, value_of

Static = tuple[tuple[str, Any], ...]
"""Options of a kernel, as sorted items of hashable values."""


Writes = Literal["nothing", "operands", "results"]
"""Results that a kernel writes into stacks: those that replace a `Layer` among its operands, or any
that it gets a `Layer` for."""


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

    @property
    def addend(self) -> tuple[int, int] | None:
        """Numbers of an argument that is added to a result, and of this result; None without."""
        ...

    @property
    def converts(self) -> bool:
        """Whether numbers of 16 bits may take the place of the first argument in float32."""
        ...

    @property
    def takes_tail(self) -> bool:
        """Whether the last argument may be a `Tail`."""
        ...

    @property
    def writes_layers(self) -> "Writes":
        """Which results can be written into stacks."""
        ...

    def compute(
        self, platform: str | None, chosen: Any, static: Static, *args: Any, into: Any = None
    ) -> Any:
        """Computes the function in a program that is lowered for a platform.

        Args:
          platform: "cuda" or "tpu"; None for any other.
          chosen: "reference" for the definition, which has the derivatives; or another way.
          static: the options.
          *args: the arguments, in which a `Layer` may be in the place of an array.
          into: for `writes_layers` "results": the result, with a `Layer` in the place of each array
            that may be written there; None elsewhere, or for no such array.
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
      returned: structure of the result.
      results: shape and dtype of each array that the call returns.
      axes: for each `jax.vmap` around the call, innermost first, the mapped axes of the leaves.
      layers: which leaves are layers of stacks, of which the call gets the stacks; after the leaves
        of the arguments come stacks that are only written, and then the index. Empty for none.
      into: for each result, the leaf that it is written into; None for a new array. As `layers`.
    """

    kernel: Computation
    chosen: Any
    options: Static
    arguments: Any
    returned: Any
    results: tuple[tuple[tuple[int, ...], Any], ...]
    axes: tuple[tuple[int | None, ...], ...] = ()
    layers: tuple[bool, ...] = ()
    into: tuple[int | None, ...] = ()

    def __repr__(self) -> str:
        return self.kernel.name

    def on(self, platform: str | None) -> Callable[..., list[jax.Array]]:
        """Returns what a platform computes, as a function of leaves that returns leaves.

        Args:
          platform: "cuda" or "tpu"; None for any other.
        """

        def run(*leaves: jax.Array) -> list[jax.Array]:
            if self.layers:
                return self._on_layers(platform, leaves)
            args = jax.tree.unflatten(self.arguments, leaves)
            return jax.tree.leaves(self.kernel.compute(platform, self.chosen, self.options, *args))

        return functools.reduce(jax.vmap, self.axes, run)

    def _on_layers(self, platform: str | None, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns results, of which those that are written into a stack are the stack."""
        *arrays, index = leaves
        operands: list[Any] = [
            Layer(x, index) if is_layer else x
            for x, is_layer in zip(arrays, self.layers, strict=True)
        ]
        args = jax.tree.unflatten(self.arguments, operands[: self.arguments.num_leaves])
        places = [None if i is None else operands[i] for i in self.into]
        into = None
        if self.kernel.writes_layers == "results":
            into = jax.tree.unflatten(self.returned, places)
        results = self.kernel.compute(platform, self.chosen, self.options, *args, into=into)
        leaves = jax.tree.leaves(results, is_leaf=is_layer_of_stack)
        pairs = zip(leaves, places, strict=True)
        return [value_of(y) if at is None else at.holding(y).stack for y, at in pairs]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def traced_once(program: Callable, options: Static, *args: Any, **arrays: Any) -> Any:
    """Returns `program(*args, **options)`. It is jitted, so that equal calls share one trace.

    Args:
      program: a function of pytrees of arrays.
      options: its options.
      *args: its arguments.
      **arrays: further arguments, by name.
    """
    return program(*args, **arrays, **dict(options))


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
    outputs = _kernel.bind(*leaves, call=_Call(kernel, chosen, options, arguments, returned, known))
    return jax.tree.unflatten(returned, outputs)


def is_kernel(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a call of a kernel."""
    return eqn.primitive is _kernel


def sum_of(eqn: core.JaxprEqn) -> Any:
    """Returns the result of a call that the kernel could add an array to; None without one."""
    if not is_kernel(eqn):
        return None
    call: _Call = eqn.params["call"]
    if call.axes or call.kernel.addend is None:
        return None
    argument, result = call.kernel.addend
    args = jax.tree.unflatten(call.arguments, eqn.invars)
    return eqn.outvars[result] if args[argument] is None else None


def with_addend(eqn: core.JaxprEqn, addend: Any, total: Any) -> core.JaxprEqn:
    """Returns the call whose result `sum_of` is the sum with another array.

    Args:
      eqn: the call.
      addend: variable of the array.
      total: variable of the sum.
    """
    call: _Call = eqn.params["call"]
    assert call.kernel.addend is not None
    argument, result = call.kernel.addend
    args = [*jax.tree.unflatten(call.arguments, eqn.invars)]
    args[argument] = addend
    invars, arguments = jax.tree.flatten(tuple(args))
    outvars = [*eqn.outvars]
    outvars[result] = total
    params = {**eqn.params, "call": dataclasses.replace(call, arguments=arguments)}
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def takes_tail(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a call of a kernel that can take a `Tail`."""
    return is_kernel(eqn) and not eqn.params["call"].axes and eqn.params["call"].kernel.takes_tail


def equation(
    kernel: Computation, chosen: Any, args: tuple, results: Any, like: core.JaxprEqn
) -> core.JaxprEqn:
    """Returns a call of a kernel without options, as an equation.

    Args:
      kernel: the kernel.
      chosen: how to compute it, as for `Computation.compute`.
      args: its arguments, with variables in the place of arrays.
      results: its result, likewise.
      like: an equation with the context of the call.
    """
    invars, arguments = jax.tree.flatten(args)
    outvars, returned = jax.tree.flatten(results)
    known = tuple((x.aval.shape, x.aval.dtype) for x in outvars)
    call = _Call(kernel, chosen, (), arguments, returned, known)
    return like.replace(
        invars=invars, outvars=outvars, primitive=_kernel, params={"call": call}, effects=set()
    )


def with_tail(
    eqn: core.JaxprEqn, tail: Any, outputs: Sequence[Any], sums: Sequence[Any]
) -> core.JaxprEqn:
    """Returns the call with a `Tail` behind its first result.

    Args:
      eqn: the call.
      tail: the `Tail`, with variables in the place of arrays.
      outputs: variables of its outputs.
      sums: variables of its sums of squares.
    """
    call: _Call = eqn.params["call"]
    args = jax.tree.unflatten(call.arguments, eqn.invars)
    invars, arguments = jax.tree.flatten((*args, tail))
    _, *others = jax.tree.unflatten(call.returned, eqn.outvars)
    outvars, returned = jax.tree.flatten((([*outputs], [*sums]), *others))
    known = tuple((x.aval.shape, x.aval.dtype) for x in outvars)
    new = dataclasses.replace(call, arguments=arguments, returned=returned, results=known)
    params = {**eqn.params, "call": new}
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def converts(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a call of a kernel that converts its first array itself."""
    return is_kernel(eqn) and eqn.params["call"].kernel.converts


def writes_layers(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a call of a kernel that can write into stacks."""
    return is_kernel(eqn) and eqn.params["call"].kernel.writes_layers != "nothing"


def call_on_layers(
    eqn: core.JaxprEqn, leaves: Sequence[Any], into: Sequence[Layer | None]
) -> list[Any]:
    """Returns the results of a call of a kernel, some of whose arrays are layers of stacks.

    Args:
      eqn: the call.
      leaves: its arrays, or `Layer`s of stacks; the first may be a `Scaled`.
      into: for each result, the layer that it replaces, of which the result is then returned; None
        for a new array.
    """
    call: _Call = eqn.params["call"]
    if call.axes:
        outputs = _kernel.bind(*map(value_of, leaves), call=call)
        return [y if at is None else at.holding(y) for y, at in zip(outputs, into, strict=True)]
    args = jax.tree.unflatten(call.arguments, leaves)
    operands, arguments = jax.tree.flatten(args, is_leaf=is_layer_of_stack)
    places: list[int | None] = []
    for layer in into:
        same = (i for i, x in enumerate(operands) if _is_same(x, layer))
        place = None if layer is None else next(same, len(operands))
        if place == len(operands) and call.kernel.writes_layers == "operands":
            place = None
        elif place == len(operands):
            operands.append(layer)
        places.append(place)
    results = tuple(
        (shape if place is None else operands[place].stack.shape, dtype)
        for (shape, dtype), place in zip(call.results, places, strict=True)
    )
    flags = tuple(isinstance(x, Layer) for x in operands)
    in_place = dataclasses.replace(
        call, arguments=arguments, results=results, layers=flags, into=tuple(places)
    )
    index = next((x.index for x in operands if isinstance(x, Layer)), jnp.zeros((), jnp.int32))
    arrays = [x.stack if isinstance(x, Layer) else x for x in operands]
    outputs = _kernel.bind(*arrays, index, call=in_place)
    written = []
    for y, place, layer in zip(outputs, places, into, strict=True):
        if place is not None:
            y = dataclasses.replace(operands[place], stack=y)
        written.append(y if layer is None else layer.holding(y))
    return written


def _is_same(x: Any, layer: Layer | None) -> bool:
    return isinstance(x, Layer) and layer is not None and x.stack is layer.stack


_kernel = core.Primitive("actjax_kernel")
_kernel.multiple_results = True


@functools.partial(jax.jit, static_argnames="call")
def _jitted(*leaves: jax.Array, call: _Call) -> list[jax.Array]:
    return _kernel.bind(*leaves, call=call)


@_kernel.def_impl
def _run(*leaves: jax.Array, call: _Call) -> list[jax.Array]:
    # As JAX runs its own primitives: without jit the kernel would call itself.
    with jax.disable_jit(False):
        return _jitted(*leaves, call=call)


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
    if call.layers:
        call = dataclasses.replace(call, chosen="reference")
    batched = dataclasses.replace(call, results=results, axes=(*call.axes, mapped))
    outputs = _kernel.bind(*leaves, call=batched)
    return outputs, [0] * len(outputs)


def _lowered(platform: str | None, ctx: mlir.LoweringRuleContext, *values: Any, call: _Call) -> Any:
    return mlir.lower_fun(call.on(platform), multiple_results=True)(ctx, *values)


ad.primitive_jvps[_kernel] = _jvp
batching.primitive_batchers[_kernel] = _batched
for _platform in ("cuda", "tpu", None):
    mlir.register_lowering(_kernel, functools.partial(_lowered, _platform), _platform, inline=False)
