"""Orthonormal bases by matrix products: Cholesky factors of the Gram matrix, shifted, twice.

Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm" (2015); the shift is that of
Fukaya et al. (2020). Each of the two steps takes two matrix products and a k by k factorization,
and no Householder QR. So it runs at the speed of matrix products and partitions over rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens, matmul


def orthonormalize(y: jax.Array) -> jax.Array:
    """Returns an orthonormal basis of the columns of `y` [..., k], in the accumulation dtype.

    All leading axes are rows of one matrix. For a stack of matrices, use `vmap`.

    Columns that depend on others (in a rank-deficient `y`, or zero columns) come out short or zero,
    never as NaN: the shift keeps the Gram matrix positive definite. A basis with such columns still
    spans the range of `y`.
    """
    y = y.astype(accumulation_dtype(y.dtype))
    largest = jnp.max(jnp.abs(y), axis=tuple(range(y.ndim - 1)), keepdims=True)
    y = y / jnp.where(largest > 0, largest, 1)
    return _cholesky_qr(_cholesky_qr(y))


def _cholesky_qr(y: jax.Array) -> jax.Array:
    # In full float32: GPUs and TPUs may otherwise round operands to 10 or 8 bits, and the basis
    # would be equally far from orthonormal. These products are thin, so it costs little.
    gram = contract_tokens(y, y, precision="highest")
    inverse = jax.scipy.linalg.solve_triangular(
        _shifted_cholesky(gram, y.size // y.shape[-1]),
        jnp.eye(*gram.shape, dtype=gram.dtype),
        lower=True,
    )
    return matmul(y, inverse.T, precision="highest")


def _shifted_cholesky(gram: jax.Array, rows: int) -> jax.Array:
    """Returns the Cholesky factor of a Gram matrix plus a multiple of the identity.

    A shift above the rounding errors of the Gram matrix keeps the factorization real. A shift
    relative to each column would amplify what rounding leaves of dependent columns.

    Args:
      gram: sums over `rows` products, [k, k].
      rows: T.
    """
    rank, info = gram.shape[0], jnp.finfo(gram.dtype)
    longest = jnp.max(jnp.diag(gram))

    def factor(errors: float) -> jax.Array:
        shift = errors * info.eps * longest + info.tiny
        return jnp.linalg.cholesky(gram + shift * jnp.eye(rank, dtype=gram.dtype))

    # Errors are about (k + sqrt(T)) eps of the longest column, squared, if they are independent:
    # this shift shortens the directions of a well-conditioned `y` by no more.
    usual = 2 * (rank + rows**0.5)
    # If many rows are equal, as those of padding are, so are their errors, and these add up: each
    # entry is then off by up to T eps. That shift is too large to take it always.
    certain = usual + rank * rows
    first = factor(usual)
    return jax.lax.cond(jnp.isfinite(first).all(), lambda: first, lambda: factor(certain))


def for_each_matrix(fun: Callable[..., Any], *stacks: jax.Array) -> Any:
    """Applies a function of matrices to stacks [..., m, n], one matrix after the other.

    It is for factorizations by LAPACK. Batched ones can hang on a CPU (QR in JAX 0.10 on two busy
    cores) or corrupt memory (jax-ml/jax issue 39292); on a GPU they run one by one anyway.
    """
    lead = stacks[0].shape[:-2]
    if not lead:
        return fun(*stacks)
    result = _map_matrices(fun, *(x.reshape(-1, *x.shape[-2:]) for x in stacks))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), result)


# Jitted, so that eager calls compile it only once per function.
@functools.partial(jax.jit, static_argnums=0)
def _map_matrices(fun: Callable[..., Any], *stacks: jax.Array) -> Any:
    return jax.lax.map(lambda matrices: fun(*matrices), stacks)


def householder_basis(y: jax.Array) -> jax.Array:
    """Returns orthonormal bases, [..., d, k], that span the columns of each matrix in `y`.

    It uses Householder QR in the accumulation dtype, so the bases are orthonormal for any rank of
    `y`, where `orthonormalize` returns short columns. It is slow: not for every training step.

    Args:
      y: [..., d, k].
    """
    return for_each_matrix(_first_factor, y.astype(accumulation_dtype(y.dtype)))


def _first_factor(matrix: jax.Array) -> jax.Array:
    return jnp.linalg.qr(matrix)[0]
