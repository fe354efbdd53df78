"""Tests of `actjax.checkpoint` in chunks: one part of the activations after the other.

`tests/test_checkpoint.py` has its messages.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse
from jaxprs import nbytes
from residuals.residual_helpers import assert_close, normal

from actjax import Exact, checkpoint

SHAPE = 2, 11, 8
CASES = (Exact(), 1), (Exact(), 11), (Exact(), 20), (Coarse(), 4)
"""Codecs and lengths of chunks."""


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def test_value_and_gradients_are_those_of_the_whole(x64):
    x, w, dy = normal(0, *SHAPE), normal(1, 8, 5), normal(2, *SHAPE)

    @jax.jit
    def run(x, w):
        results = []
        for codec, chunk in CASES:
            y, pullback = jax.vjp(checkpoint(layer, codec, chunk=chunk, axis=1), x, w)
            at_decoded = jax.vjp(layer, codec.decode(codec.encode(x)), w)[1]
            results.append(((y, pullback(dy)), (layer(x, w), at_decoded(dy))))
        return results

    for got, want in run(x, w):
        assert_close(got, want)


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

    def each(change):
        def body(x, w):
            return change(lambda x: jnp.tanh(x @ w)[..., index])(x), None

        loss = lambda x, w: jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)  # noqa: E731
        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))

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
    # Three arrays of a chunk: the argument of tanh, its value, and a cotangent. And x, its
    # cotangent and that of the output.
    cut = temporaries(checkpoint(mlp, Exact(), chunk=64))
    assert cut < 4 * hidden // 16 + 4 * nbytes(x) + 2 * nbytes((up, down))
