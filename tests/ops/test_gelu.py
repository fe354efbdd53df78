"""Tests of actjax/ops/gelu.py: an exact gradient from the input or a code of it."""

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
    KEY,
    assert_close,
    assert_gradients_are_differences,
    assert_raises,
    compiled_temporaries,
    ones,
    pullback,
    shaped,
)

from actjax import Exact, LowRankSum, PointApproximation, Quantized, RandomizedSVD, explain, gelu

NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
FORMS = {"tanh": True, "erf": False}


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    numbers = 2 * np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(np.asarray(numbers, dtype or jax.dtypes.canonicalize_dtype(float)))


@jax.jit
def run(x, dy):
    """Returns value and gradient of each form."""
    found = []
    for approximate in FORMS.values():
        y, pull = jax.vjp(functools.partial(gelu, approximate=approximate), x)
        found.append((y, *pull(dy)))
    return found


def oracle(x, dy):
    return [
        (oracles.gelu(x, approximate), oracles.gelu_vjp(x, approximate, dy))
        for approximate in FORMS.values()
    ]


def decoded(codec, x, key=KEY):
    """Returns what the backward pass sees."""
    return codec.decode(codec.encode(x, jax.random.fold_in(key, 0)))


# Values and gradients.


def test_value_and_gradient_agree_with_the_oracle(x64):
    inputs = [(normal(0, *shape), normal(1, *shape)) for shape in ((), (1,), (7,), (2, 3, 5))]
    found = jax.jit(lambda inputs: [run(*one) for one in inputs])(inputs)
    for arguments, got in zip(inputs, found, strict=True):
        assert {y.dtype for y in jax.tree.leaves(got)} == {jnp.dtype("float64")}
        assert_close(got, oracle(*arguments), 1e-12, 1e-14)


def test_value_and_gradient_agree_with_jax():
    x, dy = normal(0, 32, 16), normal(1, 32, 16)

    @jax.jit
    def plain(x):
        forms = [functools.partial(jax.nn.gelu, approximate=form) for form in FORMS.values()]
        return [(y, *pull(dy)) for y, pull in (jax.vjp(form, x) for form in forms)]

    # Float32; numbers of size 1 to 10, of which `1 + tanh` and its derivative cancel.
    assert_close(run(x, dy), plain(x), 1e-5, 1e-5)


def test_the_form_is_that_of_tanh_if_not_given():
    x = normal(0, 8)
    tanh, default = jax.jit(lambda x: (gelu(x, approximate=True), gelu(x)))(x)
    np.testing.assert_array_equal(tanh, default)


@pytest.mark.parametrize("form", FORMS)
def test_finite_differences(form, x64):
    fun = functools.partial(gelu, approximate=FORMS[form])
    assert_gradients_are_differences(fun, normal(0, 3, 5))


# Precision.


def test_bfloat16_is_rounded_once_at_the_end():
    x, dy = (normal(i, 32, 16, dtype=jnp.bfloat16) for i in range(2))
    for got, want in zip(run(x, dy), oracle(x, dy), strict=True):
        for y, exact in zip(got, want, strict=True):
            assert y.dtype == jnp.bfloat16
            # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 10.
            np.testing.assert_allclose(np.float64(y), exact, rtol=1.01 * BF16, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(st.floats(-20, 20, width=32), st.floats(-(2.0**100), 2.0**100, width=32)),
    st.floats(-2, 2, width=32),
)
def test_any_input_of_float32_gives_what_the_oracle_gives(x, dy):
    for got, want in zip(run(np.float32(x), np.float32(dy)), oracle(x, dy), strict=True):
        # The exponent of both forms is at most 104 where results are above the smallest normal
        # number, which is flushed to zero, and errs by some units of itself.
        (y, dx), (want_y, want_dx) = map(np.float64, got), want
        rtol = 2.0**-24 * (16 + 4 * min(x * x, 104))
        np.testing.assert_allclose(y, want_y, rtol, 1e-37 * max(1, abs(x)))
        # The derivative passes zero: its error is relative to its terms.
        terms = abs(dy) * (np.abs(want_y / x) if x else 0.5)
        slope = abs(want_dx) + 2 * terms
        np.testing.assert_allclose(dx, want_dx, 0, rtol * slope + 1e-37 * max(1, x * x))


@pytest.mark.parametrize("x", [-3e38, -1e19, -40.0, -0.0, 0.0, 1e-40, 40.0, 1e13, 1e19, 3e38])
def test_extreme_inputs_stay_finite(x):
    slope = 0.5 if abs(x) < 1 else float(x > 0)
    for y, dx in run(np.float32(x), np.float32(1)):
        np.testing.assert_allclose(y, np.float32(x) * slope, atol=1e-37)
        np.testing.assert_allclose(dx, slope, rtol=1e-6, atol=1e-37)


# What the backward pass holds.


def test_backward_holds_only_the_input():
    for dtype in ("float32", "bfloat16"):
        x = normal(0, 4, 8, dtype=dtype)
        for approximate in FORMS.values():
            fun = functools.partial(gelu, approximate=approximate)
            program = jax.make_jaxpr(lambda x, fun=fun: jax.vjp(fun, x)[1])(x).jaxpr
            assert program.outvars == program.invars


def test_with_a_codec_backward_holds_only_the_code():
    for dtype in ("float32", "bfloat16"):
        x = normal(0, 4, 8, dtype=dtype)
        for codec in (NEAREST, DITHER, RandomizedSVD(3), PointApproximation(points=2)):
            fun = functools.partial(gelu, codec=codec, key=KEY)
            assert nbytes(pullback(fun, x)) == codec.stored_bytes((4, 8), dtype), (codec, dtype)


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_code_and_no_more():
    codec = Quantized(4, group=32)

    def temporaries(layers):
        def loss(x):
            body = lambda x, _: (gelu(0.5 * x, codec=codec), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, None, layers)[0] ** 2)

        return compiled_temporaries(jax.grad(loss), shaped(512, 64))

    # Buffers are aligned. One float array kept in one of the eight more layers would be 128 KiB.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


