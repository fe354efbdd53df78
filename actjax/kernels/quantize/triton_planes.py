"""Bytes of codes, in programs that are written in Triton. As `actjax.kernels.packing`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl


def plane_shapes(rows: int, features: int, widths: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of two planes; the second is a byte if there is one width."""
    sizes = [(rows, -(-features * width // 8)) for width in widths] + [(1, 1)]
    return [jax.ShapeDtypeStruct(size, jnp.uint8) for size in sizes[:2]]


@triton.jit
def packed_tiles(codes, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Tiles of bytes, from tiles of codes: the codes of a byte are in tiles far apart."""
    COUNT: tl.constexpr = len(codes) * WIDTH // 8
    packed = ()
    for first in tl.static_range(COUNT):
        byte = (codes[first] >> SHIFT) & (2**WIDTH - 1)
        for i in tl.static_range(8 // WIDTH - 1):
            code = (codes[first + (i + 1) * COUNT] >> SHIFT) & (2**WIDTH - 1)
            byte |= code << ((i + 1) * WIDTH)
        packed += (byte,)
    return packed


@triton.jit
def joined(parts):
    """Tiles [n, 16] next to each other, [n, 16 B]."""
    COUNT: tl.constexpr = len(parts)
    if COUNT == 1:
        return parts[0]
    elif COUNT == 2:
        return _flat(tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1)))
    elif COUNT == 4:
        halves = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return _flat(tl.permute(halves, (0, 2, 3, 1)))
    else:
        low = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        high = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return _flat(tl.permute(tl.join(low, high), (0, 2, 3, 4, 1)))


@triton.jit
def _flat(x):
    return tl.reshape(x, (x.shape[0], x.numel // x.shape[0]))
