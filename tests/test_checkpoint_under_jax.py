"""Tests of `actjax.checkpoint`: closures, stored bytes and transformations of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import (
    DRAWN,
    KEY,
    NEAREST,
    assert_close,
    hat,
    layer,
    nbytes,
    normal,
    total,
)

import actjax
from actjax import Exact, Quantized, RandomizedSVD, checkpoint, explain, linear

# Arrays that the function closes over.


def test_closed_over_arrays_have_gradients(x64):
    x, w, dy, fixed = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8), normal(3, 6, 8)

    @jax.jit
    def run(x, w):
        hats = hat(NEAREST, x)

        def with_weights(x, w, of):
            return jax.vjp(lambda x, w: of(lambda x: layer(x, w) * fixed)(x), x, w)[1](dy)

        compressed = functools.partial(checkpoint, codec=NEAREST)
        return with_weights(x, w, compressed), with_weights(hats, w, lambda f: f)

    assert_close(*run(x, w))


def test_closed_over_arrays_are_stored_unchanged():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    fun = lambda x, w: checkpoint(lambda x: layer(x, w), NEAREST)(x)  # noqa: E731
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], x, w)
    assert nbytes(pullback) == w.nbytes + NEAREST.stored_bytes(x.shape, x.dtype)


def test_closed_over_arrays_may_be_scanned_or_mapped(x64):
    x, ws = normal(0, 6, 8), normal(1, 3, 8, 5)

    def scanned(of):
        def body(x, w):
            return of(lambda x: layer(x, w) * ws.sum() / 9)(x), None

        return lambda x, ws: jax.lax.scan(body, x, ws)[0]

    def mapped(of):
        return jax.vmap(lambda x, w: of(lambda x: layer(x, w) * ws.sum())(x), in_axes=(None, 0))

    @jax.jit
    def run(x, ws):
        gradients = [
            jax.grad(lambda *args, f=f: total(f(*args)), (0, 1))(x, ws)
            for make in (scanned, mapped)
            for f in (make(functools.partial(checkpoint, codec=Exact())), make(lambda f: f))
        ]
        return gradients[0::2], gradients[1::2]

    assert_close(*run(x, ws))


@pytest.mark.parametrize("closed_over", [False, True])
def test_gradients_of_complex_weights_are_not_lost(closed_over):
    x, c = normal(0, 6, 8), normal(1, 6, 8) + 1j * normal(2, 6, 8)

    def gradient(of):
        def loss(c):
            if closed_over:
                return jnp.sum(of(lambda x: jnp.abs(x * c) ** 2)(x))
            return jnp.sum(of(lambda x, c: jnp.abs(x * c) ** 2)(x, c))

        return jax.jit(jax.grad(loss))(c)

    want = gradient(jax.checkpoint)
    got = gradient(functools.partial(checkpoint, codec=Exact()))
    np.testing.assert_allclose(got, want, rtol=1e-5)


# What is stored.


CODECS = Exact(), NEAREST, DRAWN, RandomizedSVD(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_backward_holds_the_code_and_the_weights(codec, dtype):
    x, w = normal(0, 6, 8, dtype=dtype), normal(1, 8, 5, dtype=dtype)
    compressed = checkpoint(layer, codec, key=KEY)
    pullback = jax.eval_shape(lambda *args: jax.vjp(compressed, *args)[1], x, w)
    assert nbytes(pullback) == codec.stored_bytes(x.shape, dtype) + w.nbytes


@pytest.mark.parametrize("codec", [Exact(), Quantized(2, group=32, rounding="dither")], ids=str)
def test_under_scan_a_layer_takes_the_bytes_of_its_code_only(codec):
    def temporaries(layers):
        def loss(x, ws):
            run = checkpoint(layer, codec, key=KEY)
            return jnp.sum(jax.lax.scan(lambda x, w: (run(x, w), None), x, ws)[0] ** 2)

        x = jax.ShapeDtypeStruct((512, 64), "float32")
        ws = jax.ShapeDtypeStruct((layers, 64, 96), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # Apart from the alignment of buffers nothing else depends on the number of layers. One stored
    # float array in one of the eight additional layers would take 128 KiB.
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


def test_a_barrier_separates_the_two_passes():
    # Without a barrier XLA could merge both passes where the code is the input itself, and store
    # what should be recomputed.
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    fun = lambda x: total(checkpoint(layer, Exact())(x, w))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(x))


def test_explain_shows_the_codes_by_name():
    def fun(x, h, w):
        run = checkpoint(lambda x, h, w: layer(x, w) + h, NEAREST, activations=(0, 1), name="mine")
        return jnp.sum(run(-x, -h, w))

    found = explain(fun, normal(0, 6, 8), normal(1, 6, 8), normal(2, 8, 5))
    entries = {e.name: e for e in found.residuals if e.operator == "checkpoint"}
    assert sorted(entries) == ["mine 0", "mine 1"]
    size = NEAREST.stored_bytes((6, 8), "float32")
    assert all(e.stored_bytes == size for e in entries.values())
    assert found.stored_bytes == 2 * size
    alone = explain(
        lambda x, w: jnp.sum(checkpoint(layer)(-x, w)), normal(0, 6, 8), normal(2, 8, 5)
    )
    assert [e.name for e in alone.residuals if e.operator == "checkpoint"] == ["checkpoint"]


# Transformations of JAX, and nested checkpoints.


TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda _, x: (None, f(x, w)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name, x64):
    x, w, dy = normal(0, 2, 3, 8), normal(1, 8, 5), normal(2, 2, 3, 8)

    def run(x, w):
        fun = TRANSFORMS[name](checkpoint(layer, NEAREST))
        # Groups lie within tokens: the code of an example does not depend on the batch.
        return jax.vjp(fun, x, w)[1](dy), jax.vjp(layer, hat(NEAREST, x), w)[1](dy)

    assert_close(*jax.jit(run)(x, w))


def test_under_vmap_each_example_may_have_its_own_key():
    x, w, keys = normal(0, 6, 8), normal(1, 8, 5), jax.random.split(KEY, 2)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda x: total(checkpoint(layer, DRAWN, key=key)(x, w)))(x)

    mapped = jax.jit(jax.vmap(gradient))(keys)
    # Float32 sums of 8 terms of size 1 to 10.
    np.testing.assert_allclose(mapped, [gradient(key) for key in keys], rtol=1e-5, atol=1e-5)
    assert not np.allclose(*mapped)


def test_nested_checkpoints_decode_their_own_codes(x64):
    x, w, dy, coarse = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8), Quantized(2, group=8)

    def twice(inner):
        return lambda x, w: inner(jnp.cos(inner(x, w)), w)

    @jax.jit
    def run(x, w):
        nested = checkpoint(twice(checkpoint(layer, coarse)), NEAREST)
        got = jax.vjp(nested, x, w)[1](dy)
        # The outer function runs again from its code; the inner ones encode what they then get.
        first = hat(NEAREST, x)
        middle = layer(first, w)
        _, last = jax.vjp(layer, hat(coarse, jnp.cos(middle)), w)
        dmiddle, dw = last(dy)
        _, before = jax.vjp(layer, hat(coarse, first), w)
        dx, dw_before = before(-jnp.sin(middle) * dmiddle)
        return got, (dx, dw + dw_before)

    assert_close(*run(x, w))
    held = jax.eval_shape(
        lambda *a: jax.vjp(checkpoint(twice(checkpoint(layer, coarse)), NEAREST), *a)[1], x, w
    )
    assert nbytes(held) == w.nbytes + NEAREST.stored_bytes(x.shape, x.dtype)


def test_control_flow_is_run_again_with_its_branches(x64):
    x, w = normal(0, 6, 8), normal(1, 8, 8)

    def fun(x, w, steps):
        x = jax.lax.cond(steps > 2, lambda: jnp.sin(x @ w), lambda: jnp.cos(x @ w))
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)[0]

    @jax.jit
    def run(x, w, steps):
        fs = checkpoint(fun, Exact()), fun
        return [jax.grad(lambda *a, f=f: total(f(*a, steps)), (0, 1))(x, w) for f in fs]

    for steps in (1, 5):
        assert_close(*run(x, w, steps))


# Factored gradients.


def test_weights_inside_have_factored_gradients(x64):
    x, w, b = normal(0, 6, 8), {"w": normal(1, 8, 5)}, {"w": normal(2, 8, 3)}
    # At full rank the factors multiply to the exact gradient.
    codec = RandomizedSVD(6)

    def given(params, codec):
        run = checkpoint(lambda x, w: jnp.sin(linear(x, w, codec=codec, key=KEY)), NEAREST)
        return total(run(x, params["w"]))

    def closed_over(params, codec):
        fun = lambda x: jnp.sin(linear(x, params["w"], codec=codec, key=KEY))  # noqa: E731
        return total(checkpoint(fun, NEAREST)(x))

    for fun in (given, closed_over):
        assert actjax.input_groups(functools.partial(fun, codec=Exact()), w) == {"w": "w"}

    @jax.jit
    def run(w):
        factored = actjax.value_and_grad(functools.partial(given, codec=codec))(w)[1]["w"]
        exact = functools.partial(closed_over, codec=Exact())
        in_basis = actjax.value_and_grad(exact, bases=b)(w)[1]["w"]
        return factored, in_basis, jax.grad(exact)(w)["w"]

    factored, in_basis, want = run(w)
    # Rank 6 of 6 tokens, in float64.
    assert_close(factored.dense(), want)
    np.testing.assert_array_equal(in_basis.left, b["w"])
    assert_close(in_basis.right, b["w"].T @ want)
