"""Tests of `compress_residuals` on code of Flax, optax and JAX.

Bounds are generous. 4 bits in groups of 16 have levels 1/15 of the range of a group apart, a mean
error of a tenth of its deviation; a quarter is room for a few layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from residuals.residual_helpers import (
    KEY,
    assert_close,
    held_bytes,
    leave,
    loss_of,
    normal,
    relative_error,
    total,
)

import actjax
from actjax import Quantized, RandomizedSVD, compress_residuals, explain


def filled(shapes):
    """Returns parameters with these shapes, without compiling their initializers."""
    leaves, treedef = jax.tree.flatten(shapes)
    scaled = [normal(i, *x.shape) / 4 for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, scaled)


class Perceptron(linen.Module):
    """A module of flax.linen."""

    @linen.compact
    def __call__(self, x):
        for width in (64, 64):
            x = linen.LayerNorm()(linen.gelu(linen.Dense(width)(x)))
        return linen.Dense(10)(x)


def test_a_perceptron_of_flax():
    model, x, labels = Perceptron(), normal(0, 32, 16), jnp.arange(32) % 10
    codec = Quantized(4, group=16)
    params = filled(jax.eval_shape(model.init, KEY, x))
    wrapped = compress_residuals(model.apply, codec)

    def loss(apply, params):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), labels).mean()

    fs = [functools.partial(loss, f) for f in (wrapped, model.apply)]
    assert relative_error(*jax.jit(lambda params: [jax.grad(f)(params) for f in fs])(params)) < 0.25
    # One array for each of two hidden layers; autodiff stores more than five. Each norm also stores
    # two booleans a token: whether its variance was clipped at zero.
    codes = 2 * codec.stored_bytes((32, 64), "float32")
    assert held_bytes(wrapped, params, x) == codes + 2 * 2 * 32
    assert held_bytes(model.apply, params, x) > 10 * 32 * 64 * 4
    assert repr(codec) in str(explain(wrapped, params, x))


class Block(nnx.Module):
    """A transformer block of flax.nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def test_a_transformer_block_of_nnx():
    x, codec = normal(3, 2, 12, 16), Quantized(4, group=16)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    params = filled(shapes)
    fun = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    wrapped = compress_residuals(fun, codec)
    variants = wrapped, fun
    got, want = jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(params, x)
    assert relative_error(got, want) < 0.25
    assert held_bytes(wrapped, params, x) < held_bytes(fun, params, x) / 10
    table = str(explain(wrapped, params, x))
    assert repr(codec) in table
    assert "add: " in table
    # A module may be the function: it closes over its parameters.
    block = nnx.merge(graph, params)
    assert held_bytes(compress_residuals(block, codec), x) < held_bytes(block, x) / 10


@pytest.mark.parametrize("segments", [False, True])
def test_weights_of_attention_made_of_codes_add_up_to_one(segments):
    """If they do, the gradients of v sum over keys to the gradient of the output."""
    x, w, v = normal(0, 1, 12, 16), normal(1, 2, 16, 16), normal(2, 1, 12, 2, 8)
    dout = normal(3, 1, 12, 2, 8)
    options = {"segments": jnp.arange(12)[None] // 5} if segments else {}

    def fun(w, v):
        q, k = (checkpoint_name(x @ w[i], "qk"[i]).reshape(v.shape) for i in range(2))
        # Scores are tens, as in trained models: levels of 2 bits are equally far apart.
        return actjax.attention(q, k, v, recompute=True, **options)

    rule = lambda kept: Quantized(2, group=8) if kept.name in ("q", "k") else None  # noqa: E731
    variants = compress_residuals(fun, rule), fun
    run = jax.jit(lambda *args: [jax.vjp(f, *args)[1](dout)[1] for f in variants])
    got, exact = map(np.asarray, run(w, v))
    # The codes were read. Sums of 12 terms of size 1 in float32.
    assert np.abs(got - exact).max() > 0.1
    np.testing.assert_allclose(got.sum(1), np.sum(dout, 1), rtol=0, atol=1e-5)


def test_attention_of_jax():
    def fun(x, w):
        q, k, v = (x @ part for part in w)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    codec, x, w = Quantized(8, group=8), normal(0, 2, 12, 4, 8), normal(1, 3, 8, 8) / 3
    wrapped = compress_residuals(fun, codec)
    variants = wrapped, fun
    got, want = jax.jit(lambda *args: [jax.grad(loss_of(f), (0, 1))(*args) for f in variants])(x, w)
    assert relative_error(got, want) < 0.02  # 8 bits: 17 times below a quarter.
    codes = 3 * codec.stored_bytes(x.shape, "float32")
    codes += codec.stored_bytes((2, 4, 12, 12), "float32")
    assert held_bytes(wrapped, x, w) <= codes
    assert held_bytes(fun, x, w) > 3.5 * codes
    assert repr(codec) in {r.codec for r in explain(wrapped, x, w).residuals}


def test_a_loss_of_optax():
    labels = jnp.arange(32) % 10

    def fun(w, x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    codec, w, x = Quantized(8, group=16), normal(1, 16, 48), normal(0, 32, 16)
    wrapped = compress_residuals(fun, codec)
    # Logits err by 1/255 of a range of about 16, so probabilities err by about a sixteenth.
    assert relative_error(*jax.jit(lambda w: [jax.grad(f)(w, x) for f in (wrapped, fun)])(w)) < 0.06
    logits = codec.stored_bytes((32, 48), "float32")
    assert logits <= held_bytes(wrapped, w, x) <= logits + 8 * 32  # A few integers a row.
    assert repr(codec) in str(explain(wrapped, w, x))


def test_factored_gradients_stay_factored():
    def loss(params, x):
        svd = RandomizedSVD(2)
        h = jnp.sin(actjax.linear(x, params["a"], codec=svd, key=KEY))
        return total(actjax.linear(h, params["b"], codec=svd, key=KEY))

    @jax.jit
    def run(params, x):
        losses = compress_residuals(loss, leave), loss
        return [actjax.value_and_grad(f)(params, x)[1] for f in losses]

    got, want = run({"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(0, 16, 8))
    for name in want:
        assert_close(got[name].dense(), want[name].dense(), 1e-5)  # Float32.
