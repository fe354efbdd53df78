"""Lossy codecs of a few operations, for tests of what uses a codec.

`tests/codecs` tests the codecs of actjax. Tests of operators and transformations only need a code
that differs from its input: with `Quantized` most of their time would be the encoding.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from actjax import Codec
from actjax._math.precision import contract_tokens
from actjax.codecs.base import FactoredCodec


@dataclasses.dataclass(frozen=True, repr=False)
class Coarse(Codec):
    """Stores multiples of a step as bytes, and the step.

    The error of a number is at most half a step. Numbers must be below 127 steps.

    Attributes:
      step: distance of two levels.
    """

    step: float = 0.25
    biased, needs_key = True, False

    def encode(self, x, key=None):
        step = self._step(x, key)
        return jnp.round(x / step + 128).astype(jnp.uint8), step

    def decode(self, code):
        numbers, step = code
        return (numbers.astype(step.dtype) - 128) * step

    def weight_grad(self, code, dz):
        return contract_tokens(self.decode(code), dz)

    def stored_bytes(self, shape, dtype):
        return math.prod(shape) + jnp.dtype(dtype).itemsize

    def _step(self, x, key):
        return jnp.full((), self.step, x.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class CoarseRandom(Coarse):
    """Draws the step: one of 64 between `step` and twice as much."""

    biased, needs_key = True, True

    def _step(self, x, key):
        key = self.required_key(key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        return self.step * (1 + (key[-1] % 64).astype(x.dtype) / 64)


@dataclasses.dataclass(frozen=True, repr=False)
class Spanned(FactoredCodec):
    """Stores products with directions, and the directions, which are the first `rank` tokens."""

    rank: int = 3
    biased, needs_key = True, False

    def encode(self, x, key=None):
        directions = self._directions(x, key)
        return x @ directions, directions

    def decode(self, code):
        products, directions = code
        return products @ directions.T

    def left(self, code):
        return code[1]

    def right(self, code, dz):
        return contract_tokens(code[0], dz)

    def gradient_rank(self, shape):
        return self.rank

    def stored_bytes(self, shape, dtype):
        tokens, features = math.prod(shape[:-1]), shape[-1]
        return (tokens + features) * self.rank * jnp.dtype(dtype).itemsize

    def _directions(self, x, key):
        return x.reshape(-1, x.shape[-1])[: self.rank].T


@dataclasses.dataclass(frozen=True, repr=False)
class Projected(Spanned):
    """Draws the directions instead: one of 64 sets."""

    biased, needs_key = True, True

    def _directions(self, x, key):
        key = self.required_key(key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        angles = np.outer(np.arange(1, x.shape[-1] + 1), np.arange(1, self.rank + 1))
        return jnp.cos(angles * (1 + (key[-1] % 64).astype(x.dtype) / 64)).astype(x.dtype)
