"""The operations of a `Tail` in programs in Triton.

They are a constant, a tuple that the compiler of a program walks through. A number is a tile, or
one number for all of it. It is read by Triton, whose loops over tuples are static, and whose static
branches end in `else`.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def of(constant, *places):
    """An entry of nested tuples, which Triton does not take apart itself before 3.7."""
    for place in places:
        constant = constant[place]
    return constant


@triton.jit
def run(
    first, matrices, scalars, outputs, sums, layer, row, column, place, mask, part,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Runs on one block of numbers, and writes the outputs and the sums of squares.

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
      part: the place of the sums among those of all blocks.
      TAIL: `constants` of `triton_tail.Operands`.
    """
    LINES: tl.constexpr = of(TAIL, 0)
    values = ()
    if of(TAIL, 5):
        values = values + (first,)
    for i in tl.static_range(len(of(TAIL, 1))):
        place_of = _matrix(matrices[i], outputs, of(TAIL, 1, i, 0)) + layer * of(TAIL, 1, i, 1)
        values = values + (tl.load(place_of + place, mask),)
    for i in tl.static_range(len(of(TAIL, 2))):
        values = values + (tl.load(scalars[i] + of(TAIL, 2, i)),)
    for i in tl.static_range(len(LINES)):
        values = values + (_computed(values, row, column, of(LINES, i)),)
    OUTPUTS: tl.constexpr = len(of(TAIL, 3))
    SUMS: tl.constexpr = len(of(TAIL, 4))
    COUNT: tl.constexpr = len(values) - OUTPUTS - SUMS
    for i in tl.static_range(OUTPUTS):
        target = outputs[i] + layer * of(TAIL, 3, i) + place
        tl.store(target, values[COUNT + i].to(target.dtype.element_ty), mask)
    for i in tl.static_range(SUMS):
        size = values[COUNT + OUTPUTS + i].to(tl.float32)
        is_read = (row % of(TAIL, 4, i) == 0) & (column >= 0)
        square = tl.where(is_read if mask is None else is_read & mask, size * size, 0.0)
        tl.store(sums[i] + part, tl.sum(square))


@triton.jit
def _matrix(matrix, outputs, SOURCE: tl.constexpr):
    """A matrix, or the output that replaces it."""
    return matrix if SOURCE < 0 else outputs[SOURCE]


@triton.jit
def _operand(values, AT: tl.constexpr):
    """A number by its place, or a constant."""
    PLACE: tl.constexpr = of(AT, 0)
    if PLACE < 0:
        return tl.full((1, 1), of(AT, 1), of(AT, 2))
    else:
        return values[PLACE]


@triton.jit
def _computed(values, row, column, LINE: tl.constexpr):
    """The result of a line of `triton_tail.Operands.constants`."""
    NAME: tl.constexpr = of(LINE, 0)
    COUNT: tl.constexpr = len(of(LINE, 1))
    KIND: tl.constexpr = of(LINE, 2)
    MORE: tl.constexpr = of(LINE, 3)
    if NAME == "iota":
        return (row if MORE == 0 else column).to(KIND)
    else:
        x = _operand(values, of(LINE, 1, 0))
        y = x if COUNT < 2 else _operand(values, of(LINE, 1, 1))
        z = x if COUNT < 3 else _operand(values, of(LINE, 1, 2))
        if of(LINE, 4):
            # As XLA: the operation in 32 bits is rounded once.
            x, y, z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
            return _arithmetic(x, y, z, tl.float32, NAME, MORE).to(KIND)
        else:
            return _chosen(x, y, z, row, column, KIND, NAME, MORE)


@triton.jit
def _chosen(x, y, z, row, column, KIND: tl.constexpr, NAME: tl.constexpr, MORE: tl.constexpr):
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
        return tl.where((row < of(MORE, 0)) & (column < of(MORE, 1)), x, y)
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
