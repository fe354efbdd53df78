"""`copies` in kernels of some arrays each, in Triton."""

from collections.abc import Sequence
from typing import Any

import jax
import triton
import triton.language as tl

from actjax.kernels.layers import Layer
from actjax.kernels.triton_call import Call, step

_ARRAYS, _BLOCK = 8, 1024


def refuses(*_: Any) -> str | None:
    """Returns None: the program takes all arrays."""
    return None


def copies(arrays: Sequence[jax.Array], *, into: Sequence[Layer | None] = ()) -> list[Any]:
    """As `actjax.kernels.copies.api.copies`; `into` as for `Computation.compute`."""
    results: list[Any] = list(arrays)
    places = [(i, layer) for i, layer in enumerate(into) if layer is not None]
    for first in range(0, len(places), _ARRAYS):
        some = places[first : first + _ARRAYS]
        written = launch([arrays[i] for i, _ in some], [layer for _, layer in some]).run()
        for (i, _), y in zip(some, written, strict=False):
            results[i] = y.reshape(*arrays[i].shape)
    return results


def launch(arrays: Sequence[jax.Array], layers: Sequence[Layer]) -> Call:
    """Returns the launch of the program for up to `_ARRAYS` arrays."""
    missing = _ARRAYS - len(arrays)
    sources = [*(x.reshape(-1) for x in arrays), *[arrays[0].reshape(-1)] * missing]
    unused = jax.ShapeDtypeStruct((1,), arrays[0].dtype)
    results = [*(layer.reshape(-1) for layer in layers), *[unused] * missing]
    programs = triton.cdiv(max(x.size for x in arrays), _BLOCK)
    constants = {"SIZES": tuple(x.size for x in arrays), "STEP": tuple(map(step, layers))}
    return Call(
        actjax_copies, sources, results, lambda _: (programs,), {**constants, "BLOCK": _BLOCK}
    )


@triton.jit
def actjax_copies(
    layer, x0, x1, x2, x3, x4, x5, x6, x7, held0, held1, held2, held3, held4, held5, held6, held7,
    y0, y1, y2, y3, y4, y5, y6, y7,
    SIZES: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same places of all arrays."""
    sources, targets = (x0, x1, x2, x3, x4, x5, x6, x7), (y0, y1, y2, y3, y4, y5, y6, y7)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(layer).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        mask = place < SIZES[i]
        tl.store(targets[i] + at * STEP[i] + place, tl.load(sources[i] + place, mask), mask)
