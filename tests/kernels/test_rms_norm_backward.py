"""Tests of actjax/kernels/rms_norm_backward: the value and gradients at the decoded input."""

import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import TINY, assert_near, assert_same, f64, normal, random_code

from actjax import Quantized
from actjax.formats.code import QuantizedCode
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward

EPS = 1e-4
BOTH = ("interpreted", "reference")

# Codec (None for an array), dtype, dtype of the scale, shape, outlier channels. 1501 rows are in
# programs of three, of which the last has one; groups and rows that are not powers of two; a
# rotated group that is a row.
CASES = [
    (Quantized(4, group=16), "float32", "float32", (1501, 32), 0),
    (Quantized(3, group=32, rounding="dither"), "bfloat16", "bfloat16", (2, 3, 96), 3),
    (Quantized(5, group=64, rotate=True, balance=True), "float16", "float32", (5, 64), 2),
    (None, "bfloat16", "float32", (2, 3, 48), 0),
]


@functools.partial(jax.jit, static_argnums=(0, 4))
def backward(implementations, x, scale, dy, with_value=True):
    """Returns the results of each implementation, and the decoded input."""
    run = functools.partial(rms_norm_backward, eps=EPS, with_value=with_value)
    results = [run(x, scale, dy, implementation=name) for name in implementations]
    is_code = isinstance(x, QuantizedCode)
    return results, dequantize(x, implementation="reference") if is_code else x


def problem(codec, dtype, scale_dtype, shape, outliers):
    if codec is None:
        x = 3 * normal(*shape).astype(dtype)
    else:
        x = random_code(codec, dtype, shape, outliers=outliers, zero_row=not outliers)
    scale = 1 + 0.3 * normal(shape[-1], seed=1)
    return x, scale.astype(scale_dtype), normal(*shape, seed=2).astype(dtype)


def oracle(x, scale, dy):
    """Returns `y = s x / r` and its gradients, with `r = sqrt(mean(x²) + eps)` and so `dr = mean(x
    dx) / r`, and bounds of the terms that each result sums.
    """
    r = np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    through_r = x / r**3 * np.mean(dy * scale * x, -1, keepdims=True)
    terms = abs(x) / r**3 * np.mean(abs(dy * scale * x), -1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    values = (x / r * scale, dy * scale / r - through_r, np.sum(dy * x / r, rows))
    return values, (abs(values[0]), abs(dy * scale / r) + terms, np.sum(abs(dy * x / r), rows))


def test_the_reference_is_the_oracle(x64):
    codec, _, _, *rest = CASES[1]
    x, scale, dy = problem(codec, "float64", "float64", *rest)
    (results,), decoded = backward(("reference",), x, scale, dy)
    want, bounds = oracle(f64(decoded), scale, dy)
    for got, expected, bound in zip(results, want, bounds, strict=True):
        assert got.dtype == "float64"
        assert np.all(abs(got - expected) <= 1e-12 * bound)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[3]}")
def test_implementations_agree(case):
    x, scale, dy = problem(*case)
    results, decoded = backward(BOTH, x, scale, dy)
    want, bounds = oracle(f64(decoded), f64(scale), f64(dy))
    # A mean of `d` terms and its root; in the gradient twice, with another mean; then a sum over
    # rows. Each operation errs by 2^-24 of the bound of its terms.
    d, rows = dy.shape[-1], dy.size // dy.shape[-1]
    counts = (d / 2 + 8, 2 * d + 16, rows + d / 2 + 8)
    dtypes = (case[1], case[1], case[2])
    for a, b, exact, bound, count, dtype in zip(
        *results, want, bounds, counts, dtypes, strict=True
    ):
        assert a.dtype == dtype
        assert_near(a, exact, count * TINY * bound)
        assert_same(a, b, 2 * count * TINY * bound)


def test_missing_rows_of_the_last_program_add_nothing_if_eps_is_zero():
    x, scale, dy = problem(None, "float32", "float32", (1501, 32), 0)
    run = functools.partial(rms_norm_backward, eps=0.0, implementation="interpreted")
    *_, dscale = jax.jit(run)(x, scale, dy)
    terms = f64(dy) * f64(x) / np.sqrt(np.mean(f64(x) ** 2, -1, keepdims=True))
    # A sum over rows of terms with a mean of 32 numbers.
    assert_near(dscale, terms.sum(0), (1501 + 16 + 8) * TINY * abs(terms).sum(0))


def test_without_value_it_is_none():
    args = problem(*CASES[-1])
    results, with_value = backward(BOTH, *args, False)[0], backward(BOTH, *args)[0]
    for (value, *gradients), (_, *want) in zip(results, with_value, strict=True):
        assert value is None
        jax.tree.map(np.testing.assert_array_equal, gradients, want)


def test_a_row_of_zeros_has_the_slope_of_the_root_of_eps():
    x, scale, dy = problem(*CASES[0])
    for value, dx, _ in backward(BOTH, x, scale, dy)[0]:
        np.testing.assert_array_equal(value[0], 0)
        np.testing.assert_allclose(dx[0], dy[0] * scale / np.sqrt(EPS), rtol=8 * TINY)
