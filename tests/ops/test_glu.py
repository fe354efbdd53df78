"""Tests of actjax/ops/glu.py: an exact gradient from the gate and the up projection alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from actjax import Exact, Quantized, explain, swiglu

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(seed).standard_normal(shape), dtype)


@jax.jit
def run(gate, up, dy):
    y, pullback = jax.vjp(swiglu, gate, up)
    return y, *pullback(dy)


def oracle(gate, up, dy):
    return oracles.swiglu(gate, up), *oracles.swiglu_vjp(gate, up, dy)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5)], ids=str)
def test_value_and_gradients_agree_with_the_oracle(shape, x64):
    arguments = [normal(i, *shape) for i in range(3)]
    for got, want in zip(run(*arguments), oracle(*arguments), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("argument", [0, 1])
def test_finite_differences(argument, x64):
    arguments = [normal(0, 3, 5), normal(1, 3, 5)]

    def fun(one):
        return swiglu(*(one if i == argument else a for i, a in enumerate(arguments)))

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [arguments[argument]], 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_bfloat16_is_rounded_once_at_the_end():
    arguments = [normal(i, 32, 16, dtype=jnp.bfloat16) for i in range(3)]
    for got, want in zip(run(*arguments), oracle(*arguments), strict=True):
        assert got.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 10.
        np.testing.assert_allclose(np.float64(got), want, rtol=1.01 * BF16, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_holds_gate_and_up_alone(dtype):
    gate, up = normal(0, 4, 8, dtype=dtype), normal(1, 4, 8, dtype=dtype)
    leaves = jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])
    assert sum(leaf is gate for leaf in leaves) == sum(leaf is up for leaf in leaves) == 1
    assert len(leaves) == 2


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
    y, dgate, dup = run(jnp.float32(gate), jnp.float32(3), jnp.float32(1))
    slope = {True: 1.0, False: 0.0}[gate > 1] if abs(gate) > 1 else 0.5
    np.testing.assert_allclose(y, 3 * gate * slope, atol=1e-37)
    np.testing.assert_allclose(dgate, 3 * slope, atol=1e-37)
    np.testing.assert_allclose(dup, gate * slope, atol=1e-37)


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda _, x: (None, f(*x)), None, xs)[1],
    "vmap": jax.vmap,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name):
    gate, up = normal(0, 3, 4, 8), normal(1, 3, 4, 8)
    run = TRANSFORMS[name](swiglu)
    got = jax.grad(lambda *args: jnp.sum(jnp.sin(run(*args))), argnums=(0, 1))(gate, up)
    dy = np.cos(oracles.swiglu(gate, up))
    for g, want in zip(got, oracles.swiglu_vjp(gate, up, dy), strict=True):
        # Float32; the cosine of a value up to 20 errs by 20 x 6e-8.
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("gate", "up", "kind", "message"),
    [
        (jnp.ones((2, 3)), jnp.ones(3), ValueError, "got gate float32(2, 3) and up float32(3,)."),
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16), ValueError, "and up bfloat16(3,)"),
        (jnp.ones(3, int), jnp.ones(3), TypeError, "`gate` must be a floating point array"),
        (jnp.ones(3), jnp.ones(3, int), TypeError, "`up` must be a floating point array"),
    ],
)
def test_errors_name_the_argument_and_what_came(gate, up, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        swiglu(gate, up)


# Codecs.

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
CODECS = {"one": DITHER, "two": (NEAREST, DITHER), "gate exact": [Exact(), DITHER]}


def pair(codec) -> list:
    return list(codec) if isinstance(codec, tuple | list) else [codec, codec]


def decoded(codec, *inputs: jax.Array, key=KEY) -> list[jax.Array]:
    """Returns what the backward pass is to see: each input coded with a key of its own."""
    keys = key if isinstance(key, tuple) else [jax.random.fold_in(key, i) for i in range(2)]
    given = zip(pair(codec), inputs, keys, strict=True)
    return [one.decode(one.encode(x, key)) for one, x, key in given]


@pytest.mark.parametrize("name", CODECS)
def test_with_a_codec_gradients_are_those_at_the_decoded_inputs(name, x64, quick_compile):
    codec, (gate, up, dy) = CODECS[name], (normal(i, 2, 5, 8) for i in range(3))

    @jax.jit
    def run(gate, up):
        fun = lambda *args: swiglu(*args, codec=codec, key=KEY)  # noqa: E731
        y, pullback = jax.vjp(fun, gate, up)
        return (y, fun(gate, up)), swiglu(gate, up), pullback(dy), decoded(codec, gate, up)

    values, exact, got, hats = run(gate, up)
    for y in values:
        np.testing.assert_array_equal(y, exact)
    for one, x, x_hat in zip(pair(codec), (gate, up), hats, strict=True):
        assert np.array_equal(x, x_hat) == (one == Exact())
    for g, want in zip(got, oracles.swiglu_vjp(*hats, dy), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-12, atol=1e-14)


def test_each_input_may_have_a_key_of_its_own(x64, quick_compile):
    gate, up, dy = (normal(i, 5, 8) for i in range(3))
    keys = tuple(jax.random.split(KEY))

    @jax.jit
    def run(gate, up):
        fun = lambda *args: swiglu(*args, codec=DITHER, key=keys)  # noqa: E731
        return jax.vjp(fun, gate, up)[1](dy), decoded(DITHER, gate, up, key=keys)

    got, hats = run(gate, up)
    for g, want in zip(got, oracles.swiglu_vjp(*hats, dy), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-12, atol=1e-14)


def test_with_a_codec_bfloat16_is_rounded_once_at_the_end(quick_compile):
    gate, up, dy = (normal(i, 32, 16, dtype=jnp.bfloat16) for i in range(3))

    @jax.jit
    def run(gate, up):
        y, pullback = jax.vjp(lambda *args: swiglu(*args, codec=NEAREST), gate, up)
        return y, swiglu(gate, up), pullback(dy), decoded(NEAREST, gate, up)

    y, exact, got, hats = run(gate, up)
    np.testing.assert_array_equal(y, exact)
    for g, want in zip(got, oracles.swiglu_vjp(*hats, dy), strict=True):
        assert g.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 10.
        np.testing.assert_allclose(np.float64(g), want, rtol=1.01 * BF16, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_with_a_codec_backward_holds_the_codes_alone(name, dtype):
    codec, (gate, up) = CODECS[name], (normal(i, 4, 8, dtype=dtype) for i in range(2))
    fun = lambda *args: swiglu(*args, codec=codec, key=KEY)  # noqa: E731
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], gate, up))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert size == sum(one.stored_bytes((4, 8), dtype) for one in pair(codec))


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_codes_and_no_more():
    codec = Quantized(4, group=32), Quantized(2, group=64)

    def temporaries(layers):
        def loss(x):
            body = lambda x, _: (swiglu(0.5 * x, -x, codec=codec), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, None, layers)[0] ** 2)

        x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    # Buffers are aligned. One float kept in one of the eight more layers would be 128 KiB.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * sum(one.stored_bytes((512, 64), "float32") for one in codec)) < 4096


@pytest.mark.parametrize("name", ["vmap"])
def test_with_a_codec_gradients_are_the_same_under(name, quick_compile):
    gate, up, dy = (normal(i, 3, 4, 8) for i in range(3))

    @jax.jit
    def run(gate, up):
        fun = TRANSFORMS[name](lambda *args: swiglu(*args, codec=NEAREST))
        return jax.vjp(fun, gate, up)[1](dy), decoded(NEAREST, gate, up)

    # Groups lie within tokens: examples are coded alike, by themselves or in a batch.
    got, hats = run(gate, up)
    for g, want in zip(got, oracles.swiglu_vjp(*hats, dy), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=2e-5)  # Float32.


def test_explain_names_the_codes():
    fun = lambda *args: jnp.sum(swiglu(*args, codec=(DITHER, NEAREST), key=KEY, name="mine"))  # noqa: E731
    found = explain(fun, normal(0, 4, 8), normal(1, 4, 8)).residuals
    stored = {e.name: (e.operator, e.codec, e.stored_bytes) for e in found if e.codec}
    assert stored == {
        f"mine {name}": ("swiglu", repr(codec), codec.stored_bytes((4, 8), "float32"))
        for name, codec in (("gate", DITHER), ("up", NEAREST))
    }


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"codec": Exact}, TypeError, "`codec` must be an actjax.Codec (an instance, not the"),
        ({"codec": (NEAREST, "up")}, TypeError, "`codec` must be an actjax.Codec, for example"),
        ({"codec": (NEAREST,)}, ValueError, "one codec, or one for each of gate, up: got 1."),
        ({"codec": (NEAREST, DITHER)}, ValueError, f"`codec` {DITHER} draws random numbers, but"),
        ({"codec": DITHER, "key": 1}, ValueError, "but got key=1: pass `key`"),
        (
            {"codec": DITHER, "key": (KEY,) * 3},
            ValueError,
            "`key` must be one key, or one for each of gate, up: got 3.",
        ),
        ({"codec": DITHER, "key": (KEY, None)}, ValueError, "but got key=None: pass `key`"),
    ],
)
def test_errors_of_codecs_name_the_argument(given, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        swiglu(jnp.ones((2, 8)), jnp.ones((2, 8)), **given)
