"""`copies` in one kernel, of which each program writes the same places of all arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import Layer

_BLOCK = 1024


def refuses(*_: Any) -> str | None:
    """Returns None: the program takes all arrays."""
    return None


def copies(
    arrays: Sequence[jax.Array],
    *,
    interpret: bool = False,
    into: Sequence[Layer | None] = (),
) -> list[Any]:
    """As `actjax.kernels.copies.api.copies`; `into` as for `Computation.compute`."""
    results: list[Any] = list(arrays)
    places = {i: layer.reshape(-1) for i, layer in enumerate(into) if layer is not None}
    if not places:
        return results
    sources = [arrays[i].reshape(-1) for i in places]

    def kernel(*refs: Any) -> None:
        place = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK)
        for source, target in zip(refs[: len(places)], refs[len(places) :], strict=True):
            mask = place < source.shape[0]
            numbers = plgpu.load(source.at[place], mask=mask)
            plgpu.store(target.at[(place,)], numbers, mask=mask)

    written = pallas_call(
        kernel,
        grid=(-(-max(x.size for x in sources) // _BLOCK),),
        out_shape=[*places.values()],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_copies",
    )(*sources)
    for i, y in zip(places, written, strict=True):
        results[i] = y.reshape(*arrays[i].shape)
    return results
