"""Tests of actjax/ops/norm.py: an exact gradient from the input or a code of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxprs import nbytes
from ops.helpers import (
    BF16,
    assert_close,
    assert_gradients_are_differences,
    assert_raises,
    compiled_temporaries,
    normal,
    ones,
    pullback,
    shaped,
)

from actjax import Exact, Quantized, explain, rms_norm


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


def test_finite_differences(x64):
    assert_gradients_are_differences(rms_norm, normal(0, 3, 5), normal(1, 5))


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


def test_backward_holds_the_input_and_the_scale():
    for dtype in ("float32", "bfloat16"):
        x, scale = normal(0, 2, 16, 8, dtype=dtype), normal(1, 8, dtype=dtype)
        program = jax.make_jaxpr(lambda *args: jax.vjp(rms_norm, *args)[1])(x, scale).jaxpr
        assert len(program.outvars) == 2
        assert set(program.outvars) == set(program.invars)


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


TRANSFORMS = {
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f), in_axes=(0, None)),
    "scan": lambda f: lambda x, scale: jax.lax.scan(lambda _, xi: (None, f(xi, scale)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


def test_gradients_are_the_same_under_transformations():
    x, scale = normal(0, 3, 4, 8), normal(1, 8)

    @jax.jit
    def run(x, scale):
        losses = [
            lambda x, s, f=transform(rms_norm): jnp.sum(jnp.sin(f(x, s)))
            for transform in TRANSFORMS.values()
        ]
        return [jax.grad(loss, argnums=(0, 1))(x, scale) for loss in losses]

    dy = np.cos(oracles.rms_norm(x, scale, 1e-6))
    for got in run(x, scale):
        # Float32, sums of at most 12 terms of size 1.
        assert_close(got, oracles.rms_norm_vjp(x, scale, 1e-6, dy), 1e-5, 1e-5)


def test_errors_name_the_argument_and_its_value():
    assert_raises({
        "scale": (
            lambda: rms_norm(ones(2, 8), ones(7)),
            ValueError,
            "`scale` must be (8,) for x(2, 8), got (7,).",
        ),
        "scalar": (lambda: rms_norm(ones(), ones(1)), ValueError, "`scale` must be () for x()"),
        "integers": (
            lambda: rms_norm(ones(2, 8, dtype=np.int32), ones(8)),
            TypeError,
            "`x` must be a floating point array, got int32",
        ),
    })  # fmt: skip


# Codecs.

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")


def decoded(codec, x: jax.Array, key=KEY) -> jax.Array:
    """Returns what the backward pass sees."""
    return codec.decode(codec.encode(x, jax.random.fold_in(key, 0)))


def test_with_a_codec_gradients_are_those_at_the_decoded_input(x64):
    x, scale, dy = normal(0, 2, 5, 8), normal(1, 8), normal(2, 2, 5, 8)
    codecs = NEAREST, [DITHER]

    @jax.jit
    def run(x, scale):
        found = []
        for codec in codecs:
            fun = lambda x, s, codec=codec: rms_norm(x, s, eps=0.1, codec=codec, key=KEY)  # noqa: E731
            y, pull = jax.vjp(fun, x, scale)
            one = codec[0] if isinstance(codec, list) else codec
            found.append(((y, fun(x, scale)), pull(dy), decoded(one, x)))
        return found, rms_norm(x, scale, eps=0.1)

    found, exact = run(x, scale)
    for values, got, x_hat in found:
        for y in values:
            np.testing.assert_array_equal(y, exact)
        assert not np.array_equal(x, x_hat)
        # Float64: sums of at most 10 terms of size 1.
        assert_close(got, oracles.rms_norm_vjp(x_hat, scale, 0.1, dy), 1e-12, 1e-13)


def test_with_a_codec_bfloat16_is_rounded_once_at_the_end():
    x, scale, dy = (normal(i, *shape, dtype=jnp.bfloat16) for i, shape in enumerate(
        ((16, 64), (64,), (16, 64)))
    )  # fmt: skip

    @jax.jit
    def run(x, scale):
        y, pull = jax.vjp(lambda *args: rms_norm(*args, codec=NEAREST), x, scale)
        return y, rms_norm(x, scale), pull(dy), decoded(NEAREST, x)

    y, exact, got, x_hat = run(x, scale)
    np.testing.assert_array_equal(y, exact)
    for g, want in zip(got, oracles.rms_norm_vjp(x_hat, scale, 1e-6, dy), strict=True):
        assert g.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by some 64 x 6e-8 of terms of size 1.
        np.testing.assert_allclose(np.float64(g), want, rtol=1.01 * BF16, atol=1e-5)


def test_with_a_codec_backward_holds_the_code_and_the_scale():
    for dtype in ("float32", "bfloat16"):
        x, scale = normal(0, 2, 16, 8, dtype=dtype), normal(1, 8, dtype=dtype)
        for codec in (NEAREST, DITHER):
            fun = lambda *args, codec=codec: rms_norm(*args, codec=codec, key=KEY)  # noqa: E731
            held = nbytes(pullback(fun, x, scale))
            assert held == codec.stored_bytes(x.shape, dtype) + scale.nbytes, (codec, dtype)


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_code_and_no_more():
    codec = Quantized(4, group=32)

    def temporaries(layers):
        def loss(x, scales):
            body = lambda x, scale: (x - rms_norm(x, scale, codec=codec), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, scales)[0] ** 2)

        return compiled_temporaries(jax.grad(loss, (0, 1)), shaped(512, 64), shaped(layers, 64))

    # Buffers are aligned. One float array kept in one of the eight more layers would be 128 KiB.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


def test_gradients_are_biased_even_where_the_codec_is_not(x64):
    x, scale, dy = normal(0, 4, 8), normal(1, 8), normal(2, 4, 8)

    count, coarse = 2000, Quantized(1, group=8, rounding="dither", scale_dtype="float32")

    @jax.jit
    def run(x, scale):
        def gradients(key, codec=coarse):
            return jax.vjp(lambda *args: rms_norm(*args, codec=codec, key=key), x, scale)[1](dy)

        return jax.vmap(gradients)(jax.random.split(KEY, count)), gradients(None, Exact())

    for sample, exact in zip(*run(x, scale), strict=True):
        standard_error = np.asarray(sample).std(0) / np.sqrt(count)
        assert np.any(np.abs(np.asarray(sample).mean(0) - exact) > 20 * standard_error)


def test_with_a_codec_gradients_are_the_same_under_transformations():
    x, scale, dy = normal(0, 3, 4, 8), normal(1, 8), normal(2, 3, 4, 8)

    @jax.jit
    def run(x, scale):
        funs = [f(lambda *args: rms_norm(*args, codec=NEAREST)) for f in TRANSFORMS.values()]
        return [jax.vjp(fun, x, scale)[1](dy) for fun in funs], decoded(NEAREST, x)

    # Groups lie within tokens: examples are coded alike, alone or in a batch.
    found, x_hat = run(x, scale)
    for got in found:
        # Float32, sums of at most 12 terms of size 1.
        assert_close(got, oracles.rms_norm_vjp(x_hat, scale, 1e-6, dy), 1e-5, 1e-5)


def test_explain_names_the_code():
    fun = lambda x, scale: jnp.sum(rms_norm(-x, scale, codec=NEAREST, name="mine"))  # noqa: E731
    (entry,) = (e for e in explain(fun, normal(0, 4, 8), normal(1, 8)).residuals if e.codec)
    assert (entry.operator, entry.name, entry.codec) == ("rms_norm", "mine", repr(NEAREST))
    assert entry.stored_bytes == NEAREST.stored_bytes((4, 8), "float32")


def test_errors_of_codecs_name_the_argument():
    cases = [
        ({"codec": Exact}, TypeError, "`codec` must be an actjax.Codec (an instance, not the"),
        ({"codec": None}, TypeError, "`codec` must be an actjax.Codec, for example Exact(), got"),
        ({"codec": (NEAREST,) * 2}, ValueError, "one codec, or one for each of x: got 2."),
        ({"codec": ()}, ValueError, "one codec, or one for each of x: got 0."),
        ({"codec": DITHER}, ValueError, f"`codec` {DITHER} draws random numbers, but got key=None"),
        ({"codec": DITHER, "key": 1}, ValueError, "but got key=1: pass `key`"),
    ]
    x, scale = ones(2, 8), ones(8)
    assert_raises(
        {
            str(given): (lambda given=given: rms_norm(x, scale, **given), kind, message)
            for given, kind, message in cases
        }
    )
