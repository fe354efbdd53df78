"""Orthonormal bases by matrix products: Cholesky factors of the Gram matrix, shifted, twice.

Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm" (2015); the shift is that of
Fukaya et al. (2020). Two matrix products and a k by k factorisation each: no Householder QR, so it
runs at matmul speed and partitions over rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens, matmul


def orthonormalize(y: jax.Array) -> jax.Array:
    """Returns an orthonormal basis of the columns of `y` [..., k], in the accumulation dtype.

    All leading axes are rows of one matrix: for a stack of matrices, `vmap` it.

    Columns that depend on others (rank-deficient `y`, zero columns) come out short or zero
    rather than as NaN: the shift keeps the Gram matrix positive definite. A basis with such
    columns still spans the range of `y`.
    """
    y = y.astype(accumulation_dtype(y.dtype))
    largest = jnp.max(jnp.abs(y), axis=tuple(range(y.ndim - 1)))
    y = y / jnp.where(largest > 0, largest, 1)
    return _cholesky_qr(_cholesky_qr(y))


def _cholesky_qr(y: jax.Array) -> jax.Array:
    # In full float32: GPUs and TPUs may else round what they multiply to 10 or 8 bits, and the
    # basis would be as far from orthonormal. These products are thin, so it costs little.
    gram = contract_tokens(y, y, precision="highest")
    rank, tokens, info = gram.shape[0], y.size // y.shape[-1], jnp.finfo(gram.dtype)
    # Rounding errs by about (k + sqrt(T)) eps of the longest column, squared. A shift above that
    # keeps the factorisation real, and shortens no direction of a well-conditioned `y` by more.
    # Relative to each column instead, it would blow up what rounding leaves of dependent ones.
    shift = 2 * (rank + tokens**0.5) * info.eps * jnp.max(jnp.diag(gram)) + info.tiny
    shifted = gram + shift * jnp.eye(rank, dtype=gram.dtype)
    factor = jnp.linalg.cholesky(shifted)
    inverse = jax.scipy.linalg.solve_triangular(factor, jnp.eye(rank, dtype=gram.dtype), lower=True)
    return matmul(y, inverse.T, precision="highest")


def for_each_matrix(fun: Callable[..., Any], *stacks: jax.Array) -> Any:
    """Applies a function of matrices to stacks of them, [..., m, n], one after the other.

    For LAPACK's factorisations: those of a whole stack at once can hang on a CPU (QR, JAX 0.10, two
    cores, something else to run beside it) or corrupt its memory (jax-ml/jax issue 39292), and on a
    GPU they run one by one anyway.
    """
    lead = stacks[0].shape[:-2]
    if not lead:
        return fun(*stacks)
    result = _map_matrices(fun, *(x.reshape(-1, *x.shape[-2:]) for x in stacks))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), result)


# Compiled once for a function, also where nobody else compiles.
@functools.partial(jax.jit, static_argnums=0)
def _map_matrices(fun: Callable[..., Any], *stacks: jax.Array) -> Any:
    return jax.lax.map(lambda matrices: fun(*matrices), stacks)


def householder_basis(y: jax.Array) -> jax.Array:
    """Returns an orthonormal basis, [..., d, k], that contains the columns of each `y` [..., d, k].

    By Householder QR, in the accumulation dtype: orthonormal whatever the rank of `y`, where
    `orthonormalize` returns short columns. For what is not hot.
    """
    return for_each_matrix(_first_factor, y.astype(accumulation_dtype(y.dtype)))


def _first_factor(matrix: jax.Array) -> jax.Array:
    return jnp.linalg.qr(matrix)[0]
