"""Groups of 128 numbers in the 128 lanes of a TPU: what its kernels share.

They take codes of 4 bits in rotated groups with normal levels, as `lean` stores them. A vector
register holds a group of each of 8 tokens. Reductions along lanes give its scale, and the rotation
is a product with a Hadamard matrix. The bytes of two groups fill the lanes: byte j of a group holds
numbers j and j + 64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats import code as fmt
from actjax.formats.rotation import hadamard, signs_of

LANES = 128
_HALF = LANES // 2
_TOKENS = 128
"""Tokens of a block at most. Of 512, the registers that wait take more memory than a core has."""
_FORMAT = {"bits": 4, "group": LANES, "rounding": "nearest", "scale_dtype": "bfloat16",
           "levels": "normal", "rotate": True}  # fmt: skip


class Group(NamedTuple):
    """A group of numbers of each token.

    Attributes:
      index: its number.
      exist: its numbers that are not filled up.
      at: the lanes of its numbers in a row.
      bytes_at: the lanes of its bytes, and of those of its neighbor.
    """

    index: int
    exist: int
    at: slice
    bytes_at: slice

    @property
    def is_second(self) -> bool:
        """Whether its bytes are in the upper half of their lanes."""
        return self.index % 2 == 1


def groups_of(features: int) -> Iterator[Group]:
    """Yields the groups of a row."""
    for i in range(fmt.group_count(features, LANES)):
        pair = i // 2 * LANES
        exist = min(LANES, features - i * LANES)
        yield Group(i, exist, slice(i * LANES, (i + 1) * LANES), slice(pair, pair + LANES))


def refuses(format: fmt.Format, dtype: Any, shape: tuple[int, ...]) -> str | None:
    """Returns why the kernels cannot take codes of an array; None if they can."""
    for name, value in _FORMAT.items():
        if getattr(format, name) != value:
            return f"takes {name} {value!r} on TPUs, got {getattr(format, name)!r}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 or float32 on TPUs, got {jnp.dtype(dtype)}"
    if len(shape) != 3 or 0 in shape or fmt.group_count(shape[-1], LANES) > LANES:
        return f"takes arrays [B, S, d] with d up to {LANES**2} on TPUs, got {shape}"
    return None


def padded(size: int) -> int:
    """Returns the lanes that a row of numbers takes."""
    return -(-size // LANES) * LANES


def tokens_of(length: int, features: int, dtype: Any, size: int = 4 * 2**20) -> int:
    """Returns the tokens of a block of an array, which takes up to `size` bytes.

    A core has 16 MiB, for each block twice. 2 MiB of the widest row are 32 tokens, a tile of bytes.
    """
    tokens, row = _TOKENS, padded(features) * jnp.dtype(dtype).itemsize
    while tokens * row > size:
        tokens //= 2
    return min(tokens, length)


def matrix() -> np.ndarray:
    """Returns the matrix that rotates a group, [128, 128], of plus and minus one.

    Divided by the root of 128 it is orthogonal.
    """
    return (signs_of(LANES)[:, None] * hadamard(LANES)).astype(np.float32)


def product(values: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns the product of values [tokens, 128] and a matrix, over the root of 128."""
    product = jax.lax.dot(
        values, matrix, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return product * np.float32(LANES**-0.5)


def lanes_like(tokens: int) -> jax.Array:
    """Returns the number of each lane, int32 [tokens, 128]."""
    return jax.lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1)


def of_sequences(x: jax.Array | None, rows: int, features: int, fill: float) -> jax.Array:
    """Returns stored statistics of channels as float32 [B, 1, d]."""
    if x is None:
        return jnp.full((rows, 1, features), fill, jnp.float32)
    return x.view(jnp.bfloat16).astype(jnp.float32)[:, None]
