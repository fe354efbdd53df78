"""Matrices held as a product of two thin factors, and norms of trees that contain them."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.orthogonal import for_each_matrix
from actjax._math.precision import accumulation_dtype, common_dtype, matmul, promoted
from actjax._math.squares import sum_of_squares


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LowRank:
    """The matrix `left @ right`, [..., d, n], held as its two factors.

    It is a pytree, so it passes through `jit`, `scan` and `vmap`. A stack of matrices is one
    `LowRank` with leading axes. It is not an array: call `dense()` to get one. A function of optax
    that reads the factors as if each were a gradient, as `optax.global_norm` does, is an error.

    Attributes:
      left: [..., d, k].
      right: [..., k, n].
      basis_name: name of the basis that `left` is, if several gradients share it; the sum of two
        such gradients keeps its rank. None otherwise. Static.
      orthonormal: whether the columns of `left` are known to be orthonormal, up to the rounding of
        their dtype; the norm is then that of `right`. Static.
    """

    left: Any
    right: Any
    basis_name: str | None = dataclasses.field(default=None, metadata={"static": True})
    orthonormal: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        # While JAX flattens and unflattens trees, leaves may be any object.
        left, right = getattr(self.left, "shape", None), getattr(self.right, "shape", None)
        if left is None or right is None or min(len(left), len(right)) < 2:
            return
        if left[-1] != right[-2] or left[:-2] != right[:-2]:
            hint = " Pass `right` transposed." if left[-1] == right[-1] else ""
            raise ValueError(
                "LowRank takes `left` [..., d, k] and `right` [..., k, n] with equal leading axes:"
                f" got left{left} and right{right}.{hint}"
            )

    def __repr__(self) -> str:
        # JAX also makes trees of this structure with other leaves, such as shardings.
        if not (hasattr(self.left, "shape") and hasattr(self.right, "shape")):
            return (
                f"LowRank(left={self.left!r}, right={self.right!r}, basis_name={self.basis_name!r})"
            )
        shared = "" if self.basis_name is None else f", basis_name={self.basis_name!r}"
        return f"LowRank(shape={self.shape}, rank={self.rank}, dtype={self.dtype}{shared})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [..., d, n]."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes, with leading ones."""
        return self.left.ndim

    @property
    def rank(self) -> int:
        """k, the number of columns of `left`: an upper bound of the rank of the matrix."""
        return self.left.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of `dense()`."""
        return common_dtype(self.left, self.right)

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.left.nbytes + self.right.nbytes

    @property
    def mT(self) -> "LowRank":  # noqa: N802
        """The transpose of the last two axes, as in `jax.Array.mT`."""
        return LowRank(self.right.mT, self.left.mT)

    @property
    def T(self) -> "LowRank":  # noqa: N802
        """The transpose of a single matrix.

        Raises:
          ValueError: it is a stack: use `mT`.
        """
        if self.ndim != 2:
            raise ValueError(f"`T` of {self} would reverse its leading axes: use `mT`.")
        return self.mT

    def dense(self) -> jax.Array:
        """Returns the matrix, [..., d, n], accumulated at least in float32."""
        dtype = accumulation_dtype(self.dtype)
        return jnp.matmul(self.left, self.right, preferred_element_type=dtype).astype(self.dtype)

    def astype(self, dtype: jax.typing.DTypeLike) -> "LowRank":
        """Returns the matrix with factors of another dtype."""
        return dataclasses.replace(
            self, left=self.left.astype(dtype), right=self.right.astype(dtype)
        )

    def norm(self) -> jax.Array:
        """Returns the Frobenius norm, [...], at least in float32.

        It is the norm of `right` if `left` is orthonormal. Otherwise it comes from two k by k Gram
        matrices. Relative error: about `k eps (Σ ‖left_j‖ ‖right_j‖ / norm)²`, with a sum over
        columns of `left` and rows of `right`. It is small unless these cancel.
        """
        if self.orthonormal:
            return _norm(self.right.astype(accumulation_dtype(self.dtype)))
        left, right, exponent = self._balanced()
        square = jnp.sum(_gram(left.mT) * _gram(right), axis=(-2, -1))
        return jnp.ldexp(jnp.sqrt(jnp.maximum(square, 0)), exponent)

    def _balanced(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns factors with entries within 1, and the exponent [...] of their common scale.

        So no square overflows, and no relevant column underflows because another one is large.
        """
        dtype = accumulation_dtype(self.dtype)
        left, left_powers = _unit_columns(self.left.astype(dtype))
        right, right_powers = _unit_columns(self.right.astype(dtype).mT)
        powers = left_powers + right_powers
        largest = jnp.max(powers, axis=-1, initial=jnp.iinfo(powers.dtype).min // 2)
        return jnp.ldexp(left, (powers - largest[..., None])[..., None, :]), right.mT, largest

    def truncate(self, rank: int) -> "LowRank":
        """Returns the best approximation of rank `rank`; `left` becomes orthonormal.

        Error: the Frobenius norm of the error is the root of the sum of squares of the dropped
        singular values, the least for any matrix of that rank (Eckart and Young, 1936). It is
        computed by QR of both factors and an SVD of k by k. The rank of the result is at most the
        number of rows or columns.

        Raises:
          ValueError: `rank` is not within 1 and the present rank.
        """
        if not 1 <= rank <= self.rank:
            raise ValueError(f"`rank` must be within 1 and {self.rank} for {self}, got {rank}.")
        dtype = accumulation_dtype(self.dtype)
        factors = self.left.astype(dtype), self.right.mT.astype(dtype)
        left, values, right = for_each_matrix(_singular_value_decomposition, *factors)
        scaled = values[..., :rank, None] * right[..., :rank, :]
        return LowRank(left[..., :rank].astype(self.dtype), scaled.astype(self.dtype))

    def __add__(self, other: "LowRank") -> "LowRank":
        """Returns the sum. Its rank is the sum of both ranks, unless both have the same basis."""
        if not isinstance(other, LowRank):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"cannot add {other} to {self}: shapes differ.")
        if self.basis_name is not None and self.basis_name == other.basis_name:
            if self.rank != other.rank:
                raise ValueError(f"cannot add {other} to {self}: one basis has one rank.")
            return dataclasses.replace(self, right=self.right + other.right)
        return LowRank(
            jnp.concatenate([self.left, other.left], axis=-1),
            jnp.concatenate([self.right, other.right], axis=-2),
        )

    def __radd__(self, other: Any) -> "LowRank":
        # `sum` starts from 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __neg__(self) -> "LowRank":
        return -1 * self

    def __sub__(self, other: "LowRank") -> "LowRank":
        return self + (-other) if isinstance(other, LowRank) else NotImplemented

    def __mul__(self, scalar: jax.typing.ArrayLike) -> "LowRank":
        """Returns the matrix times a scalar, which multiplies `right`."""
        if isinstance(scalar, LowRank) or jnp.ndim(scalar) != 0:
            raise TypeError(f"{self} can be multiplied by a scalar only: use `dense()` for more.")
        right, factor = promoted(self.right, scalar)
        return dataclasses.replace(self, right=(right * factor).astype(self.right.dtype))

    __rmul__ = __mul__

    def __truediv__(self, scalar: jax.typing.ArrayLike) -> "LowRank":
        if isinstance(scalar, LowRank) or jnp.ndim(scalar) != 0:
            raise TypeError(f"{self} can be divided by a scalar only: use `dense()` for more.")
        right, divisor = promoted(self.right, scalar)
        return dataclasses.replace(self, right=(right / divisor).astype(self.right.dtype))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self} is not an array: call `dense()` to get one, [d, n].")

    # Lets an array on the left defer to `__rmul__`.
    __array_ufunc__ = None


