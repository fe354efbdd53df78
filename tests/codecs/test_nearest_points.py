"""Tests of nearest_points of actjax/codecs/point.py: the point of the largest cosine."""

import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import TINY, f64, normal

from actjax.codecs.point import nearest_points

# Points, features, tokens, tolerance, dtype. There are more points than features, and fewer.
CASES = [
    (1, 96, (2, 3), 0.0, "float32"),
    (5, 96, (18,), float("inf"), "bfloat16"),
    (16, 200, (33,), 0.9, "float32"),
    (40, 7, (3, 24), 0.4, "float16"),
]


@functools.partial(jax.jit, static_argnums=0)
def assigned(tolerance, x, points):
    return nearest_points(x, points, tolerance)


def problem(count, features, shape, dtype):
    """Returns tokens near to and far from points; one point is zero, and two are equal."""
    size = {"float16": 1e3, "float64": 1e100}.get(dtype, 1e30)
    points = f64(normal(count, features, seed=1))
    if count >= 5:
        points[1] *= size
        points[2] = 0
        points[3] = points[0]
        points[4] /= size
    # Tokens as near as a tenth of their length, and as far as random tokens.
    tokens = int(np.prod(shape))
    nearby = np.random.default_rng(2).integers(count, size=tokens)
    lengths = np.linalg.norm(points, axis=-1, keepdims=True)
    units = points / np.where(lengths > 0, lengths, 1)
    noise = f64(normal(tokens, features, seed=3)) / np.sqrt(features)
    x = np.linspace(-3, 3, tokens)[:, None] * units[nearby] + noise
    kinds = np.arange(tokens) % 6
    x[kinds == 1] *= size
    x[kinds == 2] /= size
    x[kinds == 3] = 0
    x[kinds == 4, 1:] = 0
    return x.reshape(*shape, features).astype(dtype), points.astype(dtype)


def cosines(x, points):
    """Returns `|cos|` of tokens and points, times the length of the token; 0 for zero points."""
    lengths = np.linalg.norm(points, axis=-1)
    return abs(x @ points.T) / np.where(lengths > 0, lengths, np.inf)


def check(results, x, points, tolerance, unit):
    """Compares indices, coefficients and the mask with the docstring; an operation errs by
    `unit`."""
    index, alpha, kept = (np.asarray(result) for result in results)
    assert (index.dtype, kept.dtype) == (np.int32, bool)
    assert index.shape == alpha.shape == kept.shape == x.shape[:-1]
    x, points, features = f64(x), f64(points), x.shape[-1]
    lengths, sizes = np.linalg.norm(points, axis=-1), np.linalg.norm(x, axis=-1)
    scores = cosines(x, points)
    # A sum of products, times the inverse root of a sum of squares.
    off = (2 * features + 8) * unit
    got = np.take_along_axis(scores, index[..., None], -1)[..., 0]
    assert np.all(got >= scores.max(-1) - off * sizes)
    ordered = np.sort(scores, -1)
    second = ordered[..., -2] if len(points) > 1 else -1
    clear = ordered[..., -1] - second > off * sizes
    # The first one of equal points.
    first = np.argmax(scores, -1)
    np.testing.assert_array_equal(index[clear], first[clear])

    chosen, length = points[index], lengths[index]
    want = np.sum(x * chosen, -1) / np.where(length > 0, length, np.inf) ** 2
    slack = off * sizes / np.where(length > 0, length, np.inf)
    info = np.finfo(alpha.dtype)
    assert not np.isnan(alpha).any()
    finite = abs(want) < info.max / 2
    assert np.all(abs(f64(alpha) - want)[finite] <= slack[finite] + info.tiny)
    assert np.all(abs(alpha[~finite]) > info.max / 4)

    if tolerance == np.inf:
        assert kept.all()
        return clear
    residuals = np.linalg.norm(x - want[..., None] * chosen, axis=-1)
    # A difference per feature, none above the length.
    sure = abs(residuals - tolerance * sizes) > 3 * off * sizes
    np.testing.assert_array_equal(kept[sure], (residuals <= tolerance * sizes)[sure])
    # A zero token has a zero residual.
    assert kept[sizes == 0].all()
    assert np.mean(sure[sizes > 0]) > 0.9
    return clear


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_point_of_the_largest_cosine(case):
    count, features, shape, tolerance, dtype = case
    x, points = problem(count, features, shape, dtype)
    results = assigned(tolerance, x, points)
    assert results[1].dtype == "float32"
    # The reference keeps 16-bit points in their dtype, scaled by a power of two, which is exact.
    clear = check(results, x, points, tolerance, TINY)
    nonzero = x.any(-1)
    assert clear[nonzero].mean() > 0.5
    index, kept = np.asarray(results[0]), np.asarray(results[2])
    if count >= 5:
        # Points 0 and 3 are equal.
        assert (index != 3).all()
        assert (index == 0).any()
    if 0 < tolerance < np.inf:
        assert 0.2 < kept[nonzero].mean() < 0.9
    if count == 1:
        np.testing.assert_array_equal(index, 0)


def test_nearest_points_in_float64(x64):
    x, points = problem(16, 33, (40,), "float64")
    results = assigned(0.9, x, points)
    assert results[1].dtype == "float64"
    check(results, x, points, 0.9, 2.0**-53)


def test_ties_and_zeros():
    count, features, shape, tolerance, _ = CASES[2]
    x, points = problem(count, features, shape, "float32")
    # All points are equal up to a sign and a power of two, which change no bit of a cosine.
    points[:] = points[0]
    points[1::2] *= -4
    index, alpha, _ = assigned(tolerance, x, points)
    np.testing.assert_array_equal(index, 0)
    zero = ~x.any(-1)
    np.testing.assert_array_equal(np.asarray(alpha)[zero], 0)
    # All points are zero: the residual is the token.
    index, alpha, kept = assigned(tolerance, x, np.zeros_like(points))
    np.testing.assert_array_equal(index, 0)
    np.testing.assert_array_equal(alpha, 0)
    np.testing.assert_array_equal(kept, zero)


def test_tokens_that_are_not_finite_are_kept_and_stay_so():
    count, features, shape, tolerance, _ = CASES[2]
    x, points = problem(count, features, shape, "float32")
    want = assigned(tolerance, x, points)
    x[3, 5], x[8], x[13, 0] = np.nan, np.inf, -np.inf
    bad = ~np.isfinite(x).all(-1)
    _, alpha, kept = assigned(tolerance, x, points)
    assert np.asarray(kept)[bad].all()
    # Huge tokens of tiny points overflow in any case.
    np.testing.assert_array_equal(np.isfinite(alpha), np.isfinite(want[1]) & ~bad)
    np.testing.assert_array_equal(np.asarray(kept)[~bad], np.asarray(want[2])[~bad])
