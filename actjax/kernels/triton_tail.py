"""A `Tail` in programs in Triton: a list of operations that the compiler of a program reads.

A program gets the operations as a constant, and has a fixed number of arguments for the arrays:
Triton has no functions of any number of arrays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax.extend import core

from actjax.kernels.layers import Layer, Result, value_of
from actjax.kernels.tail import Elementwise, Tail
from actjax.kernels.triton_call import step

MATRICES, SCALARS, OUTPUTS, SUMS = 6, 10, 4, 2
"""Most arrays of a tail that a program takes."""
_OPERATIONS = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "ceil", "clamp",
    "convert_element_type", "div", "eq", "exp", "exp2", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sqrt", "square", "stop_gradient", "sub", "xor", "iota", "broadcast_in_dim", "slice", "pad",
}  # fmt: skip
_CONVERSIONS = {"bitcast_convert_type", "convert_element_type", "pad", "same", "select_n", "iota"}
_LARGEST_POWER = 8
_TYPES = {
    "bool": tl.int1, "int8": tl.int8, "int16": tl.int16, "int32": tl.int32, "uint8": tl.uint8,
    "uint16": tl.uint16, "uint32": tl.uint32, "bfloat16": tl.bfloat16, "float16": tl.float16,
    "float32": tl.float32,
}  # fmt: skip


def refuses(tail: Tail) -> str | None:
    """Returns why programs in Triton cannot take a tail; None if they can."""
    program = tail.program
    counts = {
        "matrices": (program.matrices, MATRICES),
        "scalars": (len(program.positions), SCALARS),
        "outputs": (len(program.replaced), OUTPUTS),
        "sums": (len(program.strides), SUMS),
    }
    for name, (count, most) in counts.items():
        if count > most:
            return f"takes a tail of up to {most} {name}, got {count}"
    for eqn in program.eqns:
        name, atoms = eqn.primitive.name, [*eqn.invars, *eqn.outvars]
        if name not in _OPERATIONS:
            return f"has no operation {name}"
        if name == "div" and not jnp.issubdtype(_dtype(atoms[0]), jnp.floating):
            return "divides floating point numbers only"
        if name == "integer_pow" and not 1 <= abs(eqn.params["y"]) <= _LARGEST_POWER:
            return f"has no power of {eqn.params['y']}"
        if name == "shift_right_logical" and _dtype(atoms[0]).itemsize != 4:
            return "shifts numbers of 32 bits only"
        types = {str(_dtype(x)) for x in atoms}
        if not types <= set(_TYPES):
            return f"takes no numbers of {', '.join(sorted(types - set(_TYPES)))}"
    # Arrays of bools have no type of their own in memory.
    is_bool = [_dtype(x) == np.dtype(bool) for x in (*tail.matrices, *program.shapes)]
    return "takes no matrices of bools" if any(is_bool) else None


def _dtype(x: Any) -> Any:
    return x.aval.dtype if hasattr(x, "aval") and not isinstance(x, jax.Array) else x.dtype


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a program gets of a tail, or of none.

    Attributes:
      arguments: `MATRICES` matrices and `SCALARS` arrays that have the scalars.
      results: `OUTPUTS` outputs and `SUMS` sums of squares of each program.
      constants: the operations and the places of numbers, for `run`; None without a tail.
    """

    arguments: list[Any]
    results: list[Result]
    constants: tuple[Any, ...] | None


def operands(tail: Tail | None, form: Callable[[Any], Any], programs: int) -> Operands:
    """Returns what a program gets of a tail.

    Args:
      tail: the tail; None for none.
      form: brings a matrix into the form that the program takes.
      programs: number of programs.
    """
    dummy = jnp.zeros(1, jnp.float32)
    if tail is None:
        nothing = [jax.ShapeDtypeStruct((1, 1), jnp.float32)] * (OUTPUTS + SUMS)
        return Operands([dummy] * (MATRICES + SCALARS), nothing, None)
    program = tail.program
    matrices: list[Any] = [form(x) for x in tail.matrices]
    results = tail.results(matrices, programs)
    outputs, sums = results[: len(program.replaced)], results[len(program.replaced) :]
    # A layer that an output replaces is read where it is written.
    source = [-1] * len(matrices)
    for number, i in enumerate(program.replaced):
        if i is not None and isinstance(outputs[number], Layer):
            source[i] = number
    steps = [step(x) for x in matrices]
    constants = (
        _operations(program),
        tuple(zip(source, steps, strict=True)),
        tuple(program.positions),
        tuple(step(x) for x in outputs),
        tuple(program.strides),
        program.has_first,
    )
    matrices = [dummy if n >= 0 else x for x, n in zip(matrices, source, strict=True)]
    scalars = [value_of(x).reshape(-1) for x in tail.scalars]
    scalars = [x.astype(jnp.int8) if x.dtype == bool else x for x in scalars]
    unused = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return Operands(
        [*_filled(matrices, MATRICES, dummy), *_filled(scalars, SCALARS, dummy)],
        [*_filled(outputs, OUTPUTS, unused), *_filled(sums, SUMS, unused)],
        constants,
    )


