"""Limits of the kernels that read and write codes in tiles: which arguments a tile can hold."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats import code as fmt
from actjax.formats.packing import PLANES

_LANES = 32
"""Numbers of a slice of a rotated group, if its bytes allow."""


def refuses_operand(x: fmt.QuantizedCode | jax.Array, shape: Sequence[int]) -> str | None:
    """Returns why tiles cannot hold an operand of this shape; None if they can."""
    if isinstance(x, fmt.QuantizedCode):
        return refuses([x.format], x.dtype, shape)
    if group_of(x) < 16:
        return f"takes a multiple of 16 features, got {shape[-1]}"
    return refuses_array(x.dtype, shape)


def refuses(formats: Sequence[fmt.Format], dtype: Any, shape: Sequence[int]) -> str | None:
    """Returns why tiles cannot hold codes that are read together; None if they can.

    Args:
      formats: formats of the codes, with groups of one size.
      dtype: dtype of the activation.
      shape: shape of the activation, [..., d].
    """
    group = formats[0].group
    if group < 16 or group & (group - 1) or group > 1024:
        return f"takes groups of 16, 32, ... 1024 features, got group={group}"
    return refuses_array(dtype, shape)


def refuses_array(dtype: Any, shape: Sequence[int]) -> str | None:
    """Returns why programs cannot take an array; None if they can."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes floating point numbers of 16 or 32 bits, got {dtype}"
    return f"takes arrays that are not empty, got shape {tuple(shape)}" if 0 in shape else None


def group_of(x: fmt.QuantizedCode | jax.Array) -> int:
    """Returns the features of a group of an operand.

    For an array it is the largest power of two that divides d, up to 128.
    """
    if isinstance(x, fmt.QuantizedCode):
        return x.format.group
    return min(128, x.shape[-1] & -x.shape[-1]) or 1


def slice_count(formats: Sequence[fmt.Format], size: int) -> int:
    """Returns the number of slices that a group is read in, for codes of these formats.

    Slices share bytes; a rotated group has more of them. There are at least two, which share random
    words.

    Args:
      formats: formats of the codes.
      size: features of the group, a power of two from 16 on.
    """
    least = max([2, *(8 // width for format in formats for width in PLANES[format.bits])])
    rotated = any(format.rotate for format in formats)
    return max(least, min(16, size // _LANES)) if rotated else least
