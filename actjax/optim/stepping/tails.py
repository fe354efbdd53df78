"""Chains of element-wise operations that become kernels, or the tail of a kernel before them.

In an update of a weight such a chain leads from the gradient, or from the result of a kernel, to
the new weight and the new moments. XLA for GPUs would write what two of them read to memory, and
new moments twice: into arrays and from there into their stacks.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from actjax.kernels import primitive
from actjax.kernels.elementwise.api import KERNEL
from actjax.kernels.tail import Elementwise, Tail, can_run
from actjax.optim.stepping.square_norm import SQUARES, sampled_rows

Variable = Any
"""A `core.Var`, of which JAX does not say that its `aval` has a shape."""

_WRITTEN = {
    "dot_general", "ragged_dot", "conv_general_dilated", "scatter-add", "scatter", "scan", "while",
    "cond", "optimization_barrier", "cholesky", "triangular_solve", "eigh", "qr", "ffi_call",
}  # fmt: skip
"""Operations whose results XLA for GPUs writes to memory."""

_LARGEST_OF_SCALARS = 2**10
"""Largest size of an array that a kernel gets for one of its numbers."""
_LEAST = 2**16
"""Least size of a matrix: for smaller ones memory costs less than a kernel."""


def with_tails(jaxpr: core.Jaxpr, replaced: Mapping[Variable, Variable]) -> core.Jaxpr:
    """Returns a program in which chains that lead to its outputs are kernels.

    Args:
      jaxpr: a program without calls.
      replaced: for outputs, the input in whose place they are written.
    """
    for outputs in [chain.outputs for chain in _chains(jaxpr)]:
        # The operations have other numbers after the last chain.
        chain = next(chain for chain in _chains(jaxpr) if chain.outputs == outputs)
        jaxpr = _with_chain(jaxpr, chain, replaced) or jaxpr
    return jaxpr


@dataclasses.dataclass
class _Chain:
    """Element-wise operations on matrices of one shape, behind which are outputs of a program.

    Attributes:
      shape: the shape.
      outputs: the outputs.
      eqns: numbers of the operations.
    """

    shape: tuple[int, ...]
    outputs: list[Variable]
    eqns: set[int]


def _chains(jaxpr: core.Jaxpr) -> list[_Chain]:
    """Returns the chains behind the outputs; outputs that share operations share a chain."""
    makers: dict[Any, int] = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in eqn.outvars}
    chains: list[_Chain] = []
    for output in dict.fromkeys(_variables(jaxpr.outvars)):
        shape = _shape(output)
        if len(shape) != 2 or math.prod(shape) < _LEAST:
            continue
        eqns, found = set(), [output]
        while found:
            number = makers.get(found.pop())
            if number is None or number in eqns:
                continue
            eqn = jaxpr.eqns[number]
            part = makers.get(eqn.invars[0]) if eqn.primitive.name == "pad" else None
            if part is not None:
                if _is_padded_again(jaxpr.eqns[part], eqn, shape):
                    eqns |= {number, part}
                    found += jaxpr.eqns[part].invars
            elif _is_elementwise(eqn, shape):
                eqns.add(number)
                found += _matrices(eqn.invars, shape)
        if eqns:
            shared = [x for x in chains if x.shape == shape and x.eqns & eqns]
            chains = [x for x in chains if x not in shared]
            outputs = [y for x in shared for y in x.outputs]
            chains.append(_Chain(shape, [*outputs, output], eqns.union(*(x.eqns for x in shared))))
    return chains


def _is_elementwise(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    shapes = [_shape(x) for x in eqn.invars]
    if len(eqn.outvars) != 1 or _shape(eqn.outvars[0]) != shape:
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return shapes == [()]
    if eqn.primitive.name == "iota":
        return True
    return can_run(eqn) and all(x in (shape, ()) for x in shapes)


def _is_padded_again(eqn: core.JaxprEqn, pad: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Returns whether a padding gives a slice of first rows and columns its shape back."""
    if eqn.primitive.name != "slice" or _shape(eqn.invars[0]) != shape:
        return False
    params = eqn.params
    at_end = all(low == between == 0 for low, _, between in pad.params["padding_config"])
    is_first = not any(params["start_indices"]) and {*(params["strides"] or (1,))} == {1}
    return at_end and is_first and _shape(pad.outvars[0]) == shape