def _flatten_with_keys(x: LowRank) -> tuple[Any, Any]:
    (left, right), static = _flatten(x)
    names = map(jax.tree_util.GetAttrKey, ("left", "right"))
    return tuple(zip(names, (left, right), strict=True)), static


def _flatten(x: LowRank) -> tuple[Any, Any]:
    _refuse_optax()
    return (x.left, x.right), (x.basis_name, x.orthonormal)


def _unflatten(static: Any, factors: Any) -> LowRank:
    return LowRank(*factors, *static)


jax.tree_util.register_pytree_with_keys(LowRank, _flatten_with_keys, _unflatten, _flatten)


def _refuse_optax() -> None:
    """Raises a `TypeError` if optax takes a `LowRank` apart.

    The norm of both factors is not that of the matrix, and both scaled by a half are a quarter of
    it: optax would compute something else, without an error. A pytree cannot say so in any other
    way than by who asks for its leaves: the nearest caller outside of JAX.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "optax":
            raise TypeError(
                f"optax's `{frame.f_code.co_name}` takes a LowRank gradient apart, and may read its"
                " two factors as two gradients. Use actjax.global_norm,"
                " actjax.clip_by_global_norm or actjax.optim.clip_by_global_norm, give it the dense"
                " gradient of jax.grad, or put the transform into the `inner` or `outer` of"
                " actjax.optim.subspace."
            )
        if package not in ("jax", "jaxlib") and frame.f_globals is not globals():
            return
        frame = frame.f_back


def is_low_rank(x: Any) -> bool:
    """Returns whether `x` is a `LowRank`; an `is_leaf` for functions of `jax.tree`."""
    return isinstance(x, LowRank)


def global_norm(tree: Any) -> jax.Array:
    """Returns the root of the sum of squares of all arrays and `LowRank` matrices of a tree.

    It forms no dense matrix and sums at least in float32. (`optax.global_norm` would treat the
    factors as weights.)

    Args:
      tree: a pytree of arrays and `LowRank`s, such as a gradient.
    """
    arrays = []
    for leaf in jax.tree.leaves(tree, is_leaf=is_low_rank):
        if not is_low_rank(leaf):
            arrays.append(jnp.asarray(leaf))
        else:
            arrays.append(leaf.right if leaf.orthonormal else leaf.norm())
    return jnp.sqrt(sum_of_squares(arrays))


def clip_by_global_norm(tree: Any, max_norm: jax.typing.ArrayLike) -> tuple[Any, jax.Array]:
    """Scales a tree of gradients so that its global norm is at most `max_norm`.

    As `optax.clip_by_global_norm`, for trees that contain `LowRank` matrices. It forms no dense
    matrix.

    Args:
      tree: a pytree of arrays and `LowRank`s, such as a gradient.
      max_norm: the largest norm; infinite for no clipping.

    Returns:
      The scaled tree, and its norm before scaling.

    Raises:
      ValueError: `max_norm` is a number that is negative or NaN.
    """
    if isinstance(max_norm, int | float) and not max_norm >= 0:
        raise ValueError(f"`max_norm` of clip_by_global_norm must be at least 0, got {max_norm}.")
    norm = global_norm(tree)
    return scale_tree(tree, clip_factor(norm, max_norm)), norm


def clip_factor(norm: jax.Array, max_norm: jax.typing.ArrayLike) -> jax.Array:
    """Returns the factor that brings a norm `norm` to at most `max_norm`."""
    # Compared this way, NaN stays NaN: it must not pass for a gradient that needs no clipping.
    return jnp.where(norm <= max_norm, 1.0, max_norm / jnp.where(norm == 0, 1, norm))


def scale_tree(tree: Any, factor: jax.Array) -> Any:
    """Multiplies every array and `LowRank` of a tree by a scalar; keeps dtypes."""

    def scale(leaf: Any) -> Any:
        if is_low_rank(leaf):
            return leaf * factor
        return jnp.multiply(*promoted(leaf, factor)).astype(jnp.result_type(leaf))

    return jax.tree.map(scale, tree, is_leaf=is_low_rank)


def _singular_value_decomposition(left: jax.Array, right: jax.Array) -> Any:
    """Returns the singular value decomposition of `left rightᵀ`, of factors [d, k] and [n, k]."""
    left, left_triangle = jnp.linalg.qr(left)
    right, right_triangle = jnp.linalg.qr(right)
    core = jnp.matmul(left_triangle, right_triangle.T, precision="highest")
    u, values, vt = jnp.linalg.svd(core, full_matrices=False)
    return (
        jnp.matmul(left, u, precision="highest"),
        values,
        jnp.matmul(vt, right.T, precision="highest"),
    )


def _norm(x: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of matrices, [...], for numbers of any size."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), initial=0)
    power = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    unit = jnp.ldexp(x, -power[..., None, None])
    return jnp.ldexp(jnp.sqrt(jnp.sum(jnp.square(unit), axis=(-2, -1))), power)


def _gram(rows: jax.Array) -> jax.Array:
    return matmul(rows, rows.mT, precision="highest")


def _unit_columns(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a factor [..., d, k] divided by powers of two, and the exponents [..., k]; exact."""
    largest = jnp.max(jnp.abs(factor), axis=-2, initial=0)
    powers = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    # A column of zeros gets an exponent far below all others; the sum of two does not overflow.
    powers = jnp.where(largest > 0, powers, jnp.where(largest == 0, -(2**16), powers))
    shift = jnp.where(powers == -(2**16), 0, powers)
    return jnp.ldexp(factor, -shift[..., None, :]), powers
