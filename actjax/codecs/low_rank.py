"""Codecs that store `x` of shape [T, d] as a product of two thin factors.

Wei et al. (2026), section 4, store `x ≈ u vᵀ` with `u` [T, k] and `v` [d, k]; the weight gradient
`v (uᵀ dz)` then costs `2 k (T + d) n` operations instead of `2 T d n`. The randomised range finder
follows Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), with one change:
the sketch is orthonormalised with Cholesky factors of its Gram matrix (`actjax._math.orthogonal`),
which runs at the speed of matrix products and partitions over tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax._math.orthogonal import orthonormalize
from actjax._math.precision import accumulation_dtype, contract_tokens, matmul
from actjax.codecs.base import (
    Codec,
    FactoredCodec,
    check_activation,
    check_positive_integer,
    key_bytes,
    raw_key,
    token_count,
    wrap_key,
)
from actjax.codecs.exact import Exact

Sketch = Literal["gaussian", "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProjectedCode:
    """`x S` and the key that `S` is drawn from.

    Attributes:
      projected: the code of `x S` [..., k]; by default that array.
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
      u: the code of the factor of the tokens, [..., k]; by default that array.
      v: factor of the features, [d, k].
    """

    u: Any
    v: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrincipalPlusRandomCode:
    """A low-rank part and a random projection of the remainder.

    Attributes:
      principal: a `FactoredCode`.
      tail: a `ProjectedCode`.
    """

    principal: Any
    tail: Any


@dataclasses.dataclass(frozen=True, repr=False)
class RandomProjection(FactoredCodec):
    """Stores `x S`, with `S ~ N(0, 1/k)` of shape [d, k], and the key of `S`; decodes to `x S Sᵀ`.

    Storage: `T k` values of the dtype of `x`, as stored by `factor`, and 8 bytes of key.
    Overflow: sums over tokens and features may become infinite or NaN where numbers are above the
      largest of their dtype over `1024 sqrt(T d)`; none below did (`tests/fuzz/test_arrays.py`).
    Error: `E‖x_hat − x‖² = ‖x‖² (d + 1) / k` (Frobenius): larger than `x` itself while `k <= d`.
    Devices: add up `(x S)ᵀ dz` [k, n] in place of the gradient [d, n].
    Unbiased, since `E[S Sᵀ] = I`, if `factor` is. Biased: if `factor` is.
    Source: CompAct (Shamshoum et al., 2025); "RP" in Wei et al. (2026), Table 5.

    Attributes:
      rank: k.
      factor: codec of `x S`, such as `Quantized(8)`.
    """

    rank: int
    factor: Codec = Exact()

    needs_key = True

    def __post_init__(self) -> None:
        check_positive_integer("RandomProjection", "rank", self.rank)
        _check_factor("RandomProjection", self.factor)

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.factor.biased

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> ProjectedCode:
        key = self.required_key(key)
        check_activation(self, x)
        _check_rank(self, self.rank, x.shape)
        matrix = _projection(key, x.shape[-1], self.rank, x.dtype)
        return self.code_of(matmul(x, matrix).astype(x.dtype), x, key)

    def code_of(self, projected: jax.Array, x: jax.Array, key: jax.Array) -> ProjectedCode:
        """Returns the code of `x` from its projection.

        Args:
          projected: [..., k].
          x: [..., d]; only its shape and dtype are read.
          key: key of the projection.
        """
        words, impl = raw_key(key)
        stored = self.factor.encode(projected, jax.random.fold_in(key, 1))
        return ProjectedCode(stored, words, x.shape[-1], x.dtype, impl)

    def decode(self, code: ProjectedCode) -> jax.Array:
        return matmul(self._projected(code), self._matrix(code).T).astype(code.dtype)

    def _projected(self, code: ProjectedCode) -> jax.Array:
        return self.factor.decode(code.projected)

    def gradient_rank(self, shape: Sequence[int]) -> int:
        del shape
        return self.rank

    def left(self, code: ProjectedCode) -> jax.Array:
        return self._matrix(code)

    def right(self, code: ProjectedCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self._projected(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        _check_rank(self, self.rank, shape)
        return self.factor.stored_bytes((*shape[:-1], self.rank), dtype) + key_bytes()

    def _matrix(self, code: ProjectedCode) -> jax.Array:
        key = wrap_key(code.key, code.key_impl)
        return _projection(key, code.features, self.rank, code.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class RandomizedSVD(FactoredCodec):
    """Stores an orthonormal `u` [T, k] that spans `x Ω`, and `v = xᵀ u` [d, k]; decodes to `u vᵀ`.

    Storage: `k (T + d)` values of the dtype of `x`, those of `u` as stored by `factor`.
    Overflow: sums over tokens and features may become infinite or NaN where numbers are above the
      largest of their dtype over `1024 sqrt(T d)`; none below did (`tests/fuzz/test_arrays.py`).
    Error: close to that of the best approximation of rank k: for Gaussian sketches and any
    `p in 2..k-2`, `E‖x_hat − x‖ <= sqrt(1 + (k − p) / (p − 1)) (Σ_{j > k − p} σ_j²)^½`
    (Halko et al., Theorem 10.5); each power iteration brings it closer to the best.
    Devices: add up `v` [d, k] and `uᵀ dz` [k, n] in place of the gradient [d, n], k² numbers for
      each orthonormalisation, [d, k] for each power iteration, and k rows of `x` if they are drawn.
    Biased: `x_hat` is a projection of `x`, so what lies outside the span of `u` is lost.
    Source: Wei et al. (2026), section 4, "RSVD"; Halko et al. (2011), algorithms 4.3 and 4.4.

    Attributes:
      rank: k.
      power_iterations: how often `x xᵀ` is applied to the sketch, which is orthonormalised after
        each time.
      sketch: "gaussian" draws a normal `Ω`; "rows" takes k random rows of `x` as `Ωᵀ`, which needs
        no random matrix and weighs directions by their energy.
      factor: codec of `u`, such as `Quantized(8)`.
    """

    rank: int
    power_iterations: int = 0
    sketch: Sketch = "gaussian"
    factor: Codec = Exact()

    biased = True
    needs_key = True

    def __post_init__(self) -> None:
        _check_factor("RandomizedSVD", self.factor)
        check_positive_integer("RandomizedSVD", "rank", self.rank)
        check_positive_integer("RandomizedSVD", "power_iterations", self.power_iterations, 0)
        _check_sketch("RandomizedSVD", self.sketch)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> FactoredCode:
        key = self.required_key(key)
        check_activation(self, x)
        _check_rank(self, self.rank, x.shape)
        u = _range_basis(x, key, self.rank, self.power_iterations, self.sketch).astype(x.dtype)
        v = contract_tokens(x, u).astype(x.dtype)
        return FactoredCode(self.factor.encode(u, jax.random.fold_in(key, 1)), v)

    def decode(self, code: FactoredCode) -> jax.Array:
        return matmul(self.decode_u(code), code.v.T).astype(code.v.dtype)

    def decode_u(self, code: FactoredCode) -> jax.Array:
        """Returns the factor of the tokens, [..., k], as stored."""
        return self.factor.decode(code.u)

    def gradient_rank(self, shape: Sequence[int]) -> int:
        del shape
        return self.rank

    def left(self, code: FactoredCode) -> jax.Array:
        return code.v

    def right(self, code: FactoredCode, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode_u(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        _check_rank(self, self.rank, shape)
        u = self.factor.stored_bytes((*shape[:-1], self.rank), dtype)
        return u + shape[-1] * self.rank * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, repr=False)
class PrincipalPlusRandom(FactoredCodec):
    """A randomised SVD of rank `rank` plus a random projection of the remainder to rank `tail`.

    Storage: `rank (T + d) + tail T` values of the dtype of `x`, those of tokens as stored by
      `factor`, and 8 bytes of key.
    Overflow: sums over tokens and features may become infinite or NaN where numbers are above the
      largest of their dtype over `1024 sqrt(T d)`; none below did (`tests/fuzz/test_arrays.py`).
    Error: `E‖x_hat − x‖² = E‖r‖² (d + 1) / tail`, where `r` is the remainder of the randomised SVD.
    Devices: exchange what `RandomizedSVD` and `RandomProjection` do.
    Unbiased if `factor` is, since the projection of the remainder is unbiased; only the remainder
      adds variance. Biased: if `factor` is.
    Source: this library.

    Attributes:
      rank: rank of the principal part.
      tail: rank of the random projection.
      power_iterations: as in `RandomizedSVD`.
      sketch: as in `RandomizedSVD`.
      factor: codec of the factors [T, k] of both parts, such as `Quantized(8)`.
    """

    rank: int
    tail: int
    power_iterations: int = 0
    sketch: Sketch = "gaussian"
    factor: Codec = Exact()

    needs_key = True

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.factor.biased

    def __post_init__(self) -> None:
        _check_factor("PrincipalPlusRandom", self.factor)
        check_positive_integer("PrincipalPlusRandom", "rank", self.rank)
        check_positive_integer("PrincipalPlusRandom", "tail", self.tail)
        check_positive_integer("PrincipalPlusRandom", "power_iterations", self.power_iterations, 0)
        _check_sketch("PrincipalPlusRandom", self.sketch)

    @property
    def principal(self) -> RandomizedSVD:
        """The codec of the principal part."""
        return RandomizedSVD(self.rank, self.power_iterations, self.sketch, self.factor)

    @property
    def random(self) -> RandomProjection:
        """The codec of the remainder."""
        return RandomProjection(self.tail, self.factor)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> PrincipalPlusRandomCode:
        key = self.required_key(key)
        check_activation(self, x)
        _check_rank(self, self.rank + self.tail, x.shape)
        sketch_key, tail_key = jax.random.split(key)
        principal = self.principal.encode(x, sketch_key)
        matrix = _projection(tail_key, x.shape[-1], self.tail, x.dtype)
        # (x − u vᵀ) S from the factors as stored, so that the tail corrects their rounding. The
        # remainder itself, a second [T, d], never exists.
        remainder = matmul(x, matrix) - matmul(
            self.principal.decode_u(principal),
            contract_tokens(principal.v, matrix).astype(x.dtype),
        )
        tail = self.random.code_of(remainder.astype(x.dtype), x, tail_key)
        return PrincipalPlusRandomCode(principal, tail)

    def decode(self, code: PrincipalPlusRandomCode) -> jax.Array:
        return self.principal.decode(code.principal) + self.random.decode(code.tail)

    def gradient_rank(self, shape: Sequence[int]) -> int:
        del shape
        return self.rank + self.tail

    def left(self, code: PrincipalPlusRandomCode) -> jax.Array:
        principal, tail = self.principal.left(code.principal), self.random.left(code.tail)
        return jnp.concatenate([principal, tail], axis=1)

    def right(self, code: PrincipalPlusRandomCode, dz: jax.Array) -> jax.Array:
        principal, tail = self.principal.right(code.principal, dz), self.random.right(code.tail, dz)
        return jnp.concatenate([principal, tail], axis=0)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        _check_rank(self, self.rank + self.tail, shape)
        principal = self.principal.stored_bytes(shape, dtype)
        return principal + self.random.stored_bytes(shape, dtype)


def _check_factor(codec: str, factor: Any) -> None:
    if not isinstance(factor, Codec) or isinstance(factor, FactoredCodec):
        raise TypeError(
            f"`factor` of {codec} must be an actjax.Codec that stores numbers, such as"
            f" Quantized(8), got {factor!r}."
        )


def _projection(key: jax.Array, features: int, rank: int, dtype: jnp.dtype) -> jax.Array:
    """Returns `S ~ N(0, 1 / rank)`, [features, rank], a function of its arguments alone."""
    normal = jax.random.normal(key, (features, rank), accumulation_dtype(dtype))
    return (normal / jnp.sqrt(rank).astype(normal.dtype)).astype(dtype)


def _range_basis(
    x: jax.Array, key: jax.Array, rank: int, power_iterations: int, sketch: Sketch
) -> jax.Array:
    """Returns an orthonormal basis, [..., rank], of most of the range of `x`."""
    features = x.shape[-1]
    if sketch == "gaussian":
        omega = jax.random.normal(key, (features, rank), accumulation_dtype(x.dtype))
    else:
        omega = _unit_rows(sample_rows(x, key, rank)).T
    basis = orthonormalize(matmul(x, omega.astype(x.dtype)))
    for _ in range(power_iterations):
        directions = orthonormalize(contract_tokens(x, basis.astype(x.dtype)))
        basis = orthonormalize(matmul(x, directions.astype(x.dtype)))
    return basis


def sample_rows(x: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Returns `count` tokens of `x` [..., d], drawn without replacement, [count, d]."""
    if x.ndim == 1:
        return x[None]  # A single token.
    rows = jax.random.choice(key, token_count(x.shape), (count,), replace=False)
    # Where devices divide sequences, `x` as a matrix would be gathered.
    return x[jnp.unravel_index(rows, x.shape[:-1])]


def _unit_rows(rows: jax.Array) -> jax.Array:
    """Scales the largest entry of each row to one, so that products neither over- nor underflow."""
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    return rows / jnp.where(largest > 0, largest, 1)


def _check_rank(codec: Codec, rank: int, shape: Sequence[int]) -> None:
    tokens, features = token_count(shape), shape[-1]
    if rank > min(tokens, features):
        raise ValueError(
            f"`rank` {rank} of {codec} is above min(T, d) = {min(tokens, features)} of an"
            f" activation of shape {tuple(shape)} (T = {tokens} tokens, d = {features} features):"
            " lower the rank, or use Exact()."
        )


def _check_sketch(codec: str, sketch: str) -> None:
    if sketch not in get_args(Sketch):
        raise ValueError(f"`sketch` of {codec} must be one of {get_args(Sketch)}, got {sketch!r}.")
