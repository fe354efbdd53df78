"""Packing integers of a few bits into bytes."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes that a code is cut into, low bits first; each divides a byte."""

BITS = tuple(PLANES)
"""Widths of a code."""


def pack(codes: jax.Array, bits: int, group: int | None = None) -> tuple[jax.Array, ...]:
    """Returns `codes` [..., d] as arrays of bytes, one array for each plane of bits.

    A byte holds features that are far apart, not neighbors: in a plane of 4 bits, byte `j` of a
    run of `r` features is `codes[j] | codes[j + w] << 4`, with `w = ceil(r / 2)`. So nothing moves
    between lanes, and a kernel that loads a group loads whole bytes.

    Args:
      codes: uint8, below `2^bits`.
      bits: one of `BITS`; 3, 5 and 6 bits are two planes: 2 + 1, 4 + 1 and 4 + 2.
      group: features that are packed together. A run is the least multiple of it that fills whole
        bytes; the remaining features are one more run. None packs all features together.

    Returns:
      For each plane of `p` bits, uint8 [..., ceil(d p / 8)].
    """
    planes, shift = [], 0
    for width in PLANES[bits]:
        part = codes >> shift if shift else codes
        if shift + width < bits:
            part = part & (2**width - 1)
        parts = [_pack_runs(part[..., a:b], width, run) for a, b, run in _runs(part, group)]
        planes.append(jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])
        shift += width
    return tuple(planes)


def unpack(
    planes: tuple[jax.Array, ...],
    bits: int,
    features: int,
    group: int | None = None,
    *,
    fuse: bool = False,
) -> jax.Array:
    """Returns the codes of packed planes, uint8 [..., d]; the inverse of `pack`.

    Args:
      planes: result of `pack`.
      bits: as for `pack`.
      features: d.
      group: as for `pack`.
      fuse: whether XLA may compute the codes within what uses them. That is half the operations to
        compile, but several times slower on a CPU if the codes are looked up or rotated.
    """
    codes, shift = [], 0
    for width, plane in zip(PLANES[bits], planes, strict=True):
        shape = jax.ShapeDtypeStruct((features,), jnp.uint8)
        parts = [
            _unpack_runs(plane[..., a * width // 8 : -(-b * width // 8)], width, b - a, run, fuse)
            for a, b, run in _runs(shape, group)
        ]
        plane_codes = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        codes.append(plane_codes << shift if shift else plane_codes)
        shift += width
    return functools.reduce(operator.or_, codes)


def packed_bytes(bits: int, features: int) -> int:
    """Returns the bytes of one row of `features` codes."""
    return sum(-(-features * width // 8) for width in PLANES[bits])


def _runs(codes: jax.Array | jax.ShapeDtypeStruct, group: int | None) -> list[tuple[int, int, int]]:
    """Returns begin, end and run length of the features in whole runs, and of those that remain."""
    features = codes.shape[-1]
    run = features if group is None else group * (8 // math.gcd(group, 8))
    end = features // run * run if run else 0
    parts = [(0, end, run), (end, features, features - end)]
    return [part for part in parts if part[1] > part[0]] or [(0, 0, 0)]


def _pack_runs(codes: jax.Array, width: int, run: int) -> jax.Array:
    """Returns the bytes of features in whole runs."""
    count = 8 // width
    size = -(-run // count)
    number = codes.shape[-1] // max(run, 1)
    runs = codes.reshape(*codes.shape[:-1], number, run)
    if count * size > run:
        runs = jnp.pad(runs, ((0, 0),) * (runs.ndim - 1) + ((0, count * size - run),))
    slices = runs.reshape(*runs.shape[:-1], count, size)
    shifts = width * jnp.arange(count, dtype=jnp.uint8)[:, None]
    shifted = slices << jax.lax.broadcast_to_rank(shifts, slices.ndim)
    # A sum, not a chain of operations on slices: with these a CPU takes five times longer, since
    # XLA fuses the computation of the codes with a reshape of the result.
    packed = jnp.sum(shifted, axis=-2, dtype=jnp.uint8)
    return packed.reshape(*codes.shape[:-1], number * size)


def _unpack_runs(plane: jax.Array, width: int, features: int, run: int, fuse: bool) -> jax.Array:
    """Inverse of `_pack_runs`."""
    runs = features // max(run, 1)
    grouped = plane.reshape(*plane.shape[:-1], runs, plane.shape[-1] // max(runs, 1))
    size, shifts = grouped.shape[-1], np.arange(0, 8, width, dtype=np.uint8)
    if fuse and size & (size - 1) == 0:
        by_row = jax.lax.broadcast_to_rank(shifts[:, None], grouped.ndim + 1)
        rows = (grouped[..., None, :] >> by_row) & (2**width - 1)
        rows = rows.reshape(*grouped.shape[:-1], size * shifts.size)
    else:
        # XLA for CPUs computes a concatenation apart, in a kernel that no other layer shares.
        rows = jnp.concatenate([(grouped >> i) & (2**width - 1) for i in shifts], axis=-1)
    return rows[..., :run].reshape(*plane.shape[:-1], features)
