"""Bases by themselves: against LAPACK's singular vectors, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax import LowRank
from actjax.optim.bases import leading_basis, random_basis

pytestmark = pytest.mark.usefixtures("x64", "quick_compile")


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def assert_leading(basis, gradient, rank):
    """Holds a basis to span what LAPACK's leading vectors do: the projectors are equal."""
    u = np.linalg.svd(np.asarray(gradient))[0][:, :rank]
    np.testing.assert_allclose(basis @ basis.T, u @ u.T, atol=1e-9)


def test_of_factors_it_is_that_of_their_product_to_rounding():
    left = normal(0, 12, 5)
    first, second = LowRank(left, normal(1, 5, 8)), LowRank(left, normal(2, 5, 7))
    basis = leading_basis([first, second], 3, jax.random.key(0), "w")
    assert_leading(basis, np.concatenate([first.dense(), second.dense()], axis=1), 3)


def test_of_a_dense_gradient_that_a_sketch_holds_whole_it_is_exact_too():
    # Rank 3 and eight more columns than are asked for: all of a matrix of 11 rows.
    gradient = normal(0, 11, 20)
    assert_leading(leading_basis([gradient], 3, jax.random.key(0), "w"), gradient, 3)


def test_each_of_a_stack_has_its_own():
    stack = normal(0, 2, 11, 20)
    basis = leading_basis([stack], 3, jax.random.key(0), "w")
    for one, gradient in zip(basis, stack, strict=True):
        assert_leading(one, gradient, 3)


def test_factors_of_too_low_a_rank_are_refused():
    thin = LowRank(normal(0, 12, 2), normal(1, 2, 8))
    with pytest.raises(ValueError, match=r"a basis of rank 3 for `w` cannot be taken .* of rank 2"):
        leading_basis([thin], 3, jax.random.key(0), "w")


def test_random_bases_are_orthonormal_if_asked_for():
    basis = random_basis(jax.random.key(0), (2, 9, 4), orthonormal=True)
    np.testing.assert_allclose(basis.mT @ basis, np.broadcast_to(np.eye(4), (2, 4, 4)), atol=1e-5)
    assert random_basis(jax.random.key(0), (400, 100)).var() == pytest.approx(0.01, rel=0.03)
