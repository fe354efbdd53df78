"""Codecs that store `x` of shape [T, d] as a product of two thin factors.

Wei et al. (2026), section 4, store `x ≈ u vᵀ` with `u` [T, k] and `v` [d, k]; the weight gradient
`v (uᵀ dz)` then costs `2 k (T + d) n` operations instead of `2 T d n`. The randomised range finder
follows Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), with one change:
the sketch is orthonormalized with Cholesky factors of its Gram matrix (`actjax._math.orthogonal`),
which runs at the speed of matrix products and partitions over tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.orthogonal import orthonormalize
from actjax._math.precision import accumulation_dtype, contract_tokens, matmul
from actjax.codecs.base import (
    FactoredCodec,
    check_activation,
    check_positive_integer,
    key_bytes,
    raw_key,
    token_count,
    wrap_key,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProjectedCode:
    """`x S` and the key that `S` is drawn from.

    Attributes:
      projected: `x S`, [..., k].
      key: the words of the key (threefry: two uint32).
      features: d. Static.
      dtype: dtype of `x`. Static.
      key_impl: generator of the key. Static.
    """

    projected: Any
    key: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    key_impl: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactoredCode:
    """`x_hat = u vᵀ`.

    Attributes:
      u: factor of the tokens, [..., k].
      v: factor of the features, [d, k].
    """

    u: Any
    v: Any


@dataclasses.dataclass(frozen=True, repr=False)
class RandomProjection(FactoredCodec):
    """Stores `x S`, with `S ~ N(0, 1/k)` of shape [d, k], and the key of `S`; decodes to `x S Sᵀ`.

    Storage: `T k` values of the dtype of `x`, and 8 bytes of key.
    Overflow: sums over tokens and features may become infinite or NaN where numbers are above the
      largest of their dtype over `1024 sqrt(T d)`; none below did (`tests/fuzz/test_arrays.py`).
    Error: `E‖x_hat − x‖² = ‖x‖² (d + 1) / k` (Frobenius): larger than `x` itself while `k <= d`.
    Devices: add up `(x S)ᵀ dz` [k, n] in place of the gradient [d, n].
    Unbiased, since `E[S Sᵀ] = I`.
    Source: CompAct (Shamshoum et al., 2025); "RP" in Wei et al. (2026), Table 5.

    Attributes:
      rank: k.
    """

    rank: int

    biased = False
    needs_key = True

    def __post_init__(self) -> None:
        check_positive_integer("RandomProjection", "rank", self.rank)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> ProjectedCode:
        key = self.required_key(key)
        check_activation(self, x)
        _check_rank(self, self.rank, x.shape)
        matrix = _projection(key, x.shape[-1], self.rank, x.dtype)
        words, impl = raw_key(key)
        projected = matmul(x, matrix).astype(x.dtype)
        return ProjectedCode(projected, words, x.shape[-1], x.dtype, impl)

    def decode(self, code: ProjectedCode) -> jax.Array:
        return matmul(code.projected, self._matrix(code).T).astype(code.dtype)

    def gradient_rank(self, shape: Sequence[int]) -> int:
        del shape
        return self.rank

    def left(self, code: ProjectedCode) -> jax.Array:
        return self._matrix(code)

    def right(self, code: ProjectedCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(code.projected, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        _check_rank(self, self.rank, shape)
        return token_count(shape) * self.rank * jnp.dtype(dtype).itemsize + key_bytes()

    def _matrix(self, code: ProjectedCode) -> jax.Array:
        key = wrap_key(code.key, code.key_impl)
        return _projection(key, code.features, self.rank, code.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class RandomizedSVD(FactoredCodec):
    """Stores an orthonormal `u` [T, k] that spans `x Ω`, and `v = xᵀ u` [d, k]; decodes to `u vᵀ`.

    Storage: `k (T + d)` values of the dtype of `x`.
    Overflow: sums over tokens and features may become infinite or NaN where numbers are above the
      largest of their dtype over `1024 sqrt(T d)`; none below did (`tests/fuzz/test_arrays.py`).
    Error: close to that of the best approximation of rank k: for any `p in 2..k-2`,
    `E‖x_hat − x‖ <= sqrt(1 + (k − p) / (p − 1)) (Σ_{j > k − p} σ_j²)^½`
    (Halko et al., Theorem 10.5); each power iteration brings it closer to the best.
    Devices: add up `v` [d, k] and `uᵀ dz` [k, n] in place of the gradient [d, n], k² numbers for
      each orthonormalization, and [d, k] for each power iteration.
    Biased: `x_hat` is a projection of `x`, so what lies outside the span of `u` is lost.
    Source: Wei et al. (2026), section 4, "RSVD"; Halko et al. (2011), algorithms 4.3 and 4.4.

    Attributes:
      rank: k.
      power_iterations: how often `x xᵀ` is applied to the sketch `x Ω`, with `Ω` [d, k] of normal
        numbers. The sketch is orthonormalized after each time.
    """

    rank: int
    power_iterations: int = 0

    biased = True
    needs_key = True

    def __post_init__(self) -> None:
        check_positive_integer("RandomizedSVD", "rank", self.rank)
        check_positive_integer("RandomizedSVD", "power_iterations", self.power_iterations, 0)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> FactoredCode:
        key = self.required_key(key)
        check_activation(self, x)
        _check_rank(self, self.rank, x.shape)
        u = _range_basis(x, key, self.rank, self.power_iterations).astype(x.dtype)
        return FactoredCode(u, contract_tokens(x, u).astype(x.dtype))

    def decode(self, code: FactoredCode) -> jax.Array:
        return matmul(code.u, code.v.T).astype(code.v.dtype)

    def gradient_rank(self, shape: Sequence[int]) -> int:
        del shape
        return self.rank

    def left(self, code: FactoredCode) -> jax.Array:
        return code.v

    def right(self, code: FactoredCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(code.u, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        _check_rank(self, self.rank, shape)
        return (token_count(shape) + shape[-1]) * self.rank * jnp.dtype(dtype).itemsize


def _projection(key: jax.Array, features: int, rank: int, dtype: jnp.dtype) -> jax.Array:
    """Returns `S ~ N(0, 1 / rank)`, [features, rank], a function of its arguments alone."""
    normal = jax.random.normal(key, (features, rank), accumulation_dtype(dtype))
    return (normal / jnp.sqrt(rank).astype(normal.dtype)).astype(dtype)


def _range_basis(x: jax.Array, key: jax.Array, rank: int, power_iterations: int) -> jax.Array:
    """Returns an orthonormal basis, [..., rank], of most of the range of `x`."""
    omega = jax.random.normal(key, (x.shape[-1], rank), accumulation_dtype(x.dtype))
    basis = orthonormalize(matmul(x, omega.astype(x.dtype)))
    for _ in range(power_iterations):
        directions = orthonormalize(contract_tokens(x, basis.astype(x.dtype)))
        basis = orthonormalize(matmul(x, directions.astype(x.dtype)))
    return basis


def _check_rank(codec: FactoredCodec, rank: int, shape: Sequence[int]) -> None:
    tokens, features = token_count(shape), shape[-1]
    if rank > min(tokens, features):
        raise ValueError(
            f"`rank` {rank} of {codec} is above min(T, d) = {min(tokens, features)} of an"
            f" activation of shape {tuple(shape)} (T = {tokens} tokens, d = {features} features):"
            " lower the rank, or use Exact()."
        )
