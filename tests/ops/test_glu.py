"""Tests of actjax/ops/glu.py: an exact gradient from gate and up, or from codes of them."""

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
    ones,
    pullback,
    shaped,
)

from actjax import Exact, Quantized, explain, swiglu


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


def test_finite_differences(x64):
    assert_gradients_are_differences(swiglu, normal(0, 3, 5), normal(1, 3, 5))


def test_bfloat16_is_rounded_once_at_the_end():
    arguments = [normal(i, 32, 16, dtype=jnp.bfloat16) for i in range(3)]
    for got, want in zip(run(*arguments), oracle(*arguments), strict=True):
        assert got.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 10.
        np.testing.assert_allclose(np.float64(got), want, rtol=1.01 * BF16, atol=1e-5)


def test_backward_holds_only_gate_and_up():
    for dtype in ("float32", "bfloat16"):
        gate, up = normal(0, 4, 8, dtype=dtype), normal(1, 4, 8, dtype=dtype)
        program = jax.make_jaxpr(lambda *args: jax.vjp(swiglu, *args)[1])(gate, up).jaxpr
        assert len(program.outvars) == 2
        assert set(program.outvars) == set(program.invars)


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


TRANSFORMS = {
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda _, x: (None, f(*x)), None, xs)[1],
    "vmap": jax.vmap,
}


def test_gradients_are_the_same_under_transformations():
    gate, up = normal(0, 3, 4, 8), normal(1, 3, 4, 8)

    @jax.jit
    def run(gate, up):
        losses = [
            lambda *xs, f=transform(swiglu): jnp.sum(jnp.sin(f(*xs)))
            for transform in TRANSFORMS.values()
        ]
        return [jax.grad(loss, argnums=(0, 1))(gate, up) for loss in losses]

    dy = np.cos(oracles.swiglu(gate, up))
    for got in run(gate, up):
        # Float32; the cosine of a value up to 20 errs by 20 x 6e-8.
        assert_close(got, oracles.swiglu_vjp(gate, up, dy), 1e-5, 2e-5)


def test_errors_name_the_argument_and_its_value():
    x, integers = ones(3), ones(3, dtype=np.int32)
    floating = "must be a floating point array"
    assert_raises({
        "shapes": (
            lambda: swiglu(ones(2, 3), x),
            ValueError,
            "got gate float32(2, 3) and up float32(3,).",
        ),
        "dtypes": (
            lambda: swiglu(x, ones(3, dtype="bfloat16")), ValueError, "and up bfloat16(3,)",
        ),
        "integer gate": (lambda: swiglu(integers, x), TypeError, f"`gate` {floating}"),
        "integer up": (lambda: swiglu(x, integers), TypeError, f"`up` {floating}"),
    })  # fmt: skip


# Codecs.

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
CODECS = {"one": DITHER, "two": (NEAREST, DITHER), "gate exact": [Exact(), DITHER]}


def pair(codec) -> list:
    return list(codec) if isinstance(codec, tuple | list) else [codec, codec]


def decoded(codec, *inputs: jax.Array, key=KEY) -> list[jax.Array]:
    """Returns what the backward pass sees: each input coded with another key."""
    keys = key if isinstance(key, tuple) else [jax.random.fold_in(key, i) for i in range(2)]
    given = zip(pair(codec), inputs, keys, strict=True)
    return [one.decode(one.encode(x, key)) for one, x, key in given]