# Codecs.


def test_with_a_codec_the_gradient_is_that_at_the_decoded_input(x64):
    x, dy = normal(0, 2, 5, 8), normal(1, 2, 5, 8)
    cases = [(NEAREST, True), (DITHER, False), (RandomizedSVD(3), True)]

    @jax.jit
    def run(x):
        found = []
        for codec, approximate in cases:
            exact = functools.partial(gelu, approximate=approximate)
            fun = functools.partial(exact, codec=codec, key=KEY)
            y, pull = jax.vjp(fun, x)
            found.append(((y, fun(x)), exact(x), *pull(dy), decoded(codec, x)))
        return found

    for (_, approximate), (values, exact, dx, x_hat) in zip(cases, run(x), strict=True):
        for y in values:
            np.testing.assert_array_equal(y, exact)
        assert not np.array_equal(x, x_hat)
        assert_close(dx, oracles.gelu_vjp(x_hat, approximate, dy), 1e-12, 1e-14)


def test_the_gradient_is_biased_even_where_the_codec_is_not(x64):
    x, dy = normal(0, 4, 8), normal(1, 4, 8)
    count, coarse = 2000, Quantized(1, group=8, rounding="dither", scale_dtype="float32")

    @jax.jit
    def samples(x):
        def gradient(key):
            return jax.vjp(lambda x: gelu(x, codec=coarse, key=key), x)[1](dy)[0]

        return jax.vmap(gradient)(jax.random.split(KEY, count))

    found = np.asarray(samples(x))
    standard_error = found.std(0) / np.sqrt(count)
    exact = oracles.gelu_vjp(x, True, dy)
    assert np.any(np.abs(found.mean(0) - exact) > 20 * standard_error)


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=repr)
def test_the_low_rank_part_of_a_sum_is_kept_beside_the_code_of_its_base(codec, x64):
    base, left, right, dy = (normal(i, *s) for i, s in enumerate(((6, 8), (6, 2), (2, 8), (6, 8))))

    @jax.jit
    def run(base, left, right):
        fun = lambda *parts: gelu(LowRankSum(*parts), approximate=False, codec=codec)  # noqa: E731
        y, pull = jax.vjp(fun, base, left, right)
        return y, pull(dy), codec.decode(codec.encode(base))

    y, (dbase, dleft, dright), seen = run(base, left, right)
    low = np.asarray(left) @ np.asarray(right)
    dx = oracles.gelu_vjp(seen + low, False, dy)
    want = oracles.gelu(base + low, False), dx, dx @ np.asarray(right).T, np.asarray(left).T @ dx
    assert_close((y, dbase, dleft, dright), want, 1e-11, 1e-12)


TRANSFORMS = {
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda _, xi: (None, f(xi)), None, x)[1],
    "vmap": jax.vmap,
}


def test_the_gradient_is_the_same_under_transformations():
    x, dy = normal(0, 3, 4, 8), normal(1, 3, 4, 8)

    @jax.jit
    def run(x):
        found = []
        for codec in (Exact(), NEAREST):
            for transform in TRANSFORMS.values():
                fun = transform(functools.partial(gelu, codec=codec))
                found.append(jax.vjp(fun, x)[1](dy)[0])
        return found, decoded(NEAREST, x)

    # Groups lie within tokens: examples are coded alike, alone or in a batch.
    found, x_hat = run(x)
    for i, got in enumerate(found):
        seen = x if i < len(TRANSFORMS) else x_hat
        assert_close(got, oracles.gelu_vjp(seen, True, dy), 1e-5, 1e-5)  # Float32.


def test_second_derivatives_are_exact_without_a_codec_and_refused_with_one(x64):
    x = normal(0, 5)
    for approximate in FORMS.values():
        fun = functools.partial(gelu, approximate=approximate)
        slope = jax.grad(lambda x, fun=fun: jnp.sum(fun(x)))
        assert_gradients_are_differences(slope, x)
    slope = jax.grad(lambda x: jnp.sum(gelu(x, codec=NEAREST)))
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.eval_shape(jax.jacobian(slope), x)


def test_explain_names_the_code():
    for codec in (Exact(), NEAREST):
        fun = lambda x, codec=codec: jnp.sum(gelu(-x, codec=codec, name="mine"))  # noqa: E731
        (entry,) = (e for e in explain(fun, normal(0, 4, 8)).residuals if e.codec)
        assert (entry.operator, entry.name, entry.codec) == ("gelu", "mine", repr(codec))
        assert entry.stored_bytes == codec.stored_bytes((4, 8), "float32")


def test_errors_name_the_argument_and_its_value():
    x = ones(2, 8)
    assert_raises({
        "integers": (
            lambda: gelu(ones(3, dtype=np.int32)),
            TypeError,
            "`x` must be a floating point array, got int32: cast it",
        ),
        "a number": (lambda: gelu(1.0), TypeError, "`x` must be a floating point array, got float"),
        "codec class": (
            lambda: gelu(x, codec=Exact),
            TypeError,
            "`codec` must be an actjax.Codec (an instance, not the class)",
        ),
        "two codecs": (
            lambda: gelu(x, codec=(NEAREST,) * 2),
            ValueError,
            "one codec, or one for each of x: got 2.",
        ),
        "no key": (
            lambda: gelu(x, codec=DITHER),
            ValueError,
            f"`codec` {DITHER} draws random numbers, but got key=None",
        ),
    })  # fmt: skip
