"""Storing a few representative tokens, and for each token the one that it resembles.

Follows PAMM ("QKV Projections Require a Fraction of Their Memory", arXiv 2506.02939): random
rows of `x` as generating points, assignment by absolute cosine, aggregation of `dz` before the
product. Two details differ: the normalization β is multiplied into the stored coefficients, and the
assignment has the narrowest unsigned integer dtype that fits.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens, matmul
from actjax._shards import Dims, on_shards
from actjax.codecs.base import FactoredCodec, check_activation, check_positive_integer, token_count
from actjax.formats.code import token_names

_MAX_SCORES = 2**22
"""Largest number of entries of the [tokens, points] score matrix; tokens are cut into blocks."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PointCode:
    """`x_hat[i] = scale[i] * points[index[i]]`.

    Attributes:
      points: `C`, the generating tokens, [k, d].
      index: `f`, [...], uint8, uint16 or uint32; arbitrary where `scale` is zero.
      scale: `β α`, [...], in the dtype of `points`; zero for dropped tokens and for zero tokens.
    """

    points: Any
    index: Any
    scale: Any


@dataclasses.dataclass(frozen=True, repr=False)
class PointApproximation(FactoredCodec):
    """Stores k of the T tokens, and per token the index of the most similar one and a coefficient.

    `f(i) = argmax_j |cos(x_i, C_j)|`, `α_i = <x_i, C_f(i)> / |C_f(i)|²`. Tokens with
    `|x_i − α_i C_f(i)| > tolerance |x_i|` are dropped and the rest is scaled by
    `β = T / (T − dropped)`.

    Storage: `k d + T` values of the dtype of `x`, and T indices of 1 byte (k <= 256), 2 bytes
    (k <= 65,536) or 4 bytes.
    Error: `|x_hat_i − x_i| = |x_i| sin(x_i, C_f(i))` without a tolerance: 0 for generating points.
    A token with NaN or infinities decodes to NaN, and is never dropped; as a generating point it
    may spoil others. The coefficient of a huge token and a tiny point overflows to infinity.
    Devices: choose among the tokens of all; they add up the points [k, d], and [k, n] in place of
    the gradient [d, n].
    Biased: the part of a token orthogonal to its generating point is lost. (The paper calls the
    estimate unbiased. That holds for dropped tokens, not for this part.)
    Source: PAMM, arXiv 2506.02939.

    Attributes:
      ratio: r; `k = max(1, round(r T))`. Give this or `points`.
      points: k, independent of T.
      tolerance: ε; infinite by default, which the paper finds best.
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
          ValueError: `points` is above the number of tokens, or there are no tokens.
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
        check_activation(self, x)
        if x.shape[-1] == 0:
            raise ValueError(f"`x` of {self} must have features, got shape {x.shape}.")
        count = self.count(x.shape)
        points = _sample_rows(x, key, count)
        index, scale, kept = nearest_points(x, points, self.tolerance)
        beta = kept.size / jnp.maximum(kept.sum(dtype=scale.dtype), 1)
        return PointCode(
            points,
            index.astype(_index_dtype(count)),
            jnp.where(kept, beta * scale, 0).astype(x.dtype),
        )

    def decode(self, code: PointCode) -> jax.Array:
        return code.scale[..., None] * code.points[code.index.astype(jnp.int32)]

    def gradient_rank(self, shape: Sequence[int]) -> int:
        return self.count(shape)

    def left(self, code: PointCode) -> jax.Array:
        return code.points.T

    def right(self, code: PointCode, dz: jax.Array) -> jax.Array:
        return scaled_sums(code.index, code.scale, dz, len(code.points))

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        count, tokens = self.count(shape), token_count(shape)
        values = count * shape[-1] + tokens
        return values * jnp.dtype(dtype).itemsize + tokens * _index_dtype(count).itemsize


def nearest_points(
    x: jax.Array, points: jax.Array, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `f(i) = argmax_j |cos(x_i, C_j)|`, `α_i = <x_i, C_f(i)> / |C_f(i)|²`, and a mask.

    No matrix of all tokens by all points exists. Devices that divide the tokens assign their own.

    Args:
      x: tokens, [..., d].
      points: `C`, [k, d], of the same dtype.
      tolerance: ε; tokens with `|x_i - α_i C_f(i)| > ε |x_i|` are dropped.

    Returns:
      Indices, int32; coefficients, in the accumulation dtype; whether a token is kept, bool. Each
      is [...].
    """
    tokens = Dims(token_names(x.ndim - 1))
    inputs = Dims((*tokens.names, None)), Dims.whole(points)
    assign = functools.partial(_nearest_points, tolerance)
    return on_shards(assign, (x, points), inputs, (tokens, tokens, tokens))


