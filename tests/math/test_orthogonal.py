"""Tests of actjax/_math/orthogonal.py: orthonormal bases, and functions mapped over stacks.

`tests/codecs/test_low_rank.py` tests `orthonormalize` on ill-conditioned and rank-deficient
matrices, through the codec.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax._math import orthogonal
from actjax._math.orthogonal import for_each_matrix

LEADS = [(), (3,), (2, 2)]
ROWS, COLUMNS = 24, 4

orthonormalize = jax.jit(orthogonal.orthonormalize)
householder_basis = jax.jit(orthogonal.householder_basis)

leads = pytest.mark.parametrize("lead", LEADS, ids=str)


def normal(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def f64(x):
    return np.asarray(x, np.float64)


def shift(rows, columns, dtype):
    """Returns the shift of the Cholesky factorization, relative to a squared column."""
    return 2 * (columns + rows**0.5) * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_leading_axes_are_rows_of_one_matrix(dtype, x64):
    y, leads = normal(0, ROWS, COLUMNS, dtype=dtype), ((24,), (2, 12), (2, 3, 4))
    run = jax.jit(lambda ys: [orthogonal.orthonormalize(y) for y in ys])
    for got, lead in zip(run([y.reshape(*lead, COLUMNS) for lead in leads]), leads, strict=True):
        assert (got.shape, got.dtype) == ((*lead, COLUMNS), dtype)
        q, wide = f64(got).reshape(ROWS, COLUMNS), f64(y)
        # Each of the two factorizations is off by half the shift, and rounding adds as much.
        tolerance = 2 * shift(ROWS, COLUMNS, dtype)
        np.testing.assert_allclose(q.T @ q, np.eye(COLUMNS), rtol=0, atol=2 * tolerance)
        lost = np.linalg.norm(wide - q @ (q.T @ wide))
        assert lost <= 2 * tolerance * np.linalg.norm(wide)


def test_the_lengths_of_columns_do_not_matter():
    y = normal(0, ROWS, COLUMNS)
    # Each column is divided by its largest entry, and powers of two change no rounding.
    scaled = y * np.float32(2.0) ** np.float32([-60, 0, 40, 100])
    np.testing.assert_array_equal(orthonormalize(scaled), orthonormalize(y))


def test_a_bfloat16_matrix_has_a_basis_in_float32():
    q = orthonormalize(normal(0, ROWS, COLUMNS, dtype="bfloat16"))
    assert q.dtype == jnp.float32
    tolerance = 4 * shift(ROWS, COLUMNS, "float32")
    np.testing.assert_allclose(f64(q).T @ f64(q), np.eye(COLUMNS), rtol=0, atol=tolerance)


def test_with_a_zero_column_the_others_still_get_a_basis():
    y = normal(0, ROWS, COLUMNS)
    y[:, 1] = 0
    q = f64(orthonormalize(y))
    tolerance = 4 * shift(ROWS, COLUMNS, "float32")
    want = np.diag([1.0, 0, 1, 1])
    np.testing.assert_allclose(q.T @ q, want, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(q[:, 1], 0)


def test_equal_rows_whose_rounding_errors_add_up_get_a_basis():
    # As padding has: each product is rounded in the same way, a thousand times.
    rows, columns = 1024, 256
    y = normal(0, 1, columns) + 1e-6 * normal(1, rows, columns)
    q, wide = f64(orthonormalize(y)), f64(y)
    # Two shifts of up to (2 (k + sqrt(T)) + k T) eps of a squared column; `y` is as long as k.
    larger = shift(rows, columns, "float32") + columns * rows * float(jnp.finfo("float32").eps)
    lost = np.linalg.norm(wide - q @ (q.T @ wide))
    assert lost <= 2 * larger / columns * np.linalg.norm(wide)


def test_a_gram_matrix_that_is_off_by_more_than_usual_has_a_factor():
    error = 3 * shift(ROWS, COLUMNS, "float32")
    gram = np.float32(ROWS) * (np.ones((COLUMNS, COLUMNS)) - error * np.eye(COLUMNS))
    factor = f64(orthogonal._shifted_cholesky(jnp.asarray(gram, jnp.float32), ROWS))
    larger = error / 3 + COLUMNS * ROWS * float(jnp.finfo("float32").eps)
    want = gram + larger * gram.max() * np.eye(COLUMNS)
    # Rounding of the factorization: (k + 1) eps of the matrix (Higham, Theorem 10.3).
    tolerance = (COLUMNS + 1) * COLUMNS * float(jnp.finfo("float32").eps) * ROWS
    np.testing.assert_allclose(factor @ factor.T, want, rtol=0, atol=tolerance)


MATRICES = {
    "normal": np.random.default_rng(0).normal(size=(7, 3)),
    "square": np.random.default_rng(1).normal(size=(3, 3)),
    "zero": np.zeros((7, 3)),
    "rank one": np.outer(np.arange(7), np.arange(3)),
    "columns repeated": np.tile(np.random.default_rng(2).normal(size=(7, 1)), 3),
    "huge": 1e30 * np.random.default_rng(3).normal(size=(7, 3)),
    "tiny": 1e-30 * np.random.default_rng(4).normal(size=(7, 3)),
    "columns of many sizes": np.random.default_rng(5).normal(size=(7, 3)) * [1e-12, 1, 1e12],
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_householder_bases_are_orthonormal_and_contain_the_columns(dtype, x64):
    rng, ys = np.random.default_rng(6), []
    for matrix in MATRICES.values():
        signs = rng.choice([-1, 1], size=(2, 2, 1, 3))
        ys += [matrix.astype(dtype), (matrix * signs).astype(dtype)]
    bases = jax.jit(lambda ys: [orthogonal.householder_basis(y) for y in ys])(ys)
    for y, got in zip(ys, bases, strict=True):
        assert (got.shape, got.dtype) == (y.shape, dtype)
        q, wide = f64(got), f64(y)
        d, k = y.shape[-2:]
        # k reflections of d entries each, for any matrix: Higham, Theorem 19.4, column by column.
        tolerance = d * k * float(jnp.finfo(dtype).eps)
        grams = q.swapaxes(-2, -1) @ q
        np.testing.assert_allclose(grams, np.broadcast_to(np.eye(k), grams.shape), atol=tolerance)
        lost = np.linalg.norm(wide - q @ (q.swapaxes(-2, -1) @ wide), axis=-2)
        assert np.all(lost <= tolerance * np.linalg.norm(wide, axis=-2))


@leads
def test_a_function_is_applied_to_each_matrix_of_a_stack(lead, x64):
    a, b = normal(0, *lead, 4, 3, dtype="float64"), normal(1, *lead, 3, 2, dtype="float64")
    seen = []

    def products(a, b):
        seen.append((a.shape, b.shape))
        return {"product": a @ b, "trace": jnp.sum(a), "column": a[:, 0]}

    got = jax.jit(lambda a, b: for_each_matrix(products, a, b))(a, b)
    # Never with a batch axis, which a factorization must not see.
    assert set(seen) == {((4, 3), (3, 2))}
    assert {name: x.shape for name, x in got.items()} == {
        "product": (*lead, 4, 2),
        "trace": lead,
        "column": (*lead, 4),
    }
    np.testing.assert_allclose(got["product"], f64(a) @ f64(b), rtol=0, atol=1e-14)
    np.testing.assert_allclose(got["trace"], f64(a).sum((-2, -1)), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(got["column"], a[..., 0])


def test_a_stack_is_factorized_one_matrix_at_a_time():
    text = str(jax.make_jaxpr(orthogonal.householder_basis)(np.ones((2, 5, 4, 3), "float32")))
    assert re.search(r"f32\[4,3\] \w+:f32\[3,3\] = qr\[", text)
    assert "length=10" in text


def test_an_empty_stack_stays_empty():
    assert householder_basis(np.ones((0, 4, 3), "float32")).shape == (0, 4, 3)


def test_it_runs_without_jit_and_can_be_differentiated(x64):
    y = jnp.asarray(normal(0, 2, 5, 3, dtype="float64"))
    eager = orthogonal.householder_basis(y)
    np.testing.assert_allclose(eager, householder_basis(y), atol=1e-14)

    def squares(y):
        return jnp.sum(for_each_matrix(lambda m: m @ m.T, y) ** 2)

    want = 4 * f64(y) @ (f64(y).swapaxes(-2, -1) @ f64(y))
    np.testing.assert_allclose(jax.jit(jax.grad(squares))(y), want, rtol=0, atol=1e-12)
