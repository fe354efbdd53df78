"""Means and deviations of channels, which make the values of a token alike before it is encoded.

In a trained transformer some channels of keys, gates and residual streams have means and deviations
many times those of others. A group then spends its levels on the difference between its channels.
`y = (x - mean) / spread` removes it. With the spread `sqrt(deviation)` and white noise in `y`, as a
rotation gives it, the squared error of `x` is least: noise of power `mean(y²)` in each channel of
`y` is an error of `Σ spread² · Σ deviation² / spread²`, least by the inequality of Cauchy and
Schwarz if `spread²` is proportional to `deviation`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, by_feature, over
from actjax._shards import is_partitioned
from actjax.formats.code import ScaleDtype
from actjax.formats.scales import stored

_LEAST = 2.0**-12
"""Least deviation of a channel, relative to the largest: dividing by less only adds noise."""


_STRIDES = 8, 4
"""Every eighth or fourth token of a long sequence is read for its statistics."""
_SAMPLED = 128
"""Least number of tokens that are sampled. With SmolLM2-135M, 128 of 1,024 tokens give the error of
the gradient that all of them give, and 64 of 256 up to 7% more."""
_SUMS = 10_000
"""Least number of sums over tokens that are taken at once. To take fewer than a GPU has warps
(8,448 on an H100), XLA (JAX 0.10) first writes all tokens to memory, transposed and in float32."""
_BLOCK = 32
"""Least number of tokens that are added up where there are fewer sums."""


def balance_of(x: jax.Array, dtype: ScaleDtype) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the spread of each channel of each sequence, in stored form.

    They are of a sequence alone, which fits its text better than the batch does (SmolLM2-135M on
    GSM8K: 12% less error of the gradient) and needs no reduction over devices that share a batch.
    They are of every eighth of 1,024 or more tokens, every fourth of 512 or more, and all of fewer
    (also where eight or four does not divide the length). The first tokens of a sequence can be a
    thousand times larger than all others. Tokens are therefore weighted by the inverse of their
    norm (a step of Weiszfeld's algorithm for the geometric median, 1937), so that no token counts
    for more than its direction.

    Args:
      x: activations, [..., S, d], or [d] for a single token.
      dtype: dtype of the results; bfloat16 is returned as its bits, uint16.

    Returns:
      Both [..., d].
    """
    tokens = _sample(x[None] if x.ndim == 1 else x).astype(accumulation_dtype(x.dtype))
    # Squares of distances from some token, so that a large mean does not hide a deviation. XLA for
    # GPUs then reads the tokens once for both sums; with distances from the mean it would write
    # them to memory, transposed. Devices that share a sequence would have to exchange the token.
    has_token = tokens.shape[-2] > 0 and not is_partitioned(x)
    weights, unit = _weights(tokens, has_token)
    total = jnp.sum(weights, -1, keepdims=True)
    # Devices that share a sequence would have to exchange the sums of blocks.
    blocks = _blocks(tokens.shape) if has_token else 1

    def weighted(numbers: jax.Array, weights: jax.Array) -> jax.Array:
        return over(_sum(weights[..., None] * numbers, blocks), total)

    if has_token:
        origin = tokens[..., -1, :]
        apart = tokens - origin[..., None, :]
        distance = weighted(apart, weights * unit)
    else:
        origin = weighted(tokens, weights)
        apart = tokens - origin[..., None, :]
        distance = jnp.zeros_like(origin)
    squares = jnp.square((jnp.sqrt(weights) * unit)[..., None] * apart)
    # The distance of a tiny token from a large origin has a large weight, and its square overflows.
    squares = jnp.minimum(squares, _power(tokens.dtype, 3 / 4))
    squares = over(_sum(squares, blocks), total) - jnp.square(distance)
    # Relative before the roots: XLA for GPUs then finds the largest where it computes the squares.
    spread = jnp.sqrt(jnp.sqrt(_relative(squares, _LEAST**2)))
    return stored(origin + distance / unit, dtype), stored(spread, dtype)


