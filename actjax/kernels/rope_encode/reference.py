"""The definition of `rope_encode`: plain JAX, never tuned."""

import math

import jax
import numpy as np

from actjax._math.precision import accumulation_dtype
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.formats.quantize import quantize


def rope_encode(
    inputs: QuantizeInputs, cos: jax.Array, sin: jax.Array, *, format: Format
) -> tuple[jax.Array, QuantizedCode]:
    """As `actjax.kernels.rope_encode.api.rope_encode`."""
    return value(inputs.x, cos, sin), quantize(inputs, format=format)


def value(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` [B, S, ...] with the pairs (i, i + D/2) of each head of D numbers rotated.

    Args:
      x: heads are D numbers next to each other.
      cos: [S, D / 2].
      sin: [S, D / 2].
    """
    heads = math.prod(x.shape[2:]) // (2 * cos.shape[-1])
    halves = x.reshape(*x.shape[:2], heads, 2, cos.shape[-1]).astype(accumulation_dtype(x.dtype))
    # One expression of both halves: XLA for GPUs reads the operands of a concatenation separately.
    signs = jax.lax.broadcast_to_rank(np.asarray([[-1], [1]], halves.dtype), halves.ndim)
    opposite = halves[..., ::-1, :] * signs
    cos, sin = (table.astype(halves.dtype)[None, :, None, None] for table in (cos, sin))
    rotated = halves * cos + opposite * sin
    return rotated.astype(x.dtype).reshape(x.shape)
