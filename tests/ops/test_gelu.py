"""Tests of actjax/ops/gelu.py: an exact gradient from the input or a code of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cheap_codecs import Coarse
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.helpers import (
    assert_close,
    assert_gradients_are_differences,
)

from actjax import Exact, LowRankSum, gelu

NEAREST = Coarse()
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


# Precision.


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


# Codecs.


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


def test_second_derivatives_are_exact_without_a_codec_and_refused_with_one(x64):
    x = normal(0, 5)
    for approximate in FORMS.values():
        fun = functools.partial(gelu, approximate=approximate)
        slope = jax.grad(lambda x, fun=fun: jnp.sum(fun(x)))
        assert_gradients_are_differences(slope, x)
    slope = jax.grad(lambda x: jnp.sum(gelu(x, codec=NEAREST)))
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.eval_shape(jax.jacobian(slope), x)
