"""`dequantize` in one pass: a program reads bytes and scales, and writes numbers."""

import math
from typing import Any

import jax
from jax.experimental.pallas import triton as plgpu

from actjax.formats.code import QuantizedCode
from actjax.kernels import limits, operands, tiles
from actjax.kernels.layer_call import pallas_call


def refuses(code: QuantizedCode) -> str | None:
    """Returns why the program cannot take a code; None if it can."""
    shape = (*code.planes[0].shape[:-1], code.features)
    return limits.refuses([code.format], code.dtype, shape)


def dequantize(code: QuantizedCode, *, interpret: bool = False) -> jax.Array:
    """As `actjax.kernels.dequantize.api.dequantize`."""
    lead = code.planes[0].shape[:-1]
    arrays, bind = operands.operands(code)
    group, tokens = code.format.group, math.prod(lead)
    # Smaller groups have more scales, which need registers too where a rotation holds all numbers.
    numbers = min(4096, 32 * group) if code.format.rotate else 4096
    grid = tiles.grid_of(tokens, code.features, group, numbers, interpret=interpret)

    def kernel(*refs: Any) -> None:
        *inputs, out = refs
        read = bind(*inputs)

        def body(cut: Any) -> None:
            part = cut(limits.slice_count([code.format], cut(1).size))
            for number, value in enumerate(read.decode(part)):
                tiles.store(out, part.token, part.feature(number), value, part.exists(number))

        grid.run(body)

    shape = jax.ShapeDtypeStruct((math.prod(lead), code.features), code.dtype)
    (x,) = pallas_call(
        kernel,
        grid=grid.programs,
        out_shape=[shape],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_dequantize",
    )(*arrays)
    return x.reshape(*lead, code.features)
