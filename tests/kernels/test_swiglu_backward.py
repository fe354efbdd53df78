"""Tests of actjax/kernels/swiglu_backward: the value and gradients at the decoded inputs."""

import functools

import jax
import numpy as np
import pytest
from kernels.kernel_cases import TINY, assert_near, assert_same, f64, normal, random_code

from actjax import Quantized
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.swiglu_backward.api import swiglu_backward

BOTH = ("reference", "interpreted")

# Gate, up, dtype, shape, outlier channels of each: whole groups in many rows, so that a program has
# several; whole groups and a smaller one, of which one code is rotated; a smaller one alone.
CASES = [
    (Quantized(4, group=16, rounding="dither"), Quantized(4, group=16), "float32", (1500, 32), 0),
    (
        Quantized(2, group=64, rounding="dither"),
        Quantized(6, group=64, rotate=True, balance=True),
        "bfloat16",
        (2, 3, 80),
        3,
    ),
    (
        Quantized(8, group=32, scale_dtype="float32"),
        Quantized(4, group=32, levels="normal"),
        "float16",
        (5, 21),
        2,
    ),
]


@functools.partial(jax.jit, static_argnums=(0, 4))
def backward(implementations, gate, up, dy, with_value=True):
    """Returns the results of each implementation, and the decoded inputs."""
    run = functools.partial(swiglu_backward, with_value=with_value)
    results = [run(gate, up, dy, implementation=name) for name in implementations]
    return results, [dequantize(code, implementation="reference") for code in (gate, up)]


def problem(gate, up, dtype, shape, outliers):
    codes = (
        random_code(codec, dtype, shape, outliers=outliers, seed=seed)
        for seed, codec in enumerate((gate, up))
    )
    return *codes, normal(*shape, seed=2).astype(dtype)


def oracle(g, u, dy):
    """Returns `silu(g) u`, with `silu(g) = g / (1 + exp(-g))`, and its two gradients."""
    sigmoid = 1 / (1 + np.exp(-g))
    slope = sigmoid + g * sigmoid * (1 - sigmoid)
    return g * sigmoid * u, dy * u * slope, dy * g * sigmoid


def test_the_reference_is_the_oracle(x64):
    gate, up, _, *rest = CASES[1]
    gate, up, dy = problem(gate, up, "float64", *rest)
    (results,), decoded = backward(("reference",), gate, up, dy)
    want = oracle(*map(f64, decoded), f64(dy))
    for got, expected in zip(results, want, strict=True):
        assert got.dtype == "float64"
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}-{case[3]}")
def test_implementations_agree(case):
    gate, up, dy = problem(*case)
    (reference, interpreted), decoded = backward(BOTH, gate, up, dy)
    g, u, dy = *map(f64, decoded), f64(dy)
    want = oracle(g, u, dy)
    # The exponential of a rounded number, and a dozen operations. The slope of `silu` adds terms of
    # both signs, below one plus the gate.
    off = TINY * (12 + 4 * abs(g))
    scales = (abs(want[0]), abs(dy * u) / (1 + np.exp(-g)) * (1 + abs(g)), abs(want[2]))
    for a, b, exact, scale in zip(interpreted, reference, want, scales, strict=True):
        assert a.dtype == case[2]
        assert_near(a, exact, off * scale)
        assert_same(a, b, 2 * off * scale)


def test_without_value_it_is_none():
    args = problem(*CASES[-1])
    results, with_value = backward(BOTH, *args, False)[0], backward(BOTH, *args)[0]
    for (value, *gradients), (_, *wanted) in zip(results, with_value, strict=True):
        assert value is None
        # A program of the same operations, fused in another way.
        for got, want in zip(gradients, wanted, strict=True):
            assert_same(got, want, 4 * TINY * abs(f64(want)))
