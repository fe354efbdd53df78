"""Tests of actjax/ops/glu.py: an exact gradient from gate and up, or from codes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.helpers import (
    assert_close,
)

from actjax import swiglu


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    numbers = 2 * np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(np.asarray(numbers, dtype or jax.dtypes.canonicalize_dtype(float)))


@jax.jit
def run(gate, up, dy):
    y, pull = jax.vjp(swiglu, gate, up)
    return y, *pull(dy)


def oracle(gate, up, dy):
    return oracles.swiglu(gate, up), *oracles.swiglu_vjp(gate, up, dy)


def test_value_and_gradients_agree_with_the_oracle(x64):
    inputs = [[normal(i, *shape) for i in range(3)] for shape in ((), (1,), (7,), (2, 3, 5))]
    found = jax.jit(lambda inputs: [run(*one) for one in inputs])(inputs)
    for arguments, got in zip(inputs, found, strict=True):
        assert {x.dtype for x in got} == {jnp.dtype("float64")}
        assert_close(got, oracle(*arguments), 1e-12, 1e-14)


values = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(deadline=None, max_examples=60)
@given(values, values, st.floats(-2, 2, width=32))
def test_any_input_of_float32_gives_what_the_oracle_gives(gate, up, dy):
    y, dgate, dup = map(np.float64, run(*map(np.float32, (gate, up, dy))))
    want_y, want_dgate, want_dup = oracle(gate, up, dy)
    # exp(-g) of a negative gate is as wrong as g is rounded: |g| ulps, while it is above the
    # smallest normal number, which is flushed to zero (|g| < 88).
    rtol = 1e-6 * max(1, min(abs(gate), 88))
    smallest = 1e-37 * max(1, abs(up)) * max(1, abs(gate))
    np.testing.assert_allclose(y, want_y, rtol, smallest)
    np.testing.assert_allclose(dup, want_dup, rtol, smallest)
    # The derivative of silu passes zero: its error is relative to its terms.
    atol = 1e-6 * abs(up * dy) * min(1, (1 + abs(gate)) * np.exp(min(gate, 0.0))) + smallest
    np.testing.assert_allclose(dgate, want_dgate, rtol, atol)


@pytest.mark.parametrize("gate", [-1e30, -104.0, -0.0, 0.0, 1e-40, 104.0, 1e30])
def test_extreme_gates_stay_finite(gate):
    y, dgate, dup = run(np.float32(gate), np.float32(3), np.float32(1))
    slope = {True: 1.0, False: 0.0}[gate > 1] if abs(gate) > 1 else 0.5
    np.testing.assert_allclose(y, 3 * gate * slope, atol=1e-37)
    np.testing.assert_allclose(dgate, 3 * slope, atol=1e-37)
    np.testing.assert_allclose(dup, gate * slope, atol=1e-37)
