"""Loops over stacked layers whose kernels read and write the stacks where they are.

The function of one layer is traced once. Where an array of the layer goes straight into a kernel,
the kernel gets the stack and the index; where a kernel computes an array that the loop writes into
a stack, the kernel writes it there. Kernels also take over operations beside them
(`actjax.optim.stepping.fusion`). All else is sliced and written back as usual, and the results are
the same to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax._host import is_on_host
from actjax._shards import is_partitioned
from actjax.kernels import primitive
from actjax.kernels.layers import Layer, value_of
from actjax.optim.layers import put
from actjax.optim.stepping.copies import with_copies
from actjax.optim.stepping.fusion import Gradients, with_sums
from actjax.optim.stepping.tails import with_tails
from actjax.residuals.graph.equations import context_of, run_equation
from actjax.residuals.graph.programs import inlined, run_inlined


def applies(*stacks: Any) -> bool:
    """Returns whether kernels may read and write these stacks: on a GPU that holds them alone."""
    on_host = any(map(is_on_host, jax.tree.leaves(stacks)))
    return jax.default_backend() == "gpu" and not on_host and not is_partitioned(stacks)


def update(
    fun: Callable[..., tuple[Any, Any]], index: jax.Array, stacks: Any, read: Any, *args: Any
) -> tuple[Any, Any]:
    """Returns stacks whose layer `index` is replaced, and other results.

    Args:
      fun: `fun(layer, read_layer, *args)` returns the new layer, in the structure and the shapes of
        the old one, and other results. The new layer is converted to the dtypes of the old one.
      index: int32 scalar.
      stacks: arrays with a leading axis of layers.
      read: further such arrays, which are only read.
      *args: further arguments.
    """
    shapes = jax.tree.map(_shape_of_layer, (stacks, read))
    written, treedef = jax.tree.flatten(stacks)

    def converted(layer: Any, *args: Any) -> tuple[Any, Any]:
        new, others = fun(layer, *args)
        return jax.tree.map(lambda x, y: jnp.asarray(y).astype(x.dtype), layer, new), others

    program, (_, others) = _traced(converted, *shapes, *args, replaced=len(written))
    layers = [Layer(x, index) for x in jax.tree.leaves((stacks, read))]
    places = [*layers[: len(written)], *(None for _ in jax.tree.leaves(others))]
    results = _run(program, [*layers, *jax.tree.leaves(args)], places)
    new = [_written(at, y) for at, y in zip(layers, results[: len(written)], strict=False)]
    others = jax.tree.unflatten(jax.tree.structure(others), results[len(written) :])
    return treedef.unflatten(new), others


def scan(fun: Callable[..., tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """Returns `jax.lax.scan(fun, carry, xs)`, in which kernels write into the stack of `ys`.

    The stack is not filled with zeros first.

    Args:
      fun: as for `jax.lax.scan`.
      carry: as for `jax.lax.scan`.
      xs: arrays with a leading axis of layers; at least one.
    """
    length = len(jax.tree.leaves(xs)[0])
    first, carried = jax.tree.flatten(carry)
    program, (_, ys) = _traced(fun, carry, jax.tree.map(_shape_of_layer, xs), carried=len(first))
    shapes, treedef = jax.tree.flatten(ys)
    if any(jnp.issubdtype(y.dtype, jax.dtypes.extended) for y in shapes):
        return jax.lax.scan(fun, carry, xs)  # Keys cannot be left unset.
    results: list[Any] = program.jaxpr.outvars
    if any(getattr(y.aval, "memory_space", None) == jax.memory.Space.Host for y in results):
        return jax.lax.scan(fun, carry, xs)

    def body(state: Any, slices: Any) -> tuple[Any, None]:
        carry, stacks = state
        i, x = slices
        places = [Layer(stack, i) for stack in stacks]
        inputs = [*carry, *jax.tree.leaves(x)]
        results = _run(program, inputs, [*(None for _ in carry), *places])
        carry, layers = results[: len(carry)], results[len(carry) :]
        return (carry, [_written(at, y) for at, y in zip(places, layers, strict=True)]), None

    indices = jnp.arange(length, dtype=jnp.int32)
    stacks = [jax.lax.empty((length, *y.shape), y.dtype) for y in shapes]
    (last, stacks), _ = jax.lax.scan(body, (first, stacks), (indices, xs))
    return carried.unflatten(last), treedef.unflatten(stacks)


def _written(layer: Layer, value: Any) -> jax.Array:
    """Returns the stack with `value` in the place of a layer; a `Layer` is there already."""
    if isinstance(value, Layer):
        return value.stack
    # A constant of a program may be a number of Python.
    return put(layer.stack, jnp.asarray(value), layer.index)


def _shape_of_layer(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _traced(
    fun: Callable[..., Any], *args: Any, replaced: int = 0, carried: int | None = None
) -> tuple[core.ClosedJaxpr, Any]:
    """Returns the program of `fun(*args)` without calls, and the shapes of its results.

    Args:
      fun: the function.
      *args: its arguments.
      replaced: number of the leading arrays whose places the leading results take.
      carried: number of the leading results behind which all are written into stacks; None for
        those alone that replace arrays.
    """
    traced, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    program = inlined(traced, remat=True)
    jaxpr = with_sums(program.jaxpr)
    pairs = zip(jaxpr.outvars[:replaced], jaxpr.invars[:replaced], strict=True)
    jaxpr = with_tails(jaxpr, {y: x for y, x in pairs if isinstance(y, core.Var)})
    placed = range(replaced) if carried is None else range(carried, len(jaxpr.outvars))
    jaxpr = with_copies(jaxpr, placed, _producers(jaxpr))
    return core.ClosedJaxpr(jaxpr, program.consts), shapes


def _run(
    program: core.ClosedJaxpr, inputs: Sequence[Any], places: Sequence[Layer | None]
) -> list[Any]:
    """Returns the results of a program.

    Args:
      program: without calls.
      inputs: arrays, or `Layer`s of which kernels may read the stack.
      places: for each result, a layer that a kernel may write it into, so that the result is this
        layer; None for an array.
    """
    made_by, into = _producers(program.jaxpr), {}
    for var, place in zip(program.jaxpr.outvars, places, strict=True):
        if place is not None and isinstance(var, core.Var) and var in made_by:
            into[made_by[var]] = place
    values: dict[int, tuple[Layer, jax.Array]] = {}
    written: dict[int, tuple[Layer, Layer]] = {}
    gradients = Gradients()

    def read(x: Any) -> Any:
        """Returns an array; one slice of a layer for all that read it."""
        if not isinstance(x, Layer):
            return x
        if id(x) not in values:
            values[id(x)] = x, value_of(x)
        return values[id(x)][1]

    def handle(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        has_layers = any(isinstance(x, Layer) for x in inputs)
        if eqn.primitive.name in Gradients.primitives:
            arrays = [read(x) for x in inputs]
            return gradients.followed(eqn, arrays, run_equation(eqn, arrays))
        if primitive.is_kernel(eqn):
            targets = [into.get(var) for var in eqn.outvars]
            if primitive.converts(eqn):
                inputs = [gradients.source(inputs[0]), *inputs[1:]]
            with context_of(eqn):
                results = primitive.call_on_layers(eqn, inputs, targets)
            pairs = zip(results, targets, strict=True)
            written.update({id(y): (y, at) for y, at in pairs if isinstance(y, Layer) and at})
            return results
        if not has_layers:
            return None
        if eqn.primitive.name == "name":
            return inputs
        if eqn.primitive.name == "optimization_barrier":
            return _barrier(inputs, written)
        return run_equation(eqn, [read(x) for x in inputs])

    def is_there(y: Any, place: Layer | None) -> bool:
        """Returns whether a result is in its place: written there, or the old one unchanged."""
        if place is None or not isinstance(y, Layer):
            return False
        return written[id(y)][1] is place if id(y) in written else y.stack is place.stack

    results = run_inlined(program, inputs, handle)
    pairs = zip(results, places, strict=True)
    return [y if is_there(y, place) else read(y) for y, place in pairs]


def _barrier(inputs: Sequence[Any], written: dict[int, tuple[Layer, Layer]]) -> list[Any]:
    """Runs an optimization barrier, some of whose inputs are layers.

    It makes readers of a layer wait by the index. A layer that a kernel has written passes with its
    stack, so that what is behind the barrier waits for the kernel.

    Args:
      inputs: the inputs.
      written: layers that kernels have written, by id, with the layers that they replace.
    """
    index = next(x.index for x in inputs if isinstance(x, Layer))
    arrays: list[Any] = [x for x in inputs if not isinstance(x, Layer)]
    stacks = [x.stack for x in inputs if isinstance(x, Layer) and id(x) in written]
    *passed, index = jax.lax.optimization_barrier((*arrays, *stacks, index))
    arrays, stacks = passed[: len(arrays)], passed[len(arrays) :]
    results, free_arrays, free_stacks = [], iter(arrays), iter(stacks)
    for x in inputs:
        if not isinstance(x, Layer):
            results.append(next(free_arrays))
            continue
        is_written = id(x) in written
        layer = Layer(next(free_stacks) if is_written else x.stack, index)
        if is_written:
            written[id(layer)] = layer, written[id(x)][1]
        results.append(layer)
    return results


def _producers(jaxpr: core.Jaxpr) -> dict[core.Var, core.Var]:
    """Returns the variables that kernels compute which can write them into stacks.

    Returns:
      By variable, the variable that the kernel returns: itself, or the input of names and barriers
      that the value has passed.
    """
    made_by: dict[core.Var, core.Var] = {}
    for eqn in jaxpr.eqns:
        if primitive.writes_layers(eqn):
            made_by |= {var: var for var in eqn.outvars}
        elif eqn.primitive.name in ("name", "optimization_barrier"):
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            made_by |= {y: made_by[x] for x, y in pairs if isinstance(x, core.Var) and x in made_by}
    return made_by