def _nearest_points(tolerance: float, x: jax.Array, points: jax.Array) -> tuple[jax.Array, ...]:
    dtype = accumulation_dtype(x.dtype)
    scaled, exponent, inverse_norm = _normalized(points, x.dtype)

    def assign_token(token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        products = matmul(scaled, token)
        index = jnp.argmax(jnp.abs(products) * inverse_norm).astype(jnp.int32)
        alpha = products[index] * inverse_norm[index] ** 2
        if math.isinf(tolerance):
            kept = jnp.bool_(True)
        else:
            size = jnp.max(jnp.abs(token)).astype(dtype)
            unit = token.astype(dtype) / jnp.where(size > 0, size, 1)
            rest = unit - (alpha / jnp.where(size > 0, size, 1)) * scaled[index].astype(dtype)
            # A token that is not finite is kept, so that it is seen: it compares as false.
            kept = ~(jnp.linalg.norm(rest) > tolerance * jnp.linalg.norm(unit))
        return index, jnp.ldexp(alpha, -exponent[index]), kept

    tokens = x.reshape(-1, x.shape[-1])
    block = max(1, _MAX_SCORES // points.shape[0])
    results = jax.lax.map(assign_token, tokens, batch_size=min(block, tokens.shape[0]))
    return tuple(result.reshape(x.shape[:-1]) for result in results)


def _normalized(points: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns points scaled to a largest entry in [0.5, 1), their exponents, and inverse norms.

    The scale is a power of two, so it is exact; the norms of huge or tiny points stay finite. The
    inverse norm of a point of zeros is zero.
    """
    wide = accumulation_dtype(points.dtype)
    largest = jnp.max(jnp.abs(points), axis=-1).astype(wide)
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1], 0)
    scaled = jnp.ldexp(points.astype(wide), -exponent[:, None])
    square = jnp.sum(scaled**2, axis=-1)
    inverse_norm = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    return scaled.astype(dtype), exponent, inverse_norm


def scaled_sums(index: jax.Array, scale: jax.Array, values: jax.Array, segments: int) -> jax.Array:
    """Returns `B̃_j = Σ_{f(i)=j} α_i dz_i`, [k, n] in the accumulation dtype (PAMM, section 3).

    It is a product with a sparse [T, k] matrix. Unlike a scatter, a product adds in a fixed order,
    so two runs give equal bits on every device, and it runs on the matrix units.

    Args:
      index: `f`, [...], below `segments`.
      scale: `α`, [...]; rounded to the dtype of `values`.
      values: `dz`, [..., n].
      segments: k.
    """
    columns = jnp.arange(segments, dtype=jnp.int32)
    columns = jax.lax.broadcast_to_rank(columns, index.ndim + 1)
    factor = scale[..., None].astype(values.dtype)
    selection = jnp.where(index[..., None].astype(jnp.int32) == columns, factor, 0)
    return contract_tokens(selection, values)


def _index_dtype(count: int) -> jnp.dtype:
    """Returns the narrowest unsigned integer dtype that holds `count` indices."""
    types = (jnp.uint8, jnp.uint16, jnp.uint32)
    return jnp.dtype(next(t for t in types if count - 1 <= jnp.iinfo(t).max))


def _sample_rows(x: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Returns `count` tokens of `x` [..., d], drawn without replacement, [count, d]."""
    if x.ndim == 1:
        return x[None]  # A single token.
    rows = jax.random.choice(key, token_count(x.shape), (count,), replace=False)
    # Where devices divide sequences, `x` as a matrix would be gathered.
    return x[jnp.unravel_index(rows, x.shape[:-1])]
