"""Tests of norms beyond `test_contract.py`: parameters, precision and extreme inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cheap_codecs import Coarse
from ops.helpers import KEY, assert_close, assert_equal, normal, of_all_sizes, ones

from actjax import Exact, Quantized, layer_norm, norm_linear, rms_norm

NEAREST = Coarse()
UNIT = 2.0**-24


def norm_and_identity(x, scale, **options):
    """Returns the norm that `norm_linear` computes."""
    return norm_linear(x, scale, jnp.eye(x.shape[-1], dtype=x.dtype), **options)


every_norm = pytest.mark.parametrize("norm", [rms_norm, layer_norm], ids=lambda f: f.__name__)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(norm, eps, x, dy, *parameters):
    y, pull = jax.vjp(functools.partial(norm, eps=eps), x, *parameters)
    return y, *pull(dy)


def oracle(norm, eps, x, dy, scale, *bias):
    """Returns the value, and the gradients of the input and of scale and bias."""
    name = "layer_norm" if norm is layer_norm else "rms_norm"
    gradients = getattr(oracles, f"{name}_vjp")(x, scale, eps, dy)
    return getattr(oracles, name)(x, scale, *bias, eps), *gradients


def arguments(norm, *lead, d=7, dtype=None):
    """Returns an input whose mean is not zero, a cotangent and parameters."""
    x, dy = (np.asarray(normal(i, *lead, d, dtype=dtype)) for i in range(2))
    return (
        x + np.asarray(2, x.dtype),
        dy,
        *(normal(i, d) for i in ((2,) if norm is not layer_norm else (2, 3))),
    )


@pytest.mark.parametrize(
    "norm", [rms_norm, layer_norm, norm_and_identity], ids=lambda f: f.__name__
)
def test_eps_is_that_of_the_call_and_1e_6_if_not_given(norm, x64):
    x, dy, *parameters = arguments(norm, 4)

    @jax.jit
    def run(x, *parameters):
        results = []
        for options in ({}, {"eps": 0.5}):
            y, pull = jax.vjp(functools.partial(norm, **options), x, *parameters)
            results.append((y, *pull(dy)))
        return results

    # Numbers so small that eps decides.
    for got, eps in zip(run(1e-3 * x, *parameters), (1e-6, 0.5), strict=True):
        assert_close(got, oracle(norm, eps, 1e-3 * x, dy, *parameters), 1e-11, 1e-12)


@every_norm
def test_parameters_keep_their_own_dtype(norm):
    x, dy, *parameters = arguments(norm, 4, d=8, dtype=jnp.bfloat16)
    got = run(norm, 1e-6, x, dy, *parameters)
    assert [a.dtype for a in got] == ["bfloat16", "bfloat16", *["float32"] * len(parameters)]
    want = oracle(norm, 1e-6, x, dy, *parameters)
    assert_close(got[2:], want[2:], 1e-5, 1e-5)  # No bfloat16 on the way.


@every_norm
def test_gradients_of_the_parameters_are_summed_in_float32(norm):
    # Sums of 4096 ones in bfloat16 would stop at 256. Two features at -1 and 1 stay there.
    x = np.tile(np.asarray([-1, 1], jnp.bfloat16), (4096, 1))
    dy = ones(4096, 2, dtype=jnp.bfloat16)
    sums = run(norm, 0.0, x, dy, *(ones(2, dtype=jnp.bfloat16),) * (1 if norm is rms_norm else 2))[
        2:
    ]
    for got, want in zip(sums, ([-4096, 4096], [4096, 4096]), strict=False):
        np.testing.assert_array_equal(np.float32(got), want)


@pytest.mark.parametrize("d", [1, 5])
def test_rms_norm_of_any_numbers_of_float32_is_what_the_oracle_gives(d):
    x, dy = of_all_sizes(0, 500, d), ones(500, d)
    scale = np.linspace(1, 2, d, dtype=np.float32)
    y, dx, dscale = run(rms_norm, 1e-6, x, dy, scale)
    want_y, want_dx, want_dscale = oracle(rms_norm, 1e-6, x, dy, scale)
    # Ten roundings of 6e-8 at most, of values that are at most sqrt(d) scale, and sums of them.
    np.testing.assert_allclose(y, want_y, rtol=2e-6, atol=1e-30)
    terms = np.sum(np.abs(want_y), 0)
    assert np.all(np.abs(dscale - want_dscale) <= (2e-6 + 500 * UNIT) * terms)
    # The two terms of dx cancel: the error is relative to the first, at most 2 / rms.
    rms = np.sqrt(np.mean(np.float64(x) ** 2, axis=-1, keepdims=True) + 1e-6)
    assert np.all(np.abs(dx - want_dx) <= 2e-6 * 2 * np.sqrt(d) / rms + 1e-30)


@pytest.mark.parametrize("d", [1, 5])
def test_layer_norm_of_any_numbers_of_float32_is_what_the_oracle_gives(d):
    x, dy = of_all_sizes(0, 500, d), np.cos(np.arange(500 * d, dtype=np.float32)).reshape(500, d)
    scale, bias = np.linspace(1, 2, d, dtype=np.float32), np.ones(d, np.float32)
    y, dx, dscale, dbias = run(layer_norm, 1e-6, x, dy, scale, bias)
    want_y, want_dx, want_dscale, want_dbias = oracle(layer_norm, 1e-6, x, dy, scale, bias)
    # The mean errs by d units of the largest number, and so does each distance from it, which is
    # then divided by the deviation. Neither value can exceed the root of d.
    wide = np.float64(x)
    inverse = 1 / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    largest = np.abs(wide).max(-1, keepdims=True)
    error = np.minimum(4 * (d + 4) * UNIT * (largest * inverse + np.sqrt(d)), 2 * np.sqrt(d))
    assert np.all(np.abs(y - want_y) <= 2 * error + 4 * UNIT * np.abs(want_y))
    # Sums of 500 terms in float32.
    terms = np.sum(np.abs(dy), 0)
    assert np.all(
        np.abs(dscale - want_dscale) <= np.sum(error, 0) + 500 * UNIT * terms * np.sqrt(d)
    )
    assert np.all(np.abs(dbias - want_dbias) <= 500 * UNIT * terms)
    # The terms of dx are at most `2 sqrt(d)` and `d` times the inverse deviation, which errs by the
    # share that the distances do.
    exact_enough = error < 0.1
    bound = (2 * np.sqrt(d) + 3 * d) * inverse * (4 * error + (d + 8) * UNIT)
    assert np.all((np.abs(dx - want_dx) <= bound + 1e-30) | ~exact_enough)


def test_rms_norm_of_constant_tokens_stays_finite():
    values = np.float32([[0.0], [1e-30], [1e-3], [1e15]])
    y, dx, dscale = run(rms_norm, 1e-6, np.tile(values, 8), ones(4, 8), ones(8))
    squares = np.float64(values) ** 2 + 1e-6
    sizes = values / np.sqrt(squares)
    np.testing.assert_allclose(y, np.tile(sizes, 8), rtol=1e-6)
    np.testing.assert_allclose(dscale, sizes.sum(), rtol=1e-6)
    # A constant token can only change in size, and only through eps does that change the value.
    size = 1e-6 / np.maximum(values, 1e-3)
    assert np.all(np.abs(dx - 1e-6 / squares**1.5) <= 1e-5 * 1e-6 / squares**1.5 + size)


@pytest.mark.parametrize("value", [0.0, 2.0**-126, 2.0**-10, -1.0, 2.0**60, 2.0**124])
def test_layer_norm_of_tokens_of_one_value_gives_the_bias(value):
    # The mean of eight equal powers of two is found without rounding, and without overflow.
    x, bias, dy = np.full((2, 8), value, np.float32), normal(1, 8), np.asarray(normal(2, 2, 8))
    y, dx, dscale, dbias = run(layer_norm, 1e-6, x, dy, ones(8), bias)
    assert_equal((y[0], y[1], dscale), (bias, bias, np.zeros(8, np.float32)))
    centered = dy - dy.mean(-1, keepdims=True)
    assert_close(dx, 1e3 * centered, 1e-5, 1e-4)  # The inverse deviation is 1 / sqrt(eps).
    assert_close(dbias, dy.sum(0), 1e-6, 1e-6)


def test_parameters_of_layer_norm_may_be_left_out(x64):
    x, dy, scale, bias = arguments(layer_norm, 4)

    @jax.jit
    def run(x, scale, bias):
        results = []
        for codec in (Exact(), NEAREST):
            for parameters in ((None, None), (scale, None), (None, bias)):
                y, pull = jax.vjp(functools.partial(layer_norm, codec=codec), x, *parameters)
                results.append((y, pull(dy)))
        return results, NEAREST.decode(NEAREST.encode(x))

    results, x_hat = run(x, scale, bias)
    for i, (y, got) in enumerate(results):
        has_scale, has_bias = i % 3 == 1, i % 3 == 2
        s, b = scale if has_scale else np.ones(7), bias if has_bias else np.zeros(7)
        dx, dscale, dbias = oracles.layer_norm_vjp(x if i < 3 else x_hat, s, 1e-6, dy)
        want = dx, dscale if has_scale else None, dbias if has_bias else None
        assert_close((y, got), (oracles.layer_norm(x, s, b, 1e-6), want), 1e-12, 1e-13)


def test_gradients_are_biased_even_where_the_codec_is_not_but_that_of_the_bias_is_exact(x64):
    x, dy, scale, bias = arguments(layer_norm, 4, d=8)
    count, coarse = 2000, Quantized(1, group=8, rounding="dither", scale_dtype="float32")

    @jax.jit
    def run(x, scale, bias):
        def gradients(key, codec=coarse):
            fun = lambda *args: layer_norm(*args, codec=codec, key=key)  # noqa: E731
            return jax.vjp(fun, x, scale, bias)[1](dy)

        return jax.vmap(gradients)(jax.random.split(KEY, count)), gradients(None, Exact())

    samples, exact = run(x, scale, bias)
    for sample, mean in zip(samples[:2], exact[:2], strict=True):
        standard_error = np.asarray(sample).std(0) / np.sqrt(count)
        assert np.any(np.abs(np.asarray(sample).mean(0) - mean) > 20 * standard_error)
    np.testing.assert_array_equal(samples[2], np.broadcast_to(exact[2], samples[2].shape))
