"""Tests of actjax/kernels/adam_4bit: Adam on moments in 4 bits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import TINY, f64, normal
from optim.nearest import nearest

from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.kernels.adam_4bit.api import MAXIMA, adam_4bit
from actjax.kernels.adam_4bit.reference import Means

HYPER = {"b1": 0.9, "b2": 0.99, "eps": 1e-6, "eps_root": 1e-9}
LEVEL = 4e-7
"""Relative error of a decoded level and of a product."""
LEVELS = np.float64([0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1])

# Shape, group and dtype of gradients: a group that is left over and rows that fill no tile; two
# matrices of several tiles; whole tiles.
CASES = [
    ((5, 70), 32, "float32"),
    ((2, 21, 300), 128, "bfloat16"),
    ((32, 512), 128, "float32"),
]

every = pytest.mark.parametrize("case", CASES, ids=str)


@functools.partial(jax.jit, static_argnums=4)
def stepped(grad, mu, nu, corrections, hyper=tuple(HYPER.items())):
    """Returns the results, and the moments after and before as numbers."""
    results = adam_4bit(grad, mu, nu, corrections, **dict(hyper))
    return results, [m.decode() for m in results[1:]], (mu.decode(), nu.decode())


def zeros(shape, group):
    """Returns moments that are zero, as NumPy arrays."""
    forms = signed_zeros, rank_one_zeros
    moments = jax.eval_shape(lambda: [form(shape, "float32", group) for form in forms])
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), moments)


def moments(shape, group, seed=0):
    """Returns moments with random codes, of which a group, a row and a column are zero."""
    rng = np.random.default_rng(seed)
    mu, nu = zeros(shape, group)

    def scales(*arrays):
        return [np.float32(10.0 ** rng.uniform(-2, 1, x.shape)) for x in arrays]

    mu_scales, mu_rows, mu_columns = scales(mu.scales, mu.rows, mu.columns)
    rows, columns = scales(nu.rows, nu.columns)
    mu_scales[..., 0, 0], rows[..., 1, :], columns[..., 2] = 0, 0, 0
    mu_rows[..., 2, :], mu_columns[..., 3] = 0, 0
    # Two numbers a byte, none of which is -8.
    halves = rng.integers(-7, 8, (2, *mu.codes.shape)) & 15
    codes = np.uint8(halves[0] | halves[1] << 4)
    mu = dataclasses.replace(mu, codes=codes, scales=mu_scales, rows=mu_rows, columns=mu_columns)
    codes = rng.integers(0, 256, nu.codes.shape).astype("uint8")
    return nearest((mu, dataclasses.replace(nu, codes=codes, rows=rows, columns=columns)))


def distance(x, levels):
    """Returns the distance of each number from the nearest level."""
    return np.min(abs(x[..., None] - levels), axis=-1)


@every
def test_a_step_is_that_of_adam_at_the_decoded_moments(case):
    shape, group, dtype = case
    mu, nu = moments(shape, group)
    grad = normal(*shape, seed=1).astype(dtype)
    # Some entries have no gradient.
    grad[..., ::4] = 0
    corrections = np.float32([0.19, 0.0199])
    (update, new_mu, new_nu), decoded, (m, v) = stepped(grad, mu, nu, corrections)

    m, v, g = f64(m), f64(v), f64(grad)
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    divisor = np.sqrt(second / f64(corrections)[1] + 1e-9) + 1e-6
    terms = 0.9 * abs(m) + 0.1 * abs(g)
    want = first / f64(corrections)[0] / divisor
    slack = (2 * LEVEL + 20 * TINY) * terms / f64(corrections)[0] / divisor
    m, v = decoded
    assert update.dtype == "float32"
    assert np.all(abs(f64(update) - want) <= slack)
    for old, new in ((mu, new_mu), (nu, new_nu)):
        assert jax.tree.structure(old) == jax.tree.structure(new)
        assert [x.shape for x in jax.tree.leaves(old)] == [x.shape for x in jax.tree.leaves(new)]
    # Each number has the nearest level of its scale.
    for moment, values in ((new_mu, abs(first)), (new_nu, second)):
        np.testing.assert_allclose(moment.rows, values.max(-1, keepdims=True), rtol=8 * TINY)
        np.testing.assert_allclose(moment.columns, values.max(-2, keepdims=True), rtol=8 * TINY)
    smaller = np.minimum(abs(first).max(-1, keepdims=True), abs(first).max(-2, keepdims=True))
    scaled = abs(first) / np.where(smaller > 0, smaller, 1)
    grouped = np.pad(scaled, [(0, 0)] * (first.ndim - 1) + [(0, -shape[-1] % group)])
    scale = grouped.reshape(*shape[:-1], -1, group).max(-1)
    np.testing.assert_allclose(new_mu.scales, scale, rtol=16 * TINY)
    scale = np.repeat(scale, group, axis=-1)[..., : shape[-1]]
    unit = scaled / np.where(scale > 0, scale, 1)
    error = abs(f64(m) - first)
    assert np.all(error <= smaller * scale * (distance(unit, LEVELS) + 6 * LEVEL))
    scale = np.minimum(second.max(-1, keepdims=True), second.max(-2, keepdims=True))
    unit = second / np.where(scale > 0, scale, 1)
    error = abs(f64(v) - second)
    assert np.all(error <= scale * distance(unit, np.arange(1, 17) / 16) + 4 * LEVEL * scale)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_random_bits_decide_between_two_levels(case):
    shape, group, _ = case
    grad = normal(*shape, seed=2).astype("bfloat16")
    hyper = tuple((HYPER | {"b1": 0.5, "b2": 0.5}).items())
    args = *zeros(shape, group), np.float32([0.5, 0.5])
    random, near = (stepped(grad, *args, hyper)[0] for args in (args, nearest(args)))
    for a, b in zip(random[1:], near[1:], strict=True):
        assert np.mean(np.asarray(a.codes) != np.asarray(b.codes)) > 0.1


@pytest.mark.parametrize("scale", [0.0, 1e15, 1e-15])
def test_zero_huge_and_tiny_numbers(scale):
    shape, group, _ = CASES[0]
    grad = np.float32(scale) * normal(*shape, seed=3)
    (update, *_), moments, _ = stepped(grad, *zeros(shape, group), np.float32([0.1, 0.01]))
    first, second = map(f64, moments)
    assert all(np.isfinite(x).all() for x in (update, first, second))
    if not scale:
        assert not any(np.any(x) for x in (update, first, second))
        return
    largest = 0.1 * abs(f64(grad)).max()
    assert abs(first).max() == pytest.approx(largest, rel=1e-6)
    assert np.all(abs(first - 0.1 * f64(grad)) <= 0.23 * largest)
    # A second moment never becomes zero.
    assert np.all(second > 0)
    assert second.max() == pytest.approx(0.01 * (f64(grad) ** 2).max(), rel=1e-5)


def test_the_first_pass_returns_the_maxima_of_tiles():
    shape, group, _ = CASES[1]
    grad, maxima = normal(*shape, seed=4), functools.partial(MAXIMA, b1=0.5, b2=0.5)
    maxima_of_tiles = jax.jit(maxima)(grad, *zeros(shape, group))
    for i, moment in enumerate((0.5 * abs(f64(grad)), 0.5 * f64(grad) ** 2)):
        padded = np.pad(moment, [(0, 0), (0, 11), (0, 212)]).reshape(2, 2, 16, 2, 256)
        rows = padded.max(-1).reshape(2, 32, 2)[:, :21]
        np.testing.assert_allclose(maxima_of_tiles[2 * i], rows, rtol=4 * TINY)
        columns = padded.max(2).reshape(2, 2, 512)[..., :300]
        np.testing.assert_allclose(maxima_of_tiles[2 * i + 1], columns, rtol=4 * TINY)


@functools.partial(jax.jit, static_argnums=4)
def factored_steps(grad, mu, means, corrections, hyper):
    return adam_4bit(grad, mu, means, corrections, **dict(hyper))


@every
def test_a_factored_moment_is_that_of_adafactor(case):
    shape, group, dtype = case
    mu, nu = moments(shape, group)
    grad = normal(*shape, seed=5).astype(dtype)
    means = Means(np.square(nu.rows) + np.float32(1e-3), np.square(nu.columns) + np.float32(1e-3))
    corrections = np.float32([0.19, 0.0199])
    hyper = HYPER | {"eps_squared": 1e-2}
    update, new_mu, new = factored_steps(grad, mu, means, corrections, tuple(hyper.items()))

    m, squares = f64(jax.jit(lambda mu: mu.decode())(mu)), f64(grad) ** 2 + 1e-2
    rows, columns = (
        0.99 * f64(old) + 0.01 * squares.mean(axis, keepdims=True)
        for old, axis in ((means.rows, -1), (means.columns, -2))
    )
    first = 0.9 * m + 0.1 * f64(grad)
    second = rows / rows.mean(-2, keepdims=True) * columns
    divisor = np.sqrt(second / f64(corrections)[1] + 1e-9) + 1e-6
    want = first / f64(corrections)[0] / divisor
    # Means of at most 512 squares, and the mean of the rows, are rounded sums; a root halves it.
    terms = 0.9 * abs(m) + 0.1 * abs(f64(grad))
    slack = (2 * LEVEL + 100 * TINY) * terms / f64(corrections)[0] / divisor
    assert np.all(abs(f64(update) - want) <= slack)
    np.testing.assert_allclose(new.rows, rows, rtol=50 * TINY)
    np.testing.assert_allclose(new.columns, columns, rtol=50 * TINY)
    np.testing.assert_allclose(
        new_mu.rows, abs(first).max(-1, keepdims=True), rtol=8 * TINY, atol=1e-12
    )


def test_an_update_is_zero_where_the_squares_of_a_gradient_overflow():
    shape, group, _ = CASES[0]
    grad = np.full(shape, 1e25, "float32")
    means = Means(np.zeros((*shape[:-1], 1), "float32"), np.zeros((1, shape[-1]), "float32"))
    hyper = tuple((HYPER | {"eps_squared": 1e-30}).items())
    mu, _ = zeros(shape, group)
    update, new_mu, _ = factored_steps(grad, mu, means, np.float32([0.1, 0.01]), hyper)
    assert not np.any(update)
    assert np.isfinite(new_mu.rows).all()
