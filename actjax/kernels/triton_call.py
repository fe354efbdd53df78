"""Launches of programs that are written in Triton, through jax-triton.

This module and those that import it need jax-triton, so `actjax.kernels.dispatch` imports them
where such a program is chosen, and nothing else does.
"""

import dataclasses
import functools
import importlib.resources
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton

from actjax import _gpu
from actjax.kernels.layers import Layer, Result

_IS_OLD = "out_type" not in signature(jax_triton.triton_call).parameters
"""Whether jax-triton is older than 0.4. It then passes a result that replaces an argument twice, as
both; from 0.4 on once, in the place of the result."""
_UNKNOWN = (9, 0)
"""Compute capability to compile for on a machine without a GPU."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch of a program.

    Attributes:
      kernel: the program, a `triton.JITFunction` of the index of a layer, int32 [1], of arguments,
        of what is replaced by results, of results, and of constants.
      arguments: arrays that it reads, or layers of stacks, of which it gets the whole stack.
      results: shapes of the arrays that it writes; for a `Layer`, the result is written in its
        place, and is a `Layer` of the stack after that.
      grid: number of programs, from all constants.
      constants: its `tl.constexpr` parameters by name, without those of a block.
      replaced: for each of the first results, the array that it replaces, or its `Layer`. The
        program reads it in the place of the result if that is a `Layer`, or else where it gets what
        is replaced.
    """

    kernel: Any
    arguments: Sequence[Any]
    results: Sequence[Result]
    grid: Callable[[Mapping[str, Any]], tuple[int]]
    constants: Mapping[str, Any]
    replaced: Sequence[Any] = ()

    def run(self) -> list[Any]:
        """Returns the results."""
        capability = _gpu.compute_capability() or _UNKNOWN
        constants, options = self.compiled_for(capability)
        named: dict[str, Any] = {}
        arrays, shapes = self.arrays(), [_shape_of(x) for x in self.results]
        first = len(arrays) - len(self.results)
        places = [i for i, x in enumerate(self.results) if isinstance(x, Layer)]
        if _IS_OLD:
            aliases = {first + i: i for i in places}
        else:
            names = self.kernel.arg_names[len(arrays) :]
            named = {names[i]: arrays[first + i] for i in places}
            for i in places:
                arrays[first + i] = jnp.zeros(1, shapes[i].dtype)
            aliases = {len(arrays) + n: i for n, i in enumerate(places)}
        # The name tells the kernel in a compiled program.
        with jax.named_scope(self.kernel.__name__), warnings.catch_warnings():
            # Arrays that can be changed, which it would rather have, are not for traced functions.
            warnings.filterwarnings("ignore", "input_output_aliases is deprecated")
            written = jax_triton.triton_call(
                *arrays,
                kernel=self.kernel,
                grid=self.grid(constants),
                input_output_aliases=aliases,
                compute_capability=10 * capability[0] + capability[1],
                **{"out_shape" if _IS_OLD else "out_type": shapes},
                **named,
                **options,
                **constants,
            )
        return [
            dataclasses.replace(x, stack=y) if isinstance(x, Layer) else y
            for x, y in zip(self.results, written, strict=True)
        ]

    def compiled_for(self, capability: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns all constants of the program for a compute capability, and Triton's options."""
        block = dict(block_of(self.kernel.__name__, capability))
        options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
        names = [x for x in block if x in self.kernel.arg_names and x not in self.constants]
        return {**self.constants, **{name: block[name] for name in names}}, options

    def arrays(self) -> list[jax.Array]:
        """Returns the arrays that the kernel gets before its results."""
        layers = [x for x in (*self.arguments, *self.results) if isinstance(x, Layer)]
        index = layers[0].index if layers else 0
        # A result that replaces nothing needs an argument too, for one list of parameters.
        held = [x.stack if isinstance(x, Layer) else jnp.zeros(1, x.dtype) for x in self.results]
        for i, (result, x) in enumerate(zip(self.results, self.replaced, strict=False)):
            held[i] = held[i] if isinstance(result, Layer) else x
        read = [x.stack if isinstance(x, Layer) else x for x in self.arguments]
        return [jnp.asarray(index, jnp.int32).reshape(1), *read, *held]


def block_for(kernel: str) -> Mapping[str, int]:
    """Returns the block of a program on this machine, for launches that depend on it."""
    return block_of(kernel, _gpu.compute_capability() or _UNKNOWN)


def step(x: Any) -> int:
    """Returns the numbers from a layer of a stack to the next; 0 for any other array."""
    return x.size if isinstance(x, Layer) else 0


def _shape_of(x: Result) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.stack.shape if isinstance(x, Layer) else x.shape, x.dtype)


def block_of(kernel: str, capability: tuple[int, ...]) -> Mapping[str, int]:
    """Returns the constants of the block of a program: those of the newest GPU that is not newer.

    Args:
      kernel: name of the program.
      capability: compute capability of the GPU.
    """
    blocks = known_blocks()[kernel].items()
    known = {tuple(map(int, name.split("."))): block for name, block in blocks}
    return known[max((c for c in known if c <= tuple(capability)), default=min(known))]


@functools.cache
def known_blocks() -> dict[str, dict[str, dict[str, int]]]:
    """Returns the blocks of `blocks.json`, by program and compute capability."""
    text = importlib.resources.files("actjax.kernels").joinpath("blocks.json").read_text()
    return json.loads(text)