def _with_chain(
    jaxpr: core.Jaxpr, chain: _Chain, replaced: Mapping[Variable, Variable]
) -> core.Jaxpr | None:
    """Returns a program in which a chain is one kernel; None if that moves no fewer bytes."""
    eqns = [jaxpr.eqns[i] for i in sorted(chain.eqns)]
    made = {x: None for eqn in eqns for x in eqn.outvars}
    read = dict.fromkeys(x for eqn in eqns for x in _variables(eqn.invars) if x not in made)
    readers = collections.defaultdict(list)
    for i, eqn in enumerate(jaxpr.eqns):
        for x in _variables(eqn.invars):
            readers[x].append(i)
    whole = _matrices((*made, *read), chain.shape)
    squares = [i for x in whole for i in readers[x] if _is_square(jaxpr.eqns[i])]
    base = _base(jaxpr, [x for x in read if {*readers[x]} <= chain.eqns.union(squares)])
    firsts = [] if base is None else [jaxpr.eqns[base].outvars[0]]
    matrices = [x for x in _matrices(read, chain.shape) if x not in firsts]
    places = [_position(replaced.get(x), matrices) for x in chain.outputs]
    makers = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    if not all(_is_in_memory(x, makers) for x in matrices):
        return None
    if base is None and places == [None] * len(places):
        return None
    squares = [i for i in squares if jaxpr.eqns[i].invars[0] in [*made, *firsts]]
    scalars = [x for x in read if _shape(x) == ()]
    elements = [_element_of(x, makers) for x in scalars]
    program = Elementwise(
        tuple(eqns),
        (*firsts, *matrices, *scalars),
        (*chain.outputs, *(_variables(jaxpr.eqns[i].invars)[0] for i in squares)),
        bool(firsts),
        len(matrices),
        tuple(position for _, position in elements),
        tuple(places),
        tuple(sampled_rows(chain.shape) for _ in squares),
    )
    # Others that read an output in the middle of the chain compute it themselves.
    outputs = {x: core.Var(x.aval) for x in chain.outputs}
    sums = [jaxpr.eqns[i].outvars[0] for i in squares]
    last = max(chain.eqns)
    like = jaxpr.eqns[last if base is None else base]
    call = like
    if base is None:
        call = primitive.equation(KERNEL, KERNEL.chosen(None, (), {}), (), (None,), like)
    tail = Tail(tuple(matrices), tuple(array for array, _ in elements), program)
    call = primitive.with_tail(call, tail, [*outputs.values()], sums)
    numbered = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if i != base and i not in squares]
    ordered = _ordered([*numbered, (last, call)])
    if ordered is None:  # A scalar of the chain depends on a sum of squares of it.
        return None
    outvars = [outputs.get(x, x) if isinstance(x, core.Var) else x for x in jaxpr.outvars]
    merged = jaxpr.replace(eqns=ordered, outvars=outvars)
    return partial_eval.dce_jaxpr(merged, [True] * len(outvars), instantiate=True)[0]


def _base(jaxpr: core.Jaxpr, candidates: Sequence[Variable]) -> int | None:
    """Returns the number of a call that can take a tail, with its first result among candidates."""
    calls = (i for i, eqn in enumerate(jaxpr.eqns) if primitive.takes_tail(eqn))
    outputs = _variables(jaxpr.outvars)
    firsts = ((i, jaxpr.eqns[i].outvars[0]) for i in calls)
    return next((i for i, x in firsts if x in candidates and x not in outputs), None)


def _is_square(eqn: core.JaxprEqn) -> bool:
    return primitive.is_kernel(eqn) and eqn.params["call"].kernel is SQUARES


def _is_in_memory(x: Variable, makers: Mapping[Variable, core.JaxprEqn]) -> bool:
    """Returns whether a matrix is written to memory before its readers, whatever they are.

    XLA computes the others within the fusion that reads them, such as moments that are decoded or a
    row that is copied to a matrix.
    """
    while x in makers and makers[x].primitive.name in ("reshape", "squeeze", "name"):
        x = makers[x].invars[0]
    maker = makers.get(x)
    return maker is None or primitive.is_kernel(maker) or maker.primitive.name in _WRITTEN


def _element_of(x: Variable, makers: Mapping[Variable, core.JaxprEqn]) -> tuple[Variable, int]:
    """Returns a small array of which a scalar is one number, and its place in row-major order.

    A kernel reads the number there. XLA for GPUs would first copy it, in a kernel for each.
    """
    position = 0
    while x in makers:
        eqn = makers[x]
        source = eqn.invars[0] if eqn.invars else None
        if not isinstance(source, core.Var) or math.prod(_shape(source)) > _LARGEST_OF_SCALARS:
            break
        if eqn.primitive.name == "slice" and {*(eqn.params["strides"] or (1,))} == {1}:
            place = np.unravel_index(position, _shape(x))
            place = np.add(place, eqn.params["start_indices"])
            position = int(np.ravel_multi_index(tuple(place), _shape(source)))
        elif eqn.primitive.name not in ("squeeze", "reshape"):
            break
        x = source
    return x, position


def _ordered(numbered: Sequence[tuple[int, core.JaxprEqn]]) -> list[core.JaxprEqn] | None:
    """Returns equations in an order in which each comes after those that it reads.

    Args:
      numbered: the equations, with numbers that they are ordered by where they can be.

    Returns:
      None if there is no such order.
    """
    makers = {x: i for i, (_, eqn) in enumerate(numbered) for x in eqn.outvars}
    needs = [{makers[x] for x in _variables(eqn.invars) if x in makers} for _, eqn in numbered]
    readers = collections.defaultdict(list)
    for i, needed in enumerate(needs):
        for j in needed:
            readers[j].append(i)
    waiting = [len(needed) for needed in needs]
    ready = [(number, i) for i, (number, _) in enumerate(numbered) if not waiting[i]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(numbered[i][1])
        for j in readers[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (numbered[j][0], j))
    return ordered if len(ordered) == len(numbered) else None


def _position(x: Variable | None, among: Sequence[Variable]) -> int | None:
    return among.index(x) if x is not None and x in among else None


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape


def _variables(atoms: Iterable[Any]) -> list[Variable]:
    return [x for x in atoms if isinstance(x, core.Var)]


def _matrices(atoms: Iterable[Any], shape: tuple[int, ...]) -> list[Variable]:
    return [x for x in _variables(atoms) if _shape(x) == shape]
