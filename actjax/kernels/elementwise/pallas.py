"""A chain of element-wise operations in one pass."""

from typing import Any

from jax.experimental.pallas import triton as plgpu

from actjax.kernels import tiles
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import rows
from actjax.kernels.tail import Tail

_GROUP = 512
"""Neighbors in a row that a program loads together."""


def refuses() -> str | None:
    """Returns None: the program takes every chain."""
    return None


def elementwise(*, tail: Tail, interpret: bool = False) -> tuple[tuple[list[Any], list[Any]]]:
    """Returns the results of the tail."""
    tokens, features = tail.program.shape
    grid = tiles.grid_of(tokens, features, min(_GROUP, features), numbers=2048)
    arrays = tail.operands(rows)

    def kernel(*refs: Any) -> None:
        refs_of_tail = refs[: len(arrays)], refs[len(arrays) :]
        grid.run(lambda cut: tiles.run_tail(tail, *refs_of_tail, cut(1), None))

    results = pallas_call(
        kernel,
        grid=grid.programs,
        out_shape=tail.results(arrays, *grid.programs),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_elementwise",
    )(*arrays)
    return (tail.finished(results),)
