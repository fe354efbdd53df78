"""A `Tail` for programs in Triton: its operations as a constant, and its arrays.

Programs have a fixed number of arguments for the arrays, since Triton has no functions of any
number of them. `actjax.kernels.triton_operations` runs the operations.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    # Triton has no pointers to bools.
    is_bool = [_dtype(x) == np.dtype(bool) for x in (*tail.matrices, *program.shapes)]
    return "takes no matrices of bools" if any(is_bool) else None


def _dtype(x: Any) -> Any:
    return x.aval.dtype if hasattr(x, "aval") and not isinstance(x, jax.Array) else x.dtype


@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays, results and constants of a program that belong to its tail.

    Attributes:
      arguments: `MATRICES` matrices and `SCALARS` arrays that have the scalars.
      results: `OUTPUTS` outputs and `SUMS` sums of squares of each program.
      constants: the operations and the places of numbers, for
        `triton_operations.run`; None without a tail.
    """

    arguments: list[Any]
    results: Sequence[Result]
    constants: tuple[Any, ...] | None


def operands(tail: Tail | None, form: Callable[[Any], Any], programs: int) -> Operands:
    """Returns the arrays, results and constants of a program that belong to its tail.

    Args:
      tail: the tail; None for none.
      form: brings a matrix into the form that the program takes.
      programs: number of blocks of numbers, each of which has its own sums.
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
            return -1, np.asarray(x.val).item(), _TYPES[str(_dtype(x))]
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
