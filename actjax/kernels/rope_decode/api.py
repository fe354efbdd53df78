"""Rotary position embedding of numbers that are decoded in registers."""

from typing import Any

import jax

from actjax._shards import Dims
from actjax.formats.code import QuantizedCode
from actjax.kernels.checks import check_code
from actjax.kernels.dequantize.api import KERNEL as DEQUANTIZE
from actjax.kernels.dispatch import Compute, Implementation, Kernel
from actjax.kernels.layers import value_of
from actjax.kernels.rope_decode import reference
from actjax.kernels.rope_encode.api import check_tables, features_of
from actjax.kernels.rope_encode.reference import value


def rope_decode(
    code: QuantizedCode,
    cos: jax.Array,
    sin: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns `actjax.rope(x, cos, sin)` of the decoded numbers, with merged heads.

    It reads the code once, and writes the value once: no decoded number is written.

    Args:
      code: a code of `x`, [B, S, H * D].
      cos: cosines of the angles, [S, D / 2].
      sin: sines of the angles, [S, D / 2].
      implementation: what computes it; None for the best one that applies. Where no program does
        all of it, `dequantize` decodes, and plain JAX rotates.

    Returns:
      [B, S, H * D] in the dtype of `x`, rotated in float32.

    Raises:
      TypeError: `code` is not a code.
      ValueError: tables that do not fit `x`; an implementation that cannot take the arguments.
    """
    shape = (*code.planes[0].shape[:-1], code.features) if hasattr(code, "planes") else ()
    check_code("rope_decode", "code", code, shape)
    check_tables("rope_decode", shape, cos, sin)
    return KERNEL(code, cos, sin, implementation=implementation)


def _dims(
    result: Any, code: QuantizedCode, cos: jax.Array, sin: jax.Array
) -> tuple[tuple, Dims] | None:
    del result, sin
    if code.seed is not None:
        return None
    dims = code.dims(features_of(cos, code.format))
    of_x = dims.planes[0]
    tables = Dims((of_x.names[1], None))
    return (dims, tables, tables), of_x


def _parts(
    compute: Compute, code: QuantizedCode, cos: jax.Array, sin: jax.Array, *, into: Any = None
) -> jax.Array:
    """Decodes by `dequantize`."""
    del into
    return value(compute(DEQUANTIZE, code), value_of(cos), value_of(sin))


KERNEL = Kernel(
    "rope_decode",
    reference.rope_decode,
    _dims,
    triton="actjax.kernels.rope_decode.triton",
    parts=_parts,
    reads_layers=True,
)