def test_with_a_codec_gradients_are_those_at_the_decoded_inputs(x64):
    gate, up, dy = (normal(i, 2, 5, 8) for i in range(3))

    @jax.jit
    def run(gate, up):
        # The last one has a key for each input.
        cases = [(codec, KEY) for codec in CODECS.values()]
        cases.append((DITHER, tuple(jax.random.split(KEY))))
        found = []
        for codec, key in cases:
            fun = lambda *args, c=codec, k=key: swiglu(*args, codec=c, key=k)  # noqa: E731
            y, pull = jax.vjp(fun, gate, up)
            found.append(((y, fun(gate, up)), pull(dy), decoded(codec, gate, up, key=key)))
        return found, swiglu(gate, up)

    found, exact = run(gate, up)
    for codec, (values, got, hats) in zip((*CODECS.values(), DITHER), found, strict=True):
        for y in values:
            np.testing.assert_array_equal(y, exact)
        for one, x, x_hat in zip(pair(codec), (gate, up), hats, strict=True):
            assert np.array_equal(x, x_hat) == (one == Exact())
        assert_close(got, oracles.swiglu_vjp(*hats, dy), 1e-12, 1e-14)


def test_with_a_codec_bfloat16_is_rounded_once_at_the_end():
    gate, up, dy = (normal(i, 32, 16, dtype=jnp.bfloat16) for i in range(3))

    @jax.jit
    def run(gate, up):
        y, pull = jax.vjp(lambda *args: swiglu(*args, codec=NEAREST), gate, up)
        return y, swiglu(gate, up), pull(dy), decoded(NEAREST, gate, up)

    y, exact, got, hats = run(gate, up)
    np.testing.assert_array_equal(y, exact)
    for g, want in zip(got, oracles.swiglu_vjp(*hats, dy), strict=True):
        assert g.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 10.
        np.testing.assert_allclose(np.float64(g), want, rtol=1.01 * BF16, atol=1e-5)


def test_with_a_codec_backward_holds_only_the_codes():
    for dtype in ("float32", "bfloat16"):
        gate, up = (normal(i, 4, 8, dtype=dtype) for i in range(2))
        for codec in CODECS.values():
            fun = lambda *args, codec=codec: swiglu(*args, codec=codec, key=KEY)  # noqa: E731
            size = sum(one.stored_bytes((4, 8), dtype) for one in pair(codec))
            assert nbytes(pullback(fun, gate, up)) == size, (codec, dtype)


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_codes_and_no_more():
    codec = Quantized(4, group=32), Quantized(2, group=64)

    def temporaries(layers):
        def loss(x):
            body = lambda x, _: (swiglu(0.5 * x, -x, codec=codec), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, None, layers)[0] ** 2)

        return compiled_temporaries(jax.grad(loss), shaped(512, 64))

    # Buffers are aligned. One float array kept in one of the eight more layers would be 128 KiB.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * sum(one.stored_bytes((512, 64), "float32") for one in codec)) < 4096


def test_with_a_codec_gradients_are_the_same_under_vmap():
    gate, up, dy = (normal(i, 3, 4, 8) for i in range(3))

    @jax.jit
    def run(gate, up):
        fun = jax.vmap(lambda *args: swiglu(*args, codec=NEAREST))
        return jax.vjp(fun, gate, up)[1](dy), decoded(NEAREST, gate, up)

    # Groups lie within tokens: examples are coded alike, alone or in a batch.
    got, hats = run(gate, up)
    assert_close(got, oracles.swiglu_vjp(*hats, dy), 1e-5, 2e-5)  # Float32.


def test_explain_names_the_codes():
    fun = lambda *args: jnp.sum(swiglu(*args, codec=(DITHER, NEAREST), key=KEY, name="mine"))  # noqa: E731
    found = explain(fun, normal(0, 4, 8), normal(1, 4, 8)).residuals
    stored = {e.name: (e.operator, e.codec, e.stored_bytes) for e in found if e.codec}
    assert stored == {
        f"mine {name}": ("swiglu", repr(codec), codec.stored_bytes((4, 8), "float32"))
        for name, codec in (("gate", DITHER), ("up", NEAREST))
    }


def test_errors_of_codecs_name_the_argument():
    cases = [
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
    ]
    x = ones(2, 8)
    assert_raises(
        {
            str(given): (lambda given=given: swiglu(x, x, **given), kind, message)
            for given, kind, message in cases
        }
    )
