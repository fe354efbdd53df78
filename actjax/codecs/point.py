"""Storing a few representative tokens, and for each token which of them it resembles.

Follows PAMM ("QKV Projections Require a Fraction of Their Memory", arXiv 2506.02939): random
rows of `x` as generating points, assignment by absolute cosine, aggregation of `dz` before the
product. What it leaves out: nothing. What it changes: the normalisation β is folded into the
scales when they are stored, and the assignment takes the narrowest unsigned integer that fits.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax.codecs.base import FactoredCodec, check_positive_integer, token_count
from actjax.codecs.low_rank import sample_rows
from actjax.precision import accumulation_dtype, contract_tokens, matmul

_MAX_SCORES = 2**22
"""Entries of the [tokens, points] score matrix that may exist at once; tokens are cut to fit."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PointCode:
    """`x_hat[i] = scale[i] * points[index[i]]`.

    Attributes:
      points: `C`, the generating tokens, [k, d].
      index: `f`, [...], uint8, uint16 or uint32. Whatever stands there where `scale` is zero.
      scale: `β α`, [...], in the dtype of `points`; zero for dropped and for zero tokens.
    """

    points: Any
    index: Any
    scale: Any


@dataclasses.dataclass(frozen=True, repr=False)
class PointApproximation(FactoredCodec):
    """Stores k of the T tokens; per token, the index of the one it resembles most, and a scale.

    `f(i) = argmax_j |cos(x_i, C_j)|`, `α_i = <x_i, C_f(i)> / |C_f(i)|²`. Tokens with
    `|x_i − α_i C_f(i)| > tolerance |x_i|` are dropped and the rest is scaled by
    `β = T / (T − dropped)`.

    Storage: `k d + T` values of the dtype of `x`, and T indices of 1 byte (k <= 256), 2 bytes
    (k <= 65,536) or 4 bytes.
    Error: `|x_hat_i − x_i| = |x_i| sin(x_i, C_f(i))` without a tolerance, so 0 for the sampled.
    Biased: the part of a token orthogonal to its generator is lost. (The paper calls the
    estimate unbiased; that holds for what dropping takes away, not for this part.)
    Source: PAMM, arXiv 2506.02939.

    Attributes:
      ratio: r; `k = max(1, round(r T))`. Give this or `points`.
      points: k, whatever T is.
      tolerance: ε, infinite by default, which the paper finds best.
    """

    ratio: float | None = None
    points: int | None = None
    tolerance: float = math.inf

    biased = True
    needs_key = True

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.points is None):
            raise ValueError(
                "PointApproximation takes either `ratio` or `points`, got"
                f" ratio={self.ratio}, points={self.points}."
            )
        if self.points is not None:
            check_positive_integer("PointApproximation", "points", self.points)
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` of PointApproximation must be in (0, 1], got {self.ratio}.")
        if not self.tolerance >= 0:
            raise ValueError(
                f"`tolerance` of PointApproximation must be >= 0, got {self.tolerance}."
            )

    def count(self, shape: Sequence[int]) -> int:
        """Returns k for an activation of this shape.

        Raises:
          ValueError: `points` is above the number of tokens, or there are none.
        """
        tokens = token_count(shape)
        if tokens == 0:
            raise ValueError(f"{self} needs at least one token, got shape {tuple(shape)}.")
        if self.ratio is not None:
            return max(1, round(self.ratio * tokens))
        assert self.points is not None  # By __post_init__.
        if self.points > tokens:
            raise ValueError(
                f"`points` {self.points} of {self} is above the {tokens} tokens of an activation"
                f" of shape {tuple(shape)}: lower it, or give a `ratio`."
            )
        return self.points

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> PointCode:
        key = self.required_key(key)
        count = self.count(x.shape)
        points = sample_rows(x, key, count)
        index, scale, kept = _assign(x.reshape(-1, x.shape[-1]), points, self.tolerance)
        beta = kept.size / jnp.maximum(kept.sum(dtype=scale.dtype), 1)
        lead = x.shape[:-1]
        return PointCode(
            points,
            index.astype(_index_dtype(count)).reshape(lead),
            jnp.where(kept, beta * scale, 0).astype(x.dtype).reshape(lead),
        )

    def decode(self, code: PointCode) -> jax.Array:
        return code.scale[..., None] * code.points[code.index.astype(jnp.int32)]

    def gradient_rank(self, shape: Sequence[int]) -> int:
        return self.count(shape)

    def left(self, code: PointCode) -> jax.Array:
        return code.points.T

    def right(self, code: PointCode, dz: jax.Array) -> jax.Array:
        return _scaled_segment_sum(code, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        count, tokens = self.count(shape), token_count(shape)
        values = count * shape[-1] + tokens
        return values * jnp.dtype(dtype).itemsize + tokens * _index_dtype(count).itemsize


def _index_dtype(count: int) -> jnp.dtype:
    """Returns the narrowest unsigned integer that holds `count` indices."""
    types = (jnp.uint8, jnp.uint16, jnp.uint32)
    return jnp.dtype(next(t for t in types if count - 1 <= jnp.iinfo(t).max))


def _assign(
    x: jax.Array, points: jax.Array, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns f [T], α [T] in the accumulation dtype, and which tokens are kept, [T]."""
    dtype = accumulation_dtype(x.dtype)
    # Points are brought to a largest entry in [0.5, 1) by powers of two, which is exact, so that
    # norms of huge or tiny tokens stay finite.
    largest = jnp.max(jnp.abs(points), axis=-1).astype(dtype)
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1], 0)
    scaled = jnp.ldexp(points.astype(dtype), -exponent[:, None])
    square = jnp.sum(scaled**2, axis=-1)
    inverse_norm = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    scaled = scaled.astype(x.dtype)

    def assign_token(token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        products = matmul(scaled, token)
        index = jnp.argmax(jnp.abs(products) * inverse_norm)
        alpha = products[index] * inverse_norm[index] ** 2
        if math.isinf(tolerance):
            kept = jnp.bool_(True)
        else:
            size = jnp.max(jnp.abs(token)).astype(dtype)
            unit = token.astype(dtype) / jnp.where(size > 0, size, 1)
            rest = unit - (alpha / jnp.where(size > 0, size, 1)) * scaled[index].astype(dtype)
            kept = jnp.linalg.norm(rest) <= tolerance * jnp.linalg.norm(unit)
        return index, jnp.ldexp(alpha, -exponent[index]), kept

    block = max(1, _MAX_SCORES // points.shape[0])
    return jax.lax.map(assign_token, x, batch_size=min(block, x.shape[0]))


def _scaled_segment_sum(code: PointCode, dz: jax.Array) -> jax.Array:
    """Returns `B̃`, [k, n]: per point, the sum of `scale_i dz_i` over the tokens assigned to it.

    As a product with a sparse [T, k] matrix: unlike a scatter it adds in a fixed order, so two
    runs give the same bits on every device, and it runs on the matrix units.
    """
    columns = jnp.arange(code.points.shape[0], dtype=code.index.dtype)
    scale = code.scale[..., None].astype(dz.dtype)
    selection = jnp.where(code.index[..., None] == columns, scale, 0)
    return contract_tokens(selection, dz)
