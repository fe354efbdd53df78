"""Tests of the backward passes of RMS norm and SwiGLU: value and gradients at decoded inputs."""

import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import TINY, assert_near, assert_same, f64, normal, random_code

from actjax import Quantized
from actjax.formats.code import QuantizedCode
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.swiglu_backward.api import swiglu_backward

EPS = 1e-4
NORM = functools.partial(rms_norm_backward, eps=EPS)


@functools.partial(jax.jit, static_argnums=(0, 2))
def backward(kernel, args, with_value=True):
    """Returns the results, and the decoded inputs."""
    results = kernel(*args, with_value=with_value)
    is_code = lambda x: isinstance(x, QuantizedCode)  # noqa: E731
    decoded = [dequantize(x) if is_code(x) else x for x in args]
    return results, decoded


def norm_oracle(x, scale, dy):
    """Returns `y = s x / r` and its gradients, with `r = sqrt(mean(x²) + eps)` and so `dr = mean(x
    dx) / r`, and the error of each in roundings.
    """
    r = np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    through_r = x / r**3 * np.mean(dy * scale * x, -1, keepdims=True)
    terms = abs(x) / r**3 * np.mean(abs(dy * scale * x), -1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    values = (x / r * scale, dy * scale / r - through_r, np.sum(dy * x / r, rows))
    bounds = (abs(values[0]), abs(dy * scale / r) + terms, np.sum(abs(dy * x / r), rows))
    # A mean of `d` terms and its root; in the gradient twice, with another mean; then a sum over
    # rows.
    d, count = x.shape[-1], x.size // x.shape[-1]
    counts = (d / 2 + 8, 2 * d + 16, count + d / 2 + 8)
    return values, [n * bound for n, bound in zip(counts, bounds, strict=True)]


def swiglu_oracle(g, u, dy):
    """Returns `silu(g) u`, with `silu(g) = g / (1 + exp(-g))`, its gradients, and their errors."""
    sigmoid = 1 / (1 + np.exp(-g))
    slope = sigmoid + g * sigmoid * (1 - sigmoid)
    values = g * sigmoid * u, dy * u * slope, dy * g * sigmoid
    # The exponential of a rounded number, and a dozen operations. The slope of `silu` adds terms of
    # both signs, below one plus the gate.
    bounds = abs(values[0]), abs(dy * u) * sigmoid * (1 + abs(g)), abs(values[2])
    return values, [(12 + 4 * abs(g)) * bound for bound in bounds]


def norm_case(codec, dtype, scale_dtype, shape, outliers):
    """Returns a kernel, its oracle, and its arguments: a code or an array, scale and gradient."""
    if codec is None:
        x = 3 * normal(*shape).astype(dtype)
    else:
        x = random_code(codec, dtype, shape, outliers=outliers, zero_row=not outliers)
    scale = (1 + 0.3 * normal(shape[-1], seed=1)).astype(scale_dtype)
    return NORM, norm_oracle, (x, scale, normal(*shape, seed=2).astype(dtype))


def swiglu_case(gate, up, dtype, shape, outliers):
    """Returns a kernel, its oracle, and its arguments: the codes of gate and up, and a gradient."""
    codes = (
        random_code(codec, dtype, shape, outliers=outliers, seed=seed)
        for seed, codec in enumerate((gate, up))
    )
    return swiglu_backward, swiglu_oracle, (*codes, normal(*shape, seed=2).astype(dtype))


DITHER = functools.partial(Quantized, rounding="dither")
# A case is made from codecs, dtypes, a shape and a number of outlier channels. 1501 rows are in
# programs of three, of which the last has one; groups and rows that are not powers of two; a
# rotated group that is a row; whole groups and a smaller one, or a smaller one alone.
CASES = {
    "norm, many rows": (norm_case, Quantized(4, 16), "float32", "float32", (1501, 32), 0),
    "norm, bfloat16": (norm_case, DITHER(3, 32), "bfloat16", "bfloat16", (2, 3, 96), 3),
    "norm, rotated, balanced": (
        *(norm_case, Quantized(5, 64, rotate=True, balance=True)),
        *("float16", "float32", (5, 64), 2),
    ),
    "norm, an array": (norm_case, None, "bfloat16", "float32", (2, 3, 48), 0),
    "swiglu, many rows": (swiglu_case, DITHER(4, 16), Quantized(4, 16), "float32", (1500, 32), 0),
    "swiglu, one rotated": (
        *(swiglu_case, DITHER(2, 64), Quantized(6, 64, rotate=True, balance=True)),
        *("bfloat16", (2, 3, 80), 3),
    ),
    "swiglu, normal levels": (
        *(swiglu_case, Quantized(8, 32, scale_dtype="float32"), Quantized(4, 32, levels="normal")),
        *("float16", (5, 21), 2),
    ),
}


def problem(name):
    make, *arguments = CASES[name]
    return make(*arguments)


@pytest.mark.parametrize("name", ["norm, bfloat16", "swiglu, one rotated"])
def test_the_reference_is_the_oracle(name, x64):
    make, *arguments = CASES[name]
    wide = ["float64" if argument == "bfloat16" else argument for argument in arguments]
    kernel, oracle, args = make(*wide)
    results, decoded = backward(kernel, args)
    for got, want, bound in zip(results, *oracle(*map(f64, decoded)), strict=True):
        assert got.dtype == "float64"
        assert np.all(abs(got - want) <= 2.0**-53 * bound + 1e-15)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_oracle(name):
    kernel, oracle, args = problem(name)
    results, decoded = backward(kernel, args)
    # Each operation errs by 2^-24 of the bound of its terms.
    dtypes = (args[2].dtype, args[2].dtype, args[1].dtype)
    for got, want, bound, dtype in zip(results, *oracle(*map(f64, decoded)), dtypes, strict=True):
        assert got.dtype == dtype
        assert_near(got, want, TINY * bound)


@pytest.mark.parametrize(
    ("name", "features"), [("swiglu, many rows", 17), ("swiglu, one rotated", 66)]
)
def test_padding_is_zero_and_all_else_as_without_it(name, features):
    kernel, _, args = problem(name)
    padded = functools.partial(kernel, features=features)
    results, plain = (backward(fun, args)[0] for fun in (padded, kernel))
    for got, want in zip(results, plain, strict=True):
        np.testing.assert_array_equal(got[..., :features], want[..., :features])
        assert not np.any(got[..., features:])
        assert np.any(want[..., features:])


@pytest.mark.parametrize("name", ["norm, an array", "swiglu, normal levels"])
def test_without_value_it_is_none(name):
    kernel, _, args = problem(name)
    (value, *gradients), (_, *wanted) = (backward(kernel, args, x)[0] for x in (False, True))
    assert value is None
    # A program of the same operations, fused in another way.
    for got, want in zip(gradients, wanted, strict=True):
        assert_same(got, want, 4 * TINY * abs(f64(want)))


def test_an_addend_is_added_to_the_rounded_gradient():
    _, _, (x, scale, dy) = problem("norm, an array")
    run = functools.partial(rms_norm_backward, eps=EPS)
    (value, dx, dscale), (same, total, other) = jax.jit(
        lambda *args: (run(*args), run(*args, args[2][::-1]))
    )(x, scale, dy)
    assert_same(total, dx + dy[::-1], 2 * TINY * abs(f64(dx)))
    for got, want in ((same, value), (other, dscale)):
        assert_same(got, want, 4 * TINY * abs(f64(want)))


def test_missing_rows_of_the_last_program_add_nothing_if_eps_is_zero():
    *_, (x, scale, dy) = norm_case(None, "float32", "float32", (1501, 32), 0)
    run = functools.partial(rms_norm_backward, eps=0.0, implementation=None)
    *_, dscale = jax.jit(run)(x, scale, dy)
    terms = f64(dy) * f64(x) / np.sqrt(np.mean(f64(x) ** 2, -1, keepdims=True))
    # A sum over rows of terms with a mean of 32 numbers.
    assert_near(dscale, terms.sum(0), (1501 + 16 + 8) * TINY * abs(terms).sum(0))


def test_a_row_of_zeros_has_the_slope_of_the_root_of_eps():
    kernel, _, (x, scale, dy) = problem("norm, many rows")
    value, dx, _ = backward(kernel, (x, scale, dy))[0]
    np.testing.assert_array_equal(value[0], 0)
    np.testing.assert_allclose(dx[0], dy[0] * scale / np.sqrt(EPS), rtol=8 * TINY)
