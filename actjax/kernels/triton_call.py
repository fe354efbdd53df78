"""Launches of programs that are written in Triton, through jax-triton (extra `triton`).

This module and those that import it need jax-triton, so `actjax.kernels.dispatch` imports them when
an implementation "triton" is asked for, and nothing else does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax_triton
import triton

HOPPER = 90
"""Compute capability to compile for on a machine without a GPU."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch of a program, with several choices of its block.

    Attributes:
      kernel: the program, a `triton.JITFunction` of arguments, results and constants.
      arguments: arrays that it reads.
      results: shapes of the arrays that it writes.
      grid: number of programs, from the constants and those of a choice.
      constants: its `tl.constexpr` parameters by name, without those of a choice.
      choices: blocks and warps; the fastest is found at the first call and kept.
    """

    kernel: Any
    arguments: Sequence[jax.Array]
    results: Sequence[jax.ShapeDtypeStruct]
    grid: Callable[[dict[str, Any]], tuple[int]]
    constants: dict[str, Any]
    choices: Sequence[triton.Config]

    def run(self) -> list[jax.Array]:
        """Returns the results."""
        tuned = triton.autotune(configs=list(self.choices), key=[])(self.kernel)
        return jax_triton.triton_call(
            *self.arguments,
            kernel=tuned,
            out_shape=list(self.results),
            grid=self.grid,
            compute_capability=None if jax.default_backend() == "gpu" else HOPPER,
            **self.constants,
        )


def choices(*blocks: tuple[int, int], stages: int = 1, **others: Any) -> list[triton.Config]:
    """Returns choices: pairs of the tokens of a tile and the warps of a program.

    Args:
      *blocks: pairs of `TILE` and warps.
      stages: steps of a loop whose loads are under way at once.
      **others: further constants, the same in each.
    """
    return [
        triton.Config({"TILE": tile, **others}, num_warps=warps, num_stages=stages)
        for tile, warps in blocks
    ]