def finished(tail: Tail, results: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
    """Returns what `Tail.on_arrays` returns, from the results of a program."""
    outputs = results[: len(tail.program.replaced)]
    sums = results[OUTPUTS : OUTPUTS + len(tail.program.strides)]
    return tail.finished([*outputs, *sums])


def _filled(arrays: Sequence[Any], count: int, with_: Any) -> list[Any]:
    return [*arrays, *[with_] * (count - len(arrays))]


def _operations(program: Elementwise) -> tuple[tuple[Any, ...], ...]:
    """Returns, for each number that is computed: operation, operands, type, what else it needs, and
    whether it is computed in 32 bits and then rounded.

    An operand is the place of a number in the list of all, from the inputs on, or -1 before a
    constant and its type. Outputs are the last ones.
    """
    places = {x: i for i, x in enumerate(program.inputs)}

    def operand(x: Any) -> Any:
        if isinstance(x, core.Literal):
            return -1, np.asarray(x.val).item(), _TYPES[str(x.aval.dtype)]
        return places[x], None, None

    lines: list[tuple[Any, ...]] = []
    for eqn in program.eqns:
        result: Any = eqn.outvars[0]
        name, kind, more = eqn.primitive.name, _TYPES[str(result.aval.dtype)], None
        if name == "integer_pow":
            more = eqn.params["y"]
        elif name == "iota":
            more = eqn.params["dimension"]
        elif name == "pad":
            existing: Any = eqn.invars[0]
            more = existing.aval.shape
        elif name in ("broadcast_in_dim", "slice", "stop_gradient"):
            name = "same"
        is_small = kind in (tl.bfloat16, tl.float16) and name not in _CONVERSIONS
        lines.append((name, tuple(map(operand, eqn.invars)), kind, more, is_small))
        places[result] = len(places)
    for x in program.outputs:
        kind: Any = x
        lines.append(("same", (operand(x),), _TYPES[str(kind.aval.dtype)], None, False))
    return tuple(lines)


@triton.jit
def run(
    first, matrices, scalars, outputs, sums, layer, row, column, place, mask, TAIL: tl.constexpr
):
    """Runs on one block of numbers, and writes the outputs and the sums of squares of a program.

    Args:
      first: the numbers of the result of the kernel; anything if `Elementwise.has_first` is false.
      matrices: pointers to the matrices.
      scalars: pointers to the arrays that have the scalars.
      outputs: pointers to the outputs.
      sums: pointers to the sums.
      layer: index of the layer of stacks, int64.
      row: rows of the numbers.
      column: their columns.
      place: their places in a matrix.
      mask: which of them exist; None for all.
      TAIL: from `Operands`.
    """
    LINES: tl.constexpr = TAIL[0]
    values = ()
    if TAIL[5]:
        values = values + (first,)
    for i in tl.static_range(len(TAIL[1])):
        SOURCE: tl.constexpr = TAIL[1][i][0]
        matrix = matrices[i] if SOURCE < 0 else outputs[SOURCE]
        values = values + (tl.load(matrix + layer * TAIL[1][i][1] + place, mask),)
    for i in tl.static_range(len(TAIL[2])):
        values = values + (tl.load(scalars[i] + TAIL[2][i]),)
    for i in tl.static_range(len(LINES)):
        values = values + (_computed(values, row, column, LINES[i]),)
    COUNT: tl.constexpr = len(values) - len(TAIL[3]) - len(TAIL[4])
    for i in tl.static_range(len(TAIL[3])):
        target = outputs[i] + layer * TAIL[3][i] + place
        tl.store(target, values[COUNT + i].to(target.dtype.element_ty), mask)
    for i in tl.static_range(len(TAIL[4])):
        size = values[COUNT + len(TAIL[3]) + i].to(tl.float32)
        is_read = (row % TAIL[4][i] == 0) & (column >= 0)
        square = tl.where(is_read if mask is None else is_read & mask, size * size, 0.0)
        tl.store(sums[i] + tl.program_id(0), tl.sum(square))


@triton.jit
def _operand(values, AT: tl.constexpr):
    """A number by its place, or a constant."""
    if AT[0] < 0:
        return tl.full((1, 1), AT[1], AT[2])
    else:
        return values[AT[0]]


@triton.jit
def _computed(values, row, column, LINE: tl.constexpr):
    """The result of a line of `_operations`."""
    if LINE[0] == "iota":
        return (row if LINE[3] == 0 else column).to(LINE[2])
    else:
        x = _operand(values, LINE[1][0])
        y = x if len(LINE[1]) < 2 else _operand(values, LINE[1][1])
        z = x if len(LINE[1]) < 3 else _operand(values, LINE[1][2])
        if LINE[4]:
            # As XLA: the operation in 32 bits is rounded once.
            x, y, z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
            return _arithmetic(x, y, z, tl.float32, LINE[0], LINE[3]).to(LINE[2])
        else:
            return _chosen(x, y, z, row, column, LINE[2], LINE[0], LINE[3])


@triton.jit
def _chosen(
    x, y, z, row, column, KIND: tl.constexpr, NAME: tl.constexpr, MORE: tl.constexpr
):
    """The result of an operation that moves, converts or compares numbers, or computes others."""
    if NAME == "same":
        return x.to(KIND)
    elif NAME == "bitcast_convert_type":
        return x.to(KIND, bitcast=True)
    elif NAME == "convert_element_type":
        if KIND == tl.int1:
            return x != 0
        else:
            return x.to(KIND)
    elif NAME == "pad":
        return tl.where((row < MORE[0]) & (column < MORE[1]), x, y)
    elif NAME == "select_n":
        return tl.where(x, z, y)
    elif NAME == "eq":
        return x == y
    elif NAME == "ne":
        return x != y
    elif NAME == "lt":
        return x < y
    elif NAME == "le":
        return x <= y
    elif NAME == "gt":
        return x > y
    elif NAME == "ge":
        return x >= y
    elif NAME == "is_finite":
        return tl.abs(x.to(tl.float32)) < float("inf")
    elif NAME == "not":
        if KIND == tl.int1:
            return x == 0
        else:
            return ~x
    else:
        return _arithmetic(x, y, z, KIND, NAME, MORE)


@triton.jit
def _arithmetic(x, y, z, KIND: tl.constexpr, NAME: tl.constexpr, MORE: tl.constexpr):
    """The result of an operation whose operands and result have one type, of 32 bits if a float."""
    if NAME == "add" or NAME == "add_any":
        return (x + y).to(KIND)
    elif NAME == "sub":
        return (x - y).to(KIND)
    elif NAME == "mul":
        return (x * y).to(KIND)
    elif NAME == "square":
        return (x * x).to(KIND)
    elif NAME == "div":
        return x / y
    elif NAME == "neg":
        return -x
    elif NAME == "abs":
        return tl.abs(x)
    elif NAME == "sign":
        one = tl.full((1, 1), 1, KIND)
        return tl.where(x > 0, one, tl.where(x < 0, -one, x))
    elif NAME == "max":
        return _largest(x, y, KIND)
    elif NAME == "min":
        return _smallest(x, y, KIND)
    elif NAME == "clamp":
        return _smallest(_largest(y, x, KIND), z, KIND)
    elif NAME == "sqrt":
        return tl.sqrt(x)
    elif NAME == "rsqrt":
        return tl.rsqrt(x)
    elif NAME == "exp":
        return tl.exp(x)
    elif NAME == "exp2":
        return tl.exp2(x)
    elif NAME == "log":
        return tl.log(x)
    elif NAME == "logistic":
        return 1.0 / (1.0 + tl.exp(-x))
    elif NAME == "floor":
        return tl.floor(x)
    elif NAME == "ceil":
        return tl.ceil(x)
    elif NAME == "integer_pow":
        return _power(x, MORE)
    elif NAME == "and":
        return x & y
    elif NAME == "or":
        return x | y
    elif NAME == "xor":
        return x ^ y
    elif NAME == "shift_left":
        return x << y
    elif NAME == "shift_right_arithmetic":
        return x >> y
    else:
        tl.static_assert(NAME == "shift_right_logical")
        # Only a number without a sign is shifted without it; `refuses` lets 32 bits pass alone.
        return (x.to(tl.uint32, bitcast=True) >> y.to(tl.uint32, bitcast=True)).to(
            KIND, bitcast=True
        )


@triton.jit
def _power(x, POWER: tl.constexpr):
    SIZE: tl.constexpr = POWER if POWER > 0 else -POWER
    power = x
    for _ in tl.static_range(1, SIZE):
        power = power * x
    if POWER > 0:
        return power
    else:
        return 1.0 / power


@triton.jit
def _largest(x, y, KIND: tl.constexpr):
    if KIND.is_floating():
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(x, y)


@triton.jit
def _smallest(x, y, KIND: tl.constexpr):
    if KIND.is_floating():
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(x, y)
