"""A chain of element-wise operations in one pass, in Triton."""

from typing import Any

import triton
import triton.language as tl

from actjax.kernels import triton_operations, triton_tail
from actjax.kernels.layers import rows
from actjax.kernels.tail import Tail
from actjax.kernels.triton_call import Call, block_for

__all__ = ["elementwise", "launch", "refuses", "refuses_tail"]

refuses_tail = triton_tail.refuses
_WIDTH = 512
"""Most neighbors in a row that a program has."""


def refuses() -> str | None:
    """Returns None: the program takes every chain that `refuses_tail` does not refuse."""
    return None


def elementwise(*, tail: Tail) -> tuple[tuple[list[Any], list[Any]]]:
    """Returns the results of the tail."""
    return (triton_tail.finished(tail, launch(tail=tail).run()),)


def launch(*, tail: Tail) -> Call:
    """Returns the launch of the program."""
    tokens, features = tail.program.shape
    width = min(_WIDTH, triton.next_power_of_2(features))
    tile = max(1, block_for("actjax_elementwise")["NUMBERS"] // width)
    blocks = triton.cdiv(features, width)
    programs = triton.cdiv(tokens, tile) * blocks
    of_tail = triton_tail.operands(tail, rows, programs)
    constants = {"ROWS": tokens, "FEATURES": features, "WIDTH": width, "BLOCKS": blocks}
    return Call(
        actjax_elementwise,
        of_tail.arguments,
        of_tail.results,
        lambda _: (programs,),
        {**constants, "TILE": tile, "TAIL": of_tail.constants},
    )


@triton.jit
def actjax_elementwise(
    layer, m0, m1, m2, m3, m4, m5, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    held0, held1, held2, held3, held4, held5, out0, out1, out2, out3, sum0, sum1,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Some rows of one block of columns."""
    row = (tl.program_id(0) // BLOCKS * TILE + tl.arange(0, TILE))[:, None]
    if ROWS * FEATURES >= 2**31:
        row = row.to(tl.int64)
    column = (tl.program_id(0) % BLOCKS * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = column < FEATURES if FEATURES % WIDTH else None
    if ROWS % TILE:
        mask = row < ROWS if mask is None else (row < ROWS) & mask
    triton_operations.run(
        None, (m0, m1, m2, m3, m4, m5), (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9),
        (out0, out1, out2, out3), (sum0, sum1), tl.load(layer).to(tl.int64), row, column,
        row * FEATURES + column, mask, tl.program_id(0), TAIL,
    )  # fmt: skip
