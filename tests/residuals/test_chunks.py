"""Tests of `actjax.checkpoint` in chunks: one part of the activations after the other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import KEY, NEAREST, assert_close, hat, layer, nbytes, normal

from actjax import Exact, checkpoint

SHAPE = 2, 11, 8


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=repr)
def test_value_and_gradients_are_those_of_the_whole(codec, x64):
    x, w, dy = normal(0, *SHAPE), normal(1, 8, 5), normal(2, *SHAPE)

    @jax.jit
    def run(x, w):
        results = []
        for chunk in (1, 4, 11, 20):
            y, pullback = jax.vjp(checkpoint(layer, codec, key=KEY, chunk=chunk, axis=1), x, w)
            results.append((y, pullback(dy)))
        return results, (layer(x, w), jax.vjp(layer, hat(codec, x), w)[1](dy))

    results, want = run(x, w)
    for result in results:
        assert_close(result, want)


def test_several_activations_and_outputs_are_cut_alike(x64):
    x, y, w = normal(0, *SHAPE), normal(1, 2, 11, 3), normal(2, 8, 3)
    fun = lambda x, y, w: {"sum": x @ w + y, "pair": (jnp.sin(y),)}  # noqa: E731
    cut = checkpoint(fun, Exact(), activations=(0, 1), chunk=3, axis=1)

    def output_and_gradients(fun, *args):
        out, pullback = jax.vjp(fun, *args)
        return out, pullback(out)

    both = jax.jit(lambda *args: [output_and_gradients(f, *args) for f in (cut, fun)])
    assert_close(*both(x, y, w))


def test_it_may_close_over_weights_and_integers_under_scan_and_vmap(x64):
    x, w, index = normal(0, 3, 7, 4), normal(1, 2, 4, 4), np.arange(4)[::-1]

    def loss(x, w, change):
        def body(x, w):
            fun = lambda x: jnp.tanh(x @ w)[..., index]  # noqa: E731
            return change(fun)(x), None

        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    def each(change):
        gradient = jax.grad(lambda x, w: loss(x, w, change), (0, 1))
        return jax.vmap(gradient, (0, None))

    changes = (lambda f: checkpoint(f, Exact(), chunk=2)), (lambda f: f)
    assert_close(*jax.jit(lambda x, w: [each(change)(x, w) for change in changes])(x, w))


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    x, w = np.ones((512, 1), jnp.bfloat16), np.ones((1, 1), jnp.bfloat16)
    # Each chunk adds 1 to the gradient. In bfloat16, 256 + 1 is 256.
    fun = checkpoint(lambda x, w: x @ w, Exact(), chunk=1)
    dw = jax.jit(jax.grad(lambda w: jnp.sum(fun(x, w).astype(jnp.float32))))(w)
    assert dw.dtype == jnp.bfloat16
    assert float(dw[0, 0]) == 512


def test_intermediate_arrays_are_those_of_one_chunk():
    x, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in ((1024, 8), (8, 256), (256, 8)))
    mlp = lambda x, up, down: jnp.tanh(x @ up) @ down  # noqa: E731

    def temporaries(fun):
        gradient = jax.jit(jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), (0, 1, 2)))
        return gradient.lower(x, up, down).compile().memory_analysis().temp_size_in_bytes

    hidden = 1024 * 256 * 4
    assert temporaries(jax.checkpoint(mlp)) > hidden
    # Three of a chunk's: the argument of tanh, its value, and a cotangent. And x, its cotangent and
    # that of the output.
    cut = temporaries(checkpoint(mlp, Exact(), chunk=64))
    assert cut < 4 * hidden // 16 + 4 * nbytes(x) + 2 * nbytes((up, down))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk": 0}, ValueError, "`chunk` of checkpoint must be at least 1, got 0"),
        ({"chunk": 2.5}, TypeError, "`chunk` of checkpoint must be an integer, got 2.5"),
        ({"chunk": 2, "axis": -1}, ValueError, "`axis` of checkpoint must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        checkpoint(layer, **options)


def test_activations_and_outputs_without_the_axis_are_refused():
    x, w = normal(0, *SHAPE), normal(1, 8, 5)
    message = "along `axis` 3, so they must have this axis, of one length: got shapes (2, 11, 8)"
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint(layer, chunk=4, axis=3)(x, w)
    both = checkpoint(lambda x, y: x, activations=(0, 1), chunk=4, axis=1)
    with pytest.raises(ValueError, match=re.escape("got shapes (2, 11, 8), (2, 9, 8)")):
        both(x, x[:, :9])
    message = "got chunks of 4 along `axis` 1, so its outputs must have this axis: got one of shape"
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint(lambda x: x.sum(1), chunk=4, axis=1)(x)
