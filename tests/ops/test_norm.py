"""Tests of actjax/ops/norm.py: an exact gradient from the input alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from actjax import Exact, Quantized, explain, rms_norm

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run_with(eps, x, scale, dy):
    y, pullback = jax.vjp(lambda x, scale: rms_norm(x, scale, eps=eps), x, scale)
    return y, *pullback(dy)


run = jax.jit(run_with, static_argnums=0)


def oracle(eps, x, scale, dy):
    return oracles.rms_norm(x, scale, eps), *oracles.rms_norm_vjp(x, scale, eps, dy)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
def test_value_and_gradients_agree_with_the_oracle(lead, eps, x64):
    arguments = normal(0, *lead, 7), normal(1, 7), normal(2, *lead, 7)
    for got, want in zip(run(eps, *arguments), oracle(eps, *arguments), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_eps_is_1e_6_if_not_given(x64):
    x, scale = 1e-3 * normal(0, 4, 7), normal(1, 7)
    np.testing.assert_allclose(rms_norm(x, scale), oracles.rms_norm(x, scale, 1e-6), rtol=1e-13)


@pytest.mark.parametrize("argument", [0, 1])
def test_finite_differences(argument, x64):
    arguments = [normal(0, 3, 5), normal(1, 5)]

    def fun(one):
        return rms_norm(*(one if i == argument else a for i, a in enumerate(arguments)))

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [arguments[argument]], 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_bfloat16_is_rounded_once_at_the_end():
    x, scale, dy = (normal(i, *shape, dtype=jnp.bfloat16) for i, shape in enumerate(
        ((16, 64), (64,), (16, 64)))
    )  # fmt: skip
    got = run(1e-6, x, scale, dy)
    for y, want in zip(got, oracle(1e-6, x, scale, dy), strict=True):
        assert y.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by some 64 x 6e-8 of terms of size 1.
        np.testing.assert_allclose(np.float64(y), want, rtol=1.01 * BF16, atol=1e-5)


def test_scale_keeps_its_own_dtype():
    x, scale, dy = normal(0, 4, 8, dtype=jnp.bfloat16), normal(1, 8), normal(2, 4, 8)
    y, dx, dscale = run(1e-6, x, scale, dy.astype(jnp.bfloat16))
    assert (y.dtype, dx.dtype, dscale.dtype) == ("bfloat16", "bfloat16", "float32")
    want = oracles.rms_norm_vjp(x, scale, 1e-6, dy.astype(jnp.bfloat16))[1]
    np.testing.assert_allclose(dscale, want, rtol=1e-5, atol=1e-5)  # No bfloat16 on the way.


def test_gradient_of_the_scale_is_summed_in_float32():
    # A sum of 4096 ones in bfloat16 would stop at 256.
    ones = jnp.ones((4096, 2), jnp.bfloat16)
    dscale = run(0.0, ones, ones[0], ones)[2]
    np.testing.assert_array_equal(dscale.astype(jnp.float32), 4096)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_holds_the_input_and_the_scale(dtype):
    x, scale = normal(0, 2, 16, 8, dtype=dtype), normal(1, 8, dtype=dtype)
    leaves = jax.tree.leaves(jax.vjp(rms_norm, x, scale)[1])
    assert sum(leaf is x for leaf in leaves) == sum(leaf is scale for leaf in leaves) == 1
    assert len(leaves) == 2


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
    x, scale = jnp.full((2, 8), value), jnp.ones(8)
    y, dx, dscale = run(1e-6, x, scale, jnp.ones((2, 8)))
    size = value / np.sqrt(value**2 + 1e-6)
    np.testing.assert_allclose(y, size, rtol=1e-6)
    np.testing.assert_allclose(dscale, 2 * size, rtol=1e-6)
    # A constant token has no direction left to change but its size, which only eps lets through.
    want = 1e-6 / (value**2 + 1e-6) ** 1.5
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6 / max(value, 1e-3))


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda x, scale: jax.lax.scan(lambda _, xi: (None, f(xi, scale)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name):
    x, scale = normal(0, 3, 4, 8), normal(1, 8)
    run = TRANSFORMS[name](rms_norm)
    got = jax.grad(lambda x, s: jnp.sum(jnp.sin(run(x, s))), argnums=(0, 1))(x, scale)
    dy = np.cos(oracles.rms_norm(x, scale, 1e-6))
    # Float32, sums of at most 12 terms of size 1.
    for g, want in zip(got, oracles.rms_norm_vjp(x, scale, 1e-6, dy), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "scale", "kind", "message"),
    [
        ((2, 8), 7, ValueError, "`scale` must be (8,) for x(2, 8), got (7,)."),
        ((), 1, ValueError, "`scale` must be () for x()"),
        (None, 8, TypeError, "`x` must be a floating point array, got int32"),
    ],
)
def test_errors_name_the_argument_and_what_came(x, scale, kind, message):
    x = jnp.ones((2, 8), int) if x is None else jnp.ones(x)
    with pytest.raises(kind, match=re.escape(message)):
        rms_norm(x, jnp.ones(scale))


# Codecs.

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")


def decoded(codec, x: jax.Array, key=KEY) -> jax.Array:
    """Returns what the backward pass is to see."""
    return codec.decode(codec.encode(x, jax.random.fold_in(key, 0)))


@pytest.mark.parametrize("codec", [NEAREST, DITHER, [DITHER]], ids=str)
def test_with_a_codec_gradients_are_those_at_the_decoded_input(codec, x64, quick_compile):
    x, scale, dy = normal(0, 2, 5, 8), normal(1, 8), normal(2, 2, 5, 8)

    @jax.jit
    def run(x, scale):
        fun = lambda x, scale: rms_norm(x, scale, eps=0.1, codec=codec, key=KEY)  # noqa: E731
        y, pullback = jax.vjp(fun, x, scale)
        one = codec[0] if isinstance(codec, list) else codec
        return (y, fun(x, scale)), rms_norm(x, scale, eps=0.1), pullback(dy), decoded(one, x)

    values, exact, got, x_hat = run(x, scale)
    for y in values:
        np.testing.assert_array_equal(y, exact)
    assert not np.array_equal(x, x_hat)
    for g, want in zip(got, oracles.rms_norm_vjp(x_hat, scale, 0.1, dy), strict=True):
        # Float64: sums of at most 10 terms of size 1.
        np.testing.assert_allclose(g, want, rtol=1e-12, atol=1e-13)


def test_with_a_codec_bfloat16_is_rounded_once_at_the_end(quick_compile):
    x, scale, dy = (normal(i, *shape, dtype=jnp.bfloat16) for i, shape in enumerate(
        ((16, 64), (64,), (16, 64)))
    )  # fmt: skip

    @jax.jit
    def run(x, scale):
        y, pullback = jax.vjp(lambda *args: rms_norm(*args, codec=NEAREST), x, scale)
        return y, rms_norm(x, scale), pullback(dy), decoded(NEAREST, x)

    y, exact, got, x_hat = run(x, scale)
    np.testing.assert_array_equal(y, exact)
    for g, want in zip(got, oracles.rms_norm_vjp(x_hat, scale, 1e-6, dy), strict=True):
        assert g.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by some 64 x 6e-8 of terms of size 1.
        np.testing.assert_allclose(np.float64(g), want, rtol=1.01 * BF16, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", [NEAREST, DITHER], ids=str)
def test_with_a_codec_backward_holds_the_code_and_the_scale(codec, dtype):
    x, scale = normal(0, 2, 16, 8, dtype=dtype), normal(1, 8, dtype=dtype)
    fun = lambda *args: rms_norm(*args, codec=codec, key=KEY)  # noqa: E731
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], x, scale))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert size == codec.stored_bytes(x.shape, dtype) + scale.nbytes


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_code_and_no_more():
    codec = Quantized(4, group=32)

    def temporaries(layers):
        def loss(x, scales):
            body = lambda x, scale: (x - rms_norm(x, scale, codec=codec), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, scales)[0] ** 2)

        shapes = (512, 64), (layers, 64)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Buffers are aligned. One float kept in one of the eight more layers would be 128 KiB.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


def test_gradients_are_biased_even_where_the_codec_is_not(x64, quick_compile):
    x, scale, dy = normal(0, 4, 8), normal(1, 8), normal(2, 4, 8)

    def gradients(key, codec):
        return jax.vjp(lambda *args: rms_norm(*args, codec=codec, key=key), x, scale)[1](dy)

    coarse = Quantized(1, group=8, rounding="dither", scale_dtype="float32")
    count = 2000
    samples = jax.jit(jax.vmap(lambda key: gradients(key, coarse)))(jax.random.split(KEY, count))
    for sample, exact in zip(samples, gradients(None, Exact()), strict=True):
        standard_error = np.asarray(sample).std(0) / np.sqrt(count)
        assert np.any(np.abs(np.asarray(sample).mean(0) - exact) > 20 * standard_error)


@pytest.mark.parametrize("name", ["checkpoint", "scan", "vmap"])
def test_with_a_codec_gradients_are_the_same_under(name, quick_compile):
    x, scale, dy = normal(0, 3, 4, 8), normal(1, 8), normal(2, 3, 4, 8)

    @jax.jit
    def run(x, scale):
        fun = TRANSFORMS[name](lambda *args: rms_norm(*args, codec=NEAREST))
        return jax.vjp(fun, x, scale)[1](dy), decoded(NEAREST, x)

    # Groups lie within tokens: examples are coded alike, by themselves or in a batch.
    got, x_hat = run(x, scale)
    for g, want in zip(got, oracles.rms_norm_vjp(x_hat, scale, 1e-6, dy), strict=True):
        # Float32, sums of at most 12 terms of size 1.
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5)


def test_explain_names_the_code():
    fun = lambda x, scale: jnp.sum(rms_norm(-x, scale, codec=NEAREST, name="mine"))  # noqa: E731
    (entry,) = (e for e in explain(fun, normal(0, 4, 8), normal(1, 8)).residuals if e.codec)
    assert (entry.operator, entry.name, entry.codec) == ("rms_norm", "mine", repr(NEAREST))
    assert entry.stored_bytes == NEAREST.stored_bytes((4, 8), "float32")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"codec": Exact}, TypeError, "`codec` must be an actjax.Codec (an instance, not the"),
        ({"codec": None}, TypeError, "`codec` must be an actjax.Codec, for example Exact(), got"),
        ({"codec": (NEAREST,) * 2}, ValueError, "one codec, or one for each of x: got 2."),
        ({"codec": ()}, ValueError, "one codec, or one for each of x: got 0."),
        ({"codec": DITHER}, ValueError, f"`codec` {DITHER} draws random numbers, but got key=None"),
        ({"codec": DITHER, "key": 1}, ValueError, "but got key=1: pass `key`"),
    ],
)
def test_errors_of_codecs_name_the_argument(given, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        rms_norm(jnp.ones((2, 8)), jnp.ones(8), **given)
