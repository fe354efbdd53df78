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
from actjax import Quantized, RandomizedSVD, compress_residuals

FOUR, EIGHT = Quantized(4, group=16), Quantized(8, group=16)
LABELS = np.arange(32) % 10


def filled(shapes):
    """Returns parameters with these shapes, without compiling their initializers."""
    leaves, treedef = jax.tree.flatten(shapes)
    scaled = [normal(i, *x.shape) / np.float32(4) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, scaled)


class Perceptron(linen.Module):
    """A module of flax.linen."""

    @linen.compact
    def __call__(self, x):
        for width in (64, 64):
            x = linen.LayerNorm()(linen.gelu(linen.Dense(width)(x)))
        return linen.Dense(10)(x)


class Block(nnx.Module):
    """A transformer block of flax.nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def perceptron():
    x = normal(0, 32, 16)
    return Perceptron().apply, filled(jax.eval_shape(Perceptron().init, KEY, x)), x


def block():
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    return lambda params, x: nnx.merge(graph, params)(x), filled(shapes), normal(3, 2, 12, 16)


def attention_of_jax():
    def fun(w, x):
        q, k, v = (x @ part for part in w)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return fun, normal(1, 3, 16, 16) / 4, normal(0, 2, 12, 4, 16)


def loss_of_optax():
    def fun(w, x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS).mean()

    return fun, normal(1, 16, 48), normal(0, 32, 16)


HEADS = (2, 12, 4, 16)
LIBRARIES = {
    # One array for each of two hidden layers. Each norm also stores two booleans a token: whether
    # its variance was clipped at zero.
    "linen": (
        perceptron, FOUR, 0.25, 2 * FOUR.stored_bytes((32, 64), "float32") + 2 * 2 * 32, 8
    ),
    "nnx": (block, FOUR, 0.25, None, 10),
    # 8 bits: 17 times below a quarter.
    "attention of JAX": (
        attention_of_jax, EIGHT, 0.02,
        3 * EIGHT.stored_bytes(HEADS, "float32") + EIGHT.stored_bytes((2, 4, 12, 12), "float32"),
        3,
    ),
    # Logits err by 1/255 of a range of about 16, so probabilities by about a sixteenth. A few
    # integers a row are stored too.
    "optax": (
        loss_of_optax, EIGHT, 0.06, EIGHT.stored_bytes((32, 48), "float32") + 8 * 32, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_gradients_are_close_and_only_codes_are_stored(name):
    make, codec, error, most_bytes, ratio = LIBRARIES[name]
    fun, params, x = make()
    coded = compress_residuals(fun, codec)
    run = jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in (coded, fun)])
    assert 0 < relative_error(*run(params, x)) < error
    held = held_bytes(coded, params, x)
    assert held <= (most_bytes or held)
    assert held_bytes(fun, params, x) > ratio * held


def test_weights_of_attention_made_of_codes_add_up_to_one():
    """If they do, the gradients of v sum over keys to the gradient of the output."""
    x, w, v = normal(0, 1, 12, 16), normal(1, 2, 16, 16), normal(2, 1, 12, 2, 8)
    dout = normal(3, 1, 12, 2, 8)

    def attend(segments):
        def fun(w, v):
            q, k = (checkpoint_name(x @ w[i], "qk"[i]).reshape(v.shape) for i in range(2))
            # Scores are tens, as in trained models: levels of 2 bits are equally far apart.
            return actjax.attention(q, k, v, recompute=True, segments=segments)

        return fun

    rule = lambda c: Quantized(2, group=8) if c.name in ("q", "k") else None  # noqa: E731

    @jax.jit
    def run(w, v):
        funs = [attend(segments) for segments in (None, np.arange(12)[None] // 5)]
        return [
            [jax.vjp(f, w, v)[1](dout)[1] for f in (compress_residuals(fun, rule), fun)]
            for fun in funs
        ]

    for got, exact in jax.device_get(run(w, v)):
        # The codes were read. Sums of 12 terms of size 1 in float32.
        assert np.abs(got - exact).max() > 0.1
        np.testing.assert_allclose(got.sum(1), dout.sum(1), rtol=0, atol=1e-5)


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


def test_arrays_that_a_policy_offloads_are_left_on_the_host():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["saved"], names_which_can_be_offloaded=["offloaded"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        h = checkpoint_name(jax.nn.gelu(x @ w), "offloaded")
        return x + checkpoint_name(jnp.tanh(h @ w.T), "saved"), None

    def loss(w, x):
        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    w, x = normal(0, 2, 16, 32) / 4, normal(1, 8, 16)
    coded = compress_residuals(loss, EIGHT)
    got, want = (jax.jit(jax.grad(f))(w, x) for f in (coded, loss))
    assert 0 < relative_error(got, want) < 0.01
    for fun in (coded, loss):
        rows = actjax.explain(fun, w, x).residuals
        (offloaded,) = (row for row in rows if row.operator == "device_put")
        assert (offloaded.stored_bytes, offloaded.reason) == (0, "in the memory of the host")
