"""Storing the coordinates of an activation in a given basis.

With a basis `P` [d, k] on the input side of a weight, `(x P)ᵀ dz = Pᵀ dw` exactly: the projected
gradient of GaLore (Zhao et al., 2024) from k stored numbers per token (CompAct, Shamshoum et al.,
2025). This is not a `Codec`, because the basis is an array that an optimizer owns and changes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, matmul, product_dtype
from actjax._shards import gathered
from actjax.formats.packing import pack, unpack

BITS = (4, 8, 16)
"""Bits that a coordinate can be stored in; 16 keeps the dtype of the activation."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BasisCode:
    """`x P` in the dtype of `x`, or in 8 or 4 bits.

    Attributes:
      values: [..., k], in the dtype of `x`; or int8; or two numbers of 4 bits per byte, with 7 for
        zero, as returned by `actjax.formats.packing.pack`.
      scale: distance between two integers, [..., 1], in the dtype of `x`; None if `values` are
        floating point.
      rank: k. Static.
    """

    values: Any
    scale: Any
    rank: int = dataclasses.field(metadata={"static": True})


def encode(x: jax.Array, basis: jax.Array, bits: int = 16) -> BasisCode:
    """Returns the code of `x` [..., d] in `basis` [d, k].

    Storage: `T k` values of the dtype of `x`; in 8 bits, `T k` bytes and T values; in 4 bits,
    `T ceil(k / 2)` bytes and T values.
    Error of `decode`: none in 16 bits. With `u` the k coordinates of a token, at most `max|u| /
    254` in 8 bits and `max|u| / 14` in 4 bits, plus the rounding of the scale and of the result to
    the dtype of `x`.

    Raises:
      ValueError: the shapes do not fit, or `bits` is not in `BITS`.
    """
    if bits not in BITS:
        raise ValueError(f"`bits` must be one of {BITS}, got {bits!r}.")
    if basis.ndim != 2 or basis.shape[0] != x.shape[-1]:
        raise ValueError(f"`basis` must be [{x.shape[-1]}, k] for x{x.shape}, got {basis.shape}.")
    # If features are divided, XLA would divide the coordinates and replicate the basis for that.
    vectors = gathered(basis.astype(x.dtype), axes=(0, 1))
    if bits == 16:
        coordinates = matmul(x, vectors, dtype=product_dtype(x))
        return BasisCode(coordinates.astype(x.dtype), None, basis.shape[1])
    coordinates = matmul(x, vectors)
    largest = jnp.max(jnp.abs(coordinates), axis=-1, keepdims=True)
    end = 2 ** (bits - 1) - 1
    scale = (largest / end).astype(x.dtype)
    wide = scale.astype(coordinates.dtype)
    rounded = jnp.clip(jnp.round(coordinates / jnp.where(wide > 0, wide, 1)), -end, end)
    if bits == 8:
        return BasisCode(rounded.astype(jnp.int8), scale, basis.shape[1])
    return BasisCode(pack((rounded + end).astype(jnp.uint8), 4), scale, basis.shape[1])


def decode(code: BasisCode) -> jax.Array:
    """Returns the coordinates `x P`, [..., k], in the dtype of `x`."""
    if code.scale is None:
        return code.values
    wide = accumulation_dtype(code.scale.dtype)
    if isinstance(code.values, tuple):
        integers = unpack(code.values, 4, code.rank).astype(wide) - 7
    else:
        integers = code.values.astype(wide)
    return (integers * code.scale.astype(wide)).astype(code.scale.dtype)


def describe(basis: jax.Array, bits: int) -> str:
    """Returns the name of the code in the table of `actjax.explain`."""
    return f"Basis(rank={basis.shape[-1]}{'' if bits == 16 else f', bits={bits}'})"
