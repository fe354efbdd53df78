"""Bases of gradients, compared with LAPACK's singular vectors in float64."""

import functools

import jax
import numpy as np
import pytest
from optim.projected import normal

from actjax.optim.projected.bases import leading_basis, random_basis

pytestmark = pytest.mark.usefixtures("x64")


@functools.partial(jax.jit, static_argnums=1)
def basis_of(gradients, rank):
    return leading_basis(gradients, rank, jax.random.key(0), "w")


def assert_leading(basis, gradient, rank):
    """Asserts that a basis spans LAPACK's leading vectors: the projectors are equal."""
    u = np.linalg.svd(gradient)[0][:, :rank]
    basis = np.asarray(basis)
    np.testing.assert_allclose(basis @ basis.T, u @ u.T, atol=1e-9)


def test_the_basis_of_a_dense_gradient_is_exact_if_the_sketch_spans_its_range():
    # Rank 3 and eight extra columns span a matrix of 11 rows. A stack has a basis for each matrix.
    stack = normal(0, 2, 11, 20)
    for basis, gradient in zip(basis_of([stack], 3), np.asarray(stack), strict=True):
        assert_leading(basis, gradient, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sketch_finds_the_energy_of_gradients_of_different_sizes(dtype):
    # The sketch has 12 columns for 48 rows, and the second gradient hardly any energy.
    decay = 10.0 ** -np.linspace(0, 2, 48)
    large, small = ((normal(i, 48, 48) * decay @ normal(i + 2, 48, 60)) for i in range(2))
    gradients = [np.asarray(g).astype(dtype) for g in (large, small / 30)]
    basis = np.asarray(basis_of(gradients, 4), "float64")
    joined = np.concatenate([np.asarray(g, "float64") for g in gradients], axis=1)
    best = (np.linalg.svd(joined)[1][:4] ** 2).sum()
    # Halko et al., section 4.5: two power iterations leave little to the other directions.
    assert ((basis.T @ joined) ** 2).sum() > 0.99 * best


def test_random_bases_may_be_orthonormal():
    basis = np.asarray(random_basis(jax.random.key(0), (2, 9, 4), orthonormal=True))
    np.testing.assert_allclose(basis.mT @ basis, np.broadcast_to(np.eye(4), (2, 4, 4)), atol=1e-5)
