"""Storing the activation itself: the baseline of every comparison."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from actjax._math.precision import contract_tokens
from actjax.codecs.base import Codec


@dataclasses.dataclass(frozen=True, repr=False)
class Exact(Codec):
    """Stores `x` unchanged.

    Storage: `T d` values of the dtype of `x`; nothing more if the same array is already kept.
    Error: none. Unbiased.
    Source: ordinary reverse-mode differentiation.
    """

    biased = False
    needs_key = False

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        del key
        return x

    def decode(self, code: jax.Array) -> jax.Array:
        return code

    def weight_grad(self, code: jax.Array, dz: jax.Array) -> jax.Array:
        return contract_tokens(code, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return math.prod(shape) * jnp.dtype(dtype).itemsize
