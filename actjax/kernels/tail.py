"""Element-wise operations behind a kernel that the kernel does itself, on numbers in registers.

The update of a weight is a chain of operations on arrays of one shape: clipping, moments, weight
decay, learning rate, rounding. A kernel that runs a part of the chain takes the operations that
follow as a `Tail`, so that nothing in between is written to memory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax._math.squares import in_parts
from actjax.kernels.layers import Result, result_like, value_of

OPERATIONS = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "ceil", "clamp",
    "convert_element_type", "div", "eq", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pow", "rem", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
}  # fmt: skip
"""Names of operations that compute each number of the result from one number of each operand, and
that Triton has."""

_OF_BOOLS = {"and", "convert_element_type", "eq", "ne", "not", "or", "select_n", "xor"}
"""Operations that Triton has for bools."""
DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bfloat16",
    "float16", "float32", "float64",
}  # fmt: skip
"""Names of dtypes that Triton has."""


def can_run(eqn: core.JaxprEqn) -> bool:
    """Returns whether Triton has an operation for the dtypes of an equation."""
    name = eqn.primitive.name
    atoms: list[Any] = [*eqn.invars, *eqn.outvars]
    dtypes = {str(x.aval.dtype) for x in atoms}
    if name == "select_n" and (len(eqn.invars) != 3 or str(atoms[0].aval.dtype) != "bool"):
        return False
    has_bools = any(str(x.aval.dtype) == "bool" for x in atoms[: len(eqn.invars)])
    return name in OPERATIONS and dtypes <= DTYPES and (name in _OF_BOOLS or not has_bools)


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """A program of `OPERATIONS` on matrices of one shape and on scalars.

    Others that it may have: positions (`iota`), copies of scalars, and slices of the first rows and
    columns, each of which is padded to the whole shape again.

    Attributes:
      eqns: the operations, in order.
      inputs: variables of the result of a kernel, if `has_first`, of matrices, and of scalars.
      outputs: variables of matrices, of which the last are squared and added up.
      has_first: whether the first input is the result of a kernel.
      matrices: number of the matrices among the inputs.
      positions: for each scalar, its place in the array that has it, in row-major order.
      replaced: for each output before those that are squared, the number of the input matrix that
        it replaces; None for a new matrix.
      strides: for each output that is squared: every so many rows are read.
    """

    eqns: tuple[core.JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    has_first: bool
    matrices: int
    positions: tuple[int, ...]
    replaced: tuple[int | None, ...]
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices."""
        return self.outputs[0].aval.shape

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The outputs before those that are squared."""
        outputs = self.outputs[: len(self.replaced)]
        return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in outputs]

    def run(self, inputs: Sequence[Any], row: Any, column: Any) -> list[jax.Array]:
        """Returns the outputs for some numbers of the matrices.

        Args:
          inputs: numbers of the matrices, and scalars.
          row: rows of the numbers.
          column: their columns.
        """
        values: dict[Any, Any] = dict(zip(self.inputs, inputs, strict=True))
        shape = jnp.broadcast_shapes(row.shape, column.shape)

        def value(x: Any, whole: bool = True) -> Any:
            dtype: Any = x.aval.dtype
            known = x.val if isinstance(x, core.Literal) else values[x]
            # An operation needs operands of one shape.
            return jnp.broadcast_to(jnp.asarray(known, dtype), shape) if whole else known

        for eqn in self.eqns:
            result: Any = eqn.outvars[0]
            whole = result.aval.shape == self.shape
            if eqn.primitive.name == "iota":
                number = (row, column)[eqn.params["dimension"]]
                values[result] = jnp.broadcast_to(number, shape).astype(result.aval.dtype)
            elif eqn.primitive.name in ("broadcast_in_dim", "slice"):
                values[result] = value(eqn.invars[0])
            elif eqn.primitive.name == "pad":
                existing, fill = eqn.invars
                rows, columns = cast(Any, existing).aval.shape
                kept = jnp.broadcast_to((row < rows) & (column < columns), shape)
                values[result] = jnp.where(kept, value(existing), value(fill))
            else:
                arguments = [value(x, whole) for x in eqn.invars]
                values[result] = eqn.primitive.bind(*arguments, **eqn.params)
        return [value(x) for x in self.outputs]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
    """An `Elementwise` program with its inputs.

    Attributes:
      matrices: arrays [d, n], or `Layer`s.
      scalars: small arrays, or `Layer`s, which have the scalars of the program.
      program: the operations.
    """

    matrices: tuple[Any, ...]
    scalars: tuple[Any, ...]
    program: Elementwise = dataclasses.field(metadata={"static": True})

    def on_arrays(self, first: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the outputs, and the sums of squares in parts, for the result of a kernel.

        Args:
          first: the result; None for none.
        """
        rows, columns = self.program.shape
        row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None]
        firsts = [first] if self.program.has_first else []
        scalars = [value_of(x).reshape(-1) for x in self.scalars]
        scalars = [x[i] for x, i in zip(scalars, self.program.positions, strict=True)]
        inputs = [*firsts, *map(value_of, self.matrices), *scalars]
        outputs = self.program.run(inputs, row, column)
        count = len(self.program.replaced)
        squared = zip(outputs[count:], self.program.strides, strict=True)
        sums = (n * jnp.sum(jnp.square(x[::n].astype(jnp.float32))) for x, n in squared)
        return outputs[:count], [in_parts(x[None]) for x in sums]

    def results(self, matrices: Sequence[Any], programs: int) -> list[Result]:
        """Returns the results of a kernel: the outputs, and sums of squares of each program.

        Args:
          matrices: the operands that are matrices.
          programs: number of programs of the kernel.
        """
        outputs: list[Result] = []
        for i, like in zip(self.program.replaced, self.program.shapes, strict=True):
            outputs.append(like if i is None else result_like(matrices[i]))
        sums = [jax.ShapeDtypeStruct((programs, 1), jnp.float32) for _ in self.program.strides]
        return [*outputs, *sums]

    def finished(self, results: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        """Returns what `on_arrays` returns, from the results of a kernel."""
        count = len(self.program.replaced)
        sums = zip(results[count:], self.program.strides, strict=True)
        outputs = [x.reshape(*self.program.shape) for x in results[:count]]
        return outputs, [stride * in_parts(x.reshape(-1)) for x, stride in sums]
