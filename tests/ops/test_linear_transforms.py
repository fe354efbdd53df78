"""Tests of linear operators under transformations of JAX, and inside modules of Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import CoarseRandom, Spanned
from flax import linen, nnx
from ops.helpers import KEY, assert_close, assert_equal, normal, pullback

from actjax import linear


@pytest.fixture
def problem():
    return normal(0, 12, 8), normal(1, 8, 8)


def loss(x, w, key):
    return jnp.sum(jnp.sin(linear(x, w, codec=CoarseRandom(), key=key)))


GRADIENT = jax.jit(jax.grad(loss, argnums=(0, 1)))

# Float32 sums of up to 12 terms of size 1 to 10, compiled in another order.
same = functools.partial(assert_close, rtol=1e-5, atol=1e-5)


def test_vmap_over_the_input_and_over_the_key(problem):
    x, w = map(np.asarray, problem)
    xs, keys = np.stack([x, 2 * x, x[::-1]]), jax.random.split(KEY, 3)

    @jax.jit
    def run(xs, w, keys):
        over_inputs = jax.vmap(GRADIENT, in_axes=(0, None, None))(xs, w, KEY)
        over_keys = jax.vmap(GRADIENT, in_axes=(None, None, 0))(xs[0], w, keys)
        looped = jax.lax.map(lambda x: GRADIENT(x, w, KEY), xs)
        return over_inputs, looped, over_keys, jax.lax.map(lambda k: GRADIENT(xs[0], w, k), keys)

    over_inputs, looped, over_keys, each_key = run(xs, w, keys)
    same(over_inputs, looped)
    same(over_keys, each_key)
    assert not np.allclose(each_key[1][0], each_key[1][1])


def test_old_style_keys_draw_the_same_numbers(problem):
    assert_equal(GRADIENT(*problem, jax.random.key_data(KEY)), GRADIENT(*problem, KEY))


def test_scan_over_stacked_weights(problem):
    x, w = map(np.asarray, problem)
    ws, keys = np.stack([w, -w, w.T]), jax.random.split(KEY, 3)
    layer = lambda x, w, key: jnp.tanh(linear(x, w, codec=Spanned(3), key=key))  # noqa: E731

    def scanned(x, ws):
        return jnp.sum(jax.lax.scan(lambda x, s: (layer(x, *s), None), x, (ws, keys))[0])

    def unrolled(x, ws):
        for i in range(3):
            x = layer(x, ws[i], keys[i])
        return jnp.sum(x)

    run = jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (scanned, unrolled)])
    same(*run(x, ws))


def test_checkpoint_draws_the_same_numbers_again(problem):
    got = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(*problem, KEY)
    same(got, GRADIENT(*problem, KEY))
    # It holds no code but arguments and key: the encoding runs again.
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback(jax.checkpoint(loss), *problem, KEY))]
    assert set(shapes) <= {problem[0].shape, problem[1].shape, ()}


def test_inside_an_nnx_module(problem):
    x, w = problem

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return linear(x, self.w[...], codec=CoarseRandom(), key=KEY)

    grads = nnx.jit(nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x)))))(Layer())
    same(grads.w[...], GRADIENT(x, w, KEY)[1])


def test_inside_a_linen_module(problem):
    x, w = problem

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", linen.initializers.lecun_normal(), (8, 8))
            return linear(x, w, codec=CoarseRandom(), key=self.make_rng("codec"))

    def module_loss(variables, rngs):
        return jnp.sum(jnp.sin(Layer().apply(variables, x, rngs=rngs)))

    rngs = {"codec": KEY}
    grads = jax.jit(jax.grad(module_loss))({"params": {"w": w}}, rngs)
    # Linen folds the module's path into the key: the same key is found by asking for it.
    key = linen.Module.apply(_Key(), {}, rngs=rngs)
    same(grads["params"]["w"], GRADIENT(x, w, key)[1])


class _Key(linen.Module):
    @linen.compact
    def __call__(self):
        return self.make_rng("codec")
