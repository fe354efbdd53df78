"""Tests of actjax/ops/norm.py: an exact gradient from the input or a code of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.helpers import (
    normal,
    ones,
)

from actjax import rms_norm


@functools.partial(jax.jit, static_argnums=0)
def run(eps, x, scale, dy):
    y, pull = jax.vjp(lambda x, scale: rms_norm(x, scale, eps=eps), x, scale)
    return y, *pull(dy)


def oracle(eps, x, scale, dy):
    return oracles.rms_norm(x, scale, eps), *oracles.rms_norm_vjp(x, scale, eps, dy)


def test_value_and_gradients_agree_with_the_oracle(x64):
    scale = normal(1, 7)
    inputs = [(normal(0, *lead, 7), scale, normal(2, *lead, 7)) for lead in ((), (5,), (2, 3))]
    cases = [(eps, one) for eps in (1e-6, 0.5) for one in inputs]
    found = jax.jit(lambda inputs: [run(eps, *one) for eps in (1e-6, 0.5) for one in inputs])(
        inputs
    )
    for got, (eps, arguments) in zip(found, cases, strict=True):
        for one, want in zip(got, oracle(eps, *arguments), strict=True):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, want, rtol=1e-12, atol=1e-14)


def test_eps_is_1e_6_if_not_given(x64):
    x, scale = 1e-3 * np.asarray(normal(0, 4, 7)), normal(1, 7)
    got = jax.jit(rms_norm)(x, scale)
    np.testing.assert_allclose(got, oracles.rms_norm(x, scale, 1e-6), rtol=1e-13)


def test_scale_keeps_its_own_dtype():
    x, scale, dy = normal(0, 4, 8, dtype=jnp.bfloat16), normal(1, 8), normal(2, 4, 8)
    dy = np.asarray(dy).astype(jnp.bfloat16)
    y, dx, dscale = run(1e-6, x, scale, dy)
    assert (y.dtype, dx.dtype, dscale.dtype) == ("bfloat16", "bfloat16", "float32")
    want = oracles.rms_norm_vjp(x, scale, 1e-6, dy)[1]
    np.testing.assert_allclose(dscale, want, rtol=1e-5, atol=1e-5)  # No bfloat16 on the way.


def test_gradient_of_the_scale_is_summed_in_float32():
    # A sum of 4096 ones in bfloat16 would stop at 256.
    x, scale = ones(4096, 2, dtype=jnp.bfloat16), ones(2, dtype=jnp.bfloat16)
    dscale = run(0.0, x, scale, x)[2]
    np.testing.assert_array_equal(np.float32(dscale), 4096)


values = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_input_of_float32_gives_what_the_oracle_gives(data):
    # Few shapes, each of which compiles once.
    tokens, d = data.draw(st.sampled_from([(1, 1), (3, 1), (2, 5)]))
    x = data.draw(st.lists(values, min_size=tokens * d, max_size=tokens * d))
    x = np.reshape(np.float32(x), (tokens, d))
    scale, dy = np.linspace(1, 2, d, dtype=np.float32), np.ones((tokens, d), np.float32)
    y, dx, dscale = run(1e-6, x, scale, dy)
    want_y, want_dx, want_dscale = oracle(1e-6, x, scale, dy)
    # Ten roundings of 6e-8 at most, of values that are at most sqrt(d) scale, and sums of them.
    np.testing.assert_allclose(y, want_y, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(dscale, want_dscale, rtol=2e-6, atol=2e-5)
    # The two terms of dx cancel: the error is relative to the first, at most 2 / rms.
    rms = np.sqrt(np.mean(np.float64(x) ** 2, axis=-1, keepdims=True) + 1e-6)
    assert np.all(np.abs(dx - want_dx) <= 2e-6 * 2 * np.sqrt(d) / rms + 1e-30)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-3, 1e15])
def test_constant_tokens_stay_finite(value):
    x = np.full((2, 8), value, np.float32)
    y, dx, dscale = run(1e-6, x, ones(8), ones(2, 8))
    size = value / np.sqrt(value**2 + 1e-6)
    np.testing.assert_allclose(y, size, rtol=1e-6)
    np.testing.assert_allclose(dscale, 2 * size, rtol=1e-6)
    # A constant token can only change in size, and only through eps does that change the value.
    want = 1e-6 / (value**2 + 1e-6) ** 1.5
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6 / max(value, 1e-3))