def _weights(tokens: jax.Array, has_token: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the inverse norms of tokens [..., S, d] in some unit, and that unit.

    Squares of float32 numbers above 2^64 overflow, and those of numbers below 2^-63 vanish. They
    are therefore summed in three units, of which one then fits. XLA for GPUs does so in one kernel;
    finding the largest number first takes three more.

    Args:
      tokens: in their accumulation dtype.
      has_token: whether the unit is that of the first or the last token, the larger of both. If
        not, it is that of the largest token.

    Returns:
      weights: inverse norms of the tokens times the unit, [..., S]. Zero for a token that is zero,
        or whose norm is not between 2^-31 and 2^16 times that which the unit fits; NaN for a token
        that is not finite.
      unit: a power of two, [..., 1].
    """
    units = _power(tokens.dtype, -5 / 8), 1.0, _power(tokens.dtype, 5 / 8)
    sums = [jnp.sum(jnp.square(tokens * unit), -1) for unit in units]

    def representative(norm: jax.Array) -> jax.Array:
        if has_token:
            return jnp.maximum(norm[..., :1], norm[..., -1:])
        return jnp.max(norm, -1, keepdims=True, initial=0)

    _, plain, enlarged = map(representative, sums)
    is_large = plain > _power(tokens.dtype, 3 / 4)
    # A zero fits every unit.
    is_small = (plain < _power(tokens.dtype, -1 / 2)) & (enlarged > 0)

    def fitting(of_large: Any, of_plain: Any, of_small: Any) -> jax.Array:
        return jnp.where(is_large, of_large, jnp.where(is_small, of_small, of_plain))

    squares = fitting(*sums)
    weights = jnp.where(squares > 0, jax.lax.rsqrt(squares), 0)
    return jnp.where(sums[0] < jnp.inf, weights, jnp.nan), fitting(*units)


def _blocks(shape: Sequence[int]) -> int:
    """Returns the number of equal blocks in which tokens of a shape, [..., S, d], are added up."""
    *lead, length, features = shape
    sums, blocks = math.prod(lead) * features, 1
    while blocks * sums < _SUMS and length % (2 * blocks) == 0 and length >= 2 * _BLOCK * blocks:
        blocks *= 2
    return blocks


def _sum(x: jax.Array, blocks: int) -> jax.Array:
    """Returns the sum of tokens [..., S, d], [..., d], from the sums of equal blocks of them."""
    if blocks > 1:
        *lead, length, features = x.shape
        x = jnp.sum(x.reshape(*lead, blocks, length // blocks, features), -2)
        # Without the barrier XLA makes one sum of both.
        x = jax.lax.optimization_barrier(x)
    return jnp.sum(x, -2)


def _power(dtype: jnp.dtype, part: float) -> float:
    """Returns two to a part of the largest exponent of a dtype: of 128 for float32."""
    return 2.0 ** int(part * jnp.finfo(dtype).maxexp)


def _sample(x: jax.Array) -> jax.Array:
    """Returns some of the tokens of each sequence [..., S, d], evenly apart."""
    length = x.shape[-2]
    for stride in _STRIDES:
        if length % stride == 0 and length // stride >= _SAMPLED:
            # Not a slice with steps, for which XLA gathers a sequence that devices share.
            return x.reshape(*x.shape[:-2], -1, stride, x.shape[-1])[..., 0, :]
    return x


def spread_of(deviation: jax.Array) -> jax.Array:
    """Returns the spreads of channels with these deviations [..., d]: at most 1."""
    return jnp.sqrt(_relative(deviation, _LEAST))


def _relative(x: jax.Array, least: float) -> jax.Array:
    """Returns `x` [..., d] over its largest, but no less than `least`; 1 if none is positive."""
    largest = jnp.max(x, axis=-1, keepdims=True, initial=0)
    # At most one, so that only numbers near the largest of the dtype overflow when divided.
    return jnp.maximum(jnp.where(largest > 0, over(x, largest), 1), least)


def weighted_sums(tokens: jax.Array, centre: jax.Array | None = None) -> tuple[Any, Any]:
    """Returns sums that the mean or the deviations of many activations follow from, in float32.

    Sums of several activations may be added. Divided by the sum of the weights, those of the tokens
    are the mean of `balance_of`, and those of squared distances from it the squares of its
    deviations.

    Args:
      tokens: [..., d].
      centre: [d], from which the distances are measured; None to add the tokens themselves.

    Returns:
      The sum of the weights, which are inverse norms, a scalar; and the weighted sums, [d].
    """
    wide = tokens.astype(jnp.float32).reshape(-1, tokens.shape[-1])
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0)
    norms = jnp.sqrt(jnp.sum(jnp.square(over(wide, largest)), -1, keepdims=True))
    exist = jnp.where(norms > 0, 1.0, 0.0)

    def weighted(x: jax.Array) -> jax.Array:
        """Returns `x` over the norms: no square or inverse of the numbers themselves."""
        return over(over(x * exist, norms), largest)

    if centre is None:
        return jnp.sum(weighted(exist)), jnp.sum(weighted(wide), 0)
    apart = wide - by_feature(centre, wide)
    return jnp.sum(weighted(exist)), jnp.sum(weighted(apart) * apart, 0)


def statistics_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the means, and of the spreads, of an activation of this shape."""
    return (*shape[:-2], shape[-1])
