"""Tests of actjax/ops/layer_norm.py: an exact gradient from the input or a code of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cheap_codecs import Coarse
from flax import linen
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.helpers import (
    KEY,
    assert_close,
    assert_equal,
    assert_gradients_are_differences,
    normal,
    ones,
)

from actjax import Exact, Quantized, layer_norm

NEAREST = Coarse()


@functools.partial(jax.jit, static_argnums=0)
def run(eps, x, scale, bias, dy):
    y, pull = jax.vjp(lambda *args: layer_norm(*args, eps=eps), x, scale, bias)
    return y, *pull(dy)


def oracle(eps, x, scale, bias, dy):
    return oracles.layer_norm(x, scale, bias, eps), *oracles.layer_norm_vjp(x, scale, eps, dy)


def arguments(*lead: int, d: int = 7, dtype=None):
    """Returns an input whose mean is not zero, parameters and a cotangent."""
    x, scale, bias, dy = (normal(i, *s, d, dtype=dtype) for i, s in enumerate((lead, (), (), lead)))
    return np.asarray(x) + np.asarray(2, x.dtype), scale, bias, dy


# Values and gradients.


def test_value_and_gradients_agree_with_the_oracle(x64):
    inputs = [arguments(*lead) for lead in ((), (5,), (2, 3))]
    cases = [(eps, one) for eps in (1e-6, 0.5) for one in inputs]
    found = jax.jit(lambda inputs: [run(eps, *one) for eps in (1e-6, 0.5) for one in inputs])(
        inputs
    )
    for got, (eps, one) in zip(found, cases, strict=True):
        for y, want in zip(got, oracle(eps, *one), strict=True):
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-13)


def test_value_and_gradients_agree_with_flax():
    x, scale, bias, dy = arguments(4, 3)
    layer = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False)

    @jax.jit
    def flax(x, scale, bias):
        apply = lambda x, s, b: layer.apply({"params": {"scale": s, "bias": b}}, x)  # noqa: E731
        y, pull = jax.vjp(apply, x, scale, bias)
        return y, *pull(dy)

    # Float32, sums of at most 12 terms of size 1 to 10.
    assert_close(run(1e-5, x, scale, bias, dy), flax(x, scale, bias), 1e-5, 1e-5)


def test_eps_is_1e_6_if_not_given(x64):
    x, scale, bias, _ = arguments(4)
    x = 1e-3 * np.asarray(x)
    got = jax.jit(layer_norm)(x, scale, bias)
    np.testing.assert_allclose(got, oracles.layer_norm(x, scale, bias, 1e-6), rtol=1e-11)


def test_parameters_may_be_left_out(x64):
    x, scale, bias, dy = arguments(4)

    @jax.jit
    def run(x, scale, bias):
        found = []
        for codec in (Exact(), NEAREST):
            for parameters in ((None, None), (scale, None), (None, bias)):
                fun = functools.partial(layer_norm, codec=codec)
                y, pull = jax.vjp(fun, x, *parameters)
                found.append((y, pull(dy)))
        return found, NEAREST.decode(NEAREST.encode(x))

    found, x_hat = run(x, scale, bias)
    one, zero = np.ones(7), np.zeros(7)
    for i, (y, (dx, dscale, dbias)) in enumerate(found):
        seen, s = x if i < 3 else x_hat, scale if i % 3 == 1 else one
        b = bias if i % 3 == 2 else zero
        want_dx, want_dscale, want_dbias = oracles.layer_norm_vjp(seen, s, 1e-6, dy)
        assert_close((y, dx), (oracles.layer_norm(x, s, b, 1e-6), want_dx), 1e-12, 1e-13)
        assert (dscale is None) == (i % 3 != 1)
        assert (dbias is None) == (i % 3 != 2)
        if dscale is not None:
            assert_close(dscale, want_dscale, 1e-12, 1e-13)
        if dbias is not None:
            assert_close(dbias, want_dbias, 1e-12, 1e-13)


# Precision.


def test_parameters_keep_their_own_dtype():
    x, _, _, dy = arguments(4, d=8, dtype=jnp.bfloat16)
    scale, bias = normal(1, 8), normal(2, 8)
    y, dx, dscale, dbias = run(1e-6, x, scale, bias, dy)
    dtypes = y.dtype, dx.dtype, dscale.dtype, dbias.dtype
    assert dtypes == ("bfloat16", "bfloat16", "float32", "float32")
    want = oracles.layer_norm_vjp(x, scale, 1e-6, dy)[1:]
    assert_close((dscale, dbias), want, 1e-5, 1e-5)  # No bfloat16 on the way.


def test_gradients_of_the_parameters_are_summed_in_float32():
    # Sums of 4096 ones in bfloat16 would stop at 256. Two features at -1 and 1 stay there.
    x = np.tile(np.asarray([-1, 1], jnp.bfloat16), (4096, 1))
    dy = ones(4096, 2, dtype=jnp.bfloat16)
    _, _, dscale, dbias = run(0.0, x, dy[0], dy[0], dy)
    np.testing.assert_array_equal(np.float32(dscale), [-4096, 4096])
    np.testing.assert_array_equal(np.float32(dbias), 4096)


values = st.floats(-(2.0**60), 2.0**60, width=32)
UNIT = 2.0**-24
"""Unit roundoff of float32."""


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_input_of_float32_gives_what_the_oracle_gives(data):
    # Few shapes, each of which compiles once.
    tokens, d = data.draw(st.sampled_from([(1, 1), (3, 1), (2, 5)]))
    numbers = data.draw(st.lists(values, min_size=tokens * d, max_size=tokens * d))
    x = np.reshape(np.float32(numbers), (tokens, d))
    scale, bias = np.linspace(1, 2, d, dtype=np.float32), np.ones(d, np.float32)
    dy = np.cos(np.arange(tokens * d, dtype=np.float32)).reshape(tokens, d)
    y, dx, dscale, dbias = run(1e-6, x, scale, bias, dy)
    want_y, want_dx, want_dscale, want_dbias = oracle(1e-6, x, scale, bias, dy)
    # The mean errs by d units of the largest number, and so does each distance from it, which is
    # then divided by the deviation. Neither value can exceed the root of d.
    wide = np.float64(x)
    inverse = 1 / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    largest = np.abs(wide).max(-1, keepdims=True)
    error = np.minimum(4 * (d + 4) * UNIT * (largest * inverse + np.sqrt(d)), 2 * np.sqrt(d))
    assert np.all(np.abs(y - want_y) <= 2 * error + 4 * UNIT * np.abs(want_y))
    assert np.all(np.abs(dscale - want_dscale) <= np.sum(error, 0) + 1e-6)
    np.testing.assert_allclose(dbias, want_dbias, rtol=2e-6, atol=1e-6)
    # The terms of dx are at most `2 sqrt(d)` and `d` times the inverse deviation, which errs by the
    # share that the distances do.
    exact_enough = error < 0.1
    bound = (2 * np.sqrt(d) + 3 * d) * inverse * (4 * error + (d + 8) * UNIT)
    assert np.all((np.abs(dx - want_dx) <= bound + 1e-30) | ~exact_enough)


@pytest.mark.parametrize("value", [0.0, 2.0**-126, 2.0**-10, -1.0, 2.0**60, 2.0**124])
def test_tokens_of_one_value_give_the_bias(value):
    # The mean of eight equal powers of two is found without rounding, and without overflow.
    x, bias, dy = np.full((2, 8), value, np.float32), normal(1, 8), normal(2, 2, 8)
    y, dx, dscale, dbias = run(1e-6, x, ones(8), bias, dy)
    assert_equal((y[0], y[1], dscale), (bias, bias, np.zeros(8, np.float32)))
    centred = np.asarray(dy) - np.asarray(dy).mean(-1, keepdims=True)
    assert_close(dx, 1e3 * centred, 1e-5, 1e-4)  # The inverse deviation is 1 / sqrt(eps).
    assert_close(dbias, np.asarray(dy).sum(0), 1e-6, 1e-6)


# Codecs.


def test_gradients_are_biased_even_where_the_codec_is_not_but_that_of_the_bias_is_exact(x64):
    x, scale, bias, dy = arguments(4, d=8)
    count, coarse = 2000, Quantized(1, group=8, rounding="dither", scale_dtype="float32")

    @jax.jit
    def run(x, scale, bias):
        def gradients(key, codec=coarse):
            fun = lambda *args: layer_norm(*args, codec=codec, key=key)  # noqa: E731
            return jax.vjp(fun, x, scale, bias)[1](dy)

        return jax.vmap(gradients)(jax.random.split(KEY, count)), gradients(None, Exact())

    samples, exact = run(x, scale, bias)
    for sample, one in zip(samples[:2], exact[:2], strict=True):
        standard_error = np.asarray(sample).std(0) / np.sqrt(count)
        assert np.any(np.abs(np.asarray(sample).mean(0) - one) > 20 * standard_error)
    np.testing.assert_array_equal(samples[2], np.broadcast_to(exact[2], samples[2].shape))


def test_second_derivatives_are_exact_without_a_codec_and_refused_with_one(x64):
    x, scale, bias, _ = arguments(2, d=3)

    def slope(x, codec=Exact()):
        fun = lambda x: jnp.sum(layer_norm(x, scale, bias, eps=0.1, codec=codec) ** 3)  # noqa: E731
        return jax.grad(fun)(x)

    assert_gradients_are_differences(slope, x)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.eval_shape(jax.jacobian(functools.partial(slope, codec=NEAREST)), x)
