"""Small integers side by side in bytes: `bits` bits each, nothing padded to a byte."""

import functools
import operator

import jax
import jax.numpy as jnp

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths that a code is cut into, low bits first: all of them divide a byte."""

BITS = tuple(_PLANES)
"""Widths of a code."""


def pack(codes: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    """Returns `codes` [..., d], below `2^bits`, as arrays of bytes, one for each plane of bits.

    Bytes hold slices of the last axis side by side, and not neighbours: byte `j` of a plane of 4
    bits is `codes[j] | codes[j + w] << 4`, with `w = ceil(d / 2)`. So nothing moves between lanes.

    Args:
      codes: uint8.
      bits: 1, 2, 3, 4 or 8; of 3, two and one lie in planes of their own.

    Returns:
      For each plane of `p` bits uint8 [..., ceil(d p / 8)].
    """
    planes, shift = [], 0
    for width in _PLANES[bits]:
        planes.append(_pack_plane((codes >> shift) & (2**width - 1), width))
        shift += width
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], bits: int, features: int) -> jax.Array:
    """Inverse of `pack`.

    Args:
      planes: what it returned.
      bits: as there.
      features: d.

    Returns:
      uint8 [..., d].
    """
    codes, shift = [], 0
    for width, plane in zip(_PLANES[bits], planes, strict=True):
        codes.append(_unpack_plane(plane, width, features) << shift)
        shift += width
    return functools.reduce(operator.or_, codes)


def packed_bytes(bits: int, features: int) -> int:
    """Returns the bytes of one row of `features` codes."""
    return sum(-(-features * width // 8) for width in _PLANES[bits])


def _pack_plane(codes: jax.Array, width: int) -> jax.Array:
    count, features = 8 // width, codes.shape[-1]
    size = -(-features // count)
    slices = [codes[..., i * size : (i + 1) * size] for i in range(count)]
    whole = [_lengthen(s, size) << (i * width) for i, s in enumerate(slices)]
    return functools.reduce(operator.or_, whole)


def _lengthen(x: jax.Array, size: int) -> jax.Array:
    missing = size - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


def _unpack_plane(plane: jax.Array, width: int, features: int) -> jax.Array:
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None]
    slices = (plane[..., None, :] >> shifts) & (2**width - 1)
    return slices.reshape(*plane.shape[:-1], len(shifts) * plane.shape[-1])[..., :features]
