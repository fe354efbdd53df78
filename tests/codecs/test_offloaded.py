"""Tests of actjax/codecs/offloaded.py: the code in host memory is that of the codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax import Exact, Offloaded, Quantized, RandomizedSVD, RandomProjection

KEY = jax.random.key(0)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, W = normal(0, 24, 8), normal(1, 8, 5)


@pytest.mark.parametrize(
    "codec",
    [Exact(), Quantized(4, group=8, rounding="dither"), RandomProjection(3), RandomizedSVD(3)],
    ids=repr,
)
def test_gradients_are_those_of_the_codec(codec):
    away = Offloaded(codec)

    @jax.jit
    def gradients(x, w):
        def gradient(codec):
            loss = lambda w: jnp.sum(actjax.linear(x, w, codec=codec, key=KEY) ** 2)  # noqa: E731
            return actjax.value_and_grad(loss)(w)

        return gradient(away), gradient(codec)

    jax.tree.map(np.testing.assert_array_equal, *gradients(X, W))
    assert (away.biased, away.needs_key) == (codec.biased, codec.needs_key)
    assert away.stored_bytes(X.shape, X.dtype) == codec.stored_bytes(X.shape, X.dtype)
    assert away.gradient_rank(X.shape) == codec.gradient_rank(X.shape)


def test_a_codec_that_holds_arrays_may_be_traced(x64):
    codec = Quantized(4, scaling="channel")

    @jax.jit
    def gradients(x, w):
        calibrated = actjax.Calibrated.fit(codec, x)

        def gradient(codec):
            return jax.grad(lambda w: jnp.sum(actjax.linear(x, w, codec=codec) ** 2))(w)

        # The scales are sliced by a scan, as those of layers are.
        stacked = jax.tree.map(lambda a: a[None], Offloaded(calibrated))
        inside = jax.lax.scan(lambda _, one: (None, gradient(one)), None, stacked)[1][0]
        return gradient(calibrated), gradient(Offloaded(calibrated)), inside

    want, *others = gradients(X, W)
    for got in others:
        np.testing.assert_array_equal(got, want)


def test_a_code_is_in_the_memory_of_the_host():
    traced = jax.make_jaxpr(Offloaded(Quantized(4, group=8)).encode)(X)
    spaces = {x.aval.memory_space for x in traced.jaxpr.outvars}
    assert spaces == {jax.memory.Space.Host}


def test_it_works_without_jit():
    codec = Offloaded(Exact())
    np.testing.assert_array_equal(codec.decode(codec.encode(X)), X)


def test_explain_names_the_codec():
    table = actjax.explain(
        lambda x, w: actjax.linear(x * 2, w, codec=Offloaded(Quantized(4))), X, W
    )
    assert "Offloaded(codec=Quantized(bits=4))" in str(table)


def test_gradients_through_scan_equal_those_without_offloading(x64):
    # `actjax.optim.in_backward` slices the codes of layers, as a scan does.
    def body(layer):
        return lambda x, w: (x + layer(lambda x: jnp.tanh(x @ w))(x), None)

    @jax.jit
    def gradients(ws, x):
        layers = [lambda f: actjax.checkpoint(f, Offloaded(Exact())), lambda f: f]
        return [
            jax.grad(lambda ws, body=body(f): jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2))(ws)
            for f in layers
        ]

    np.testing.assert_allclose(
        *gradients(normal(2, 3, 8, 8).astype("float64"), X.astype("float64")),
        rtol=1e-10,
        atol=1e-12,
    )
