"""Tests of `compress_residuals` with codecs that draw random numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import Coarse, CoarseRandom
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from residuals.residual_helpers import (
    KEY,
    LAYERS,
    RANDOM,
    loss_of,
    normal,
    scanned,
    tanh_layer,
    two_products,
)

from actjax import compress_residuals


def random_gradient(key, fun, *args):
    return jax.grad(loss_of(compress_residuals(fun, CoarseRandom(), key=key)))(*args)


def loop_in_loop(x, ws):
    return lax.scan(lambda c, _: (scanned(tanh_layer)(c, ws), None), x, None, 2)[0]


FUNCTIONS = {
    "once": lambda x, ws: two_products(x, ws[0]),
    "loop": scanned(tanh_layer),
    "loop in a loop": loop_in_loop,
}


def test_the_gradient_depends_on_the_key_only():
    run = jax.jit(lambda key: {n: random_gradient(key, f, *LAYERS) for n, f in FUNCTIONS.items()})
    a, b, c = run(KEY), run(KEY), run(jax.random.key(6))
    for name in FUNCTIONS:
        np.testing.assert_array_equal(a[name], b[name])
        assert not np.array_equal(a[name], c[name])


class WithKey(Coarse):
    """Stores the key too."""

    biased, needs_key = True, True

    def encode(self, x, key=None):
        return super().encode(x), jax.random.key_data(key)

    def decode(self, code):
        return super().decode(code[0])

    def stored_bytes(self, shape, dtype):
        return super().stored_bytes(shape, dtype) + 8


def one_by_one_and_in_a_loop(x, ws):
    stacked = lax.scan(lambda c, w: (c, jnp.exp(x @ w)), x, ws)
    return stacked, jnp.exp(x @ ws[0]), jnp.exp(x @ ws[0])


def two_loops(x, ws):
    return [scanned(tanh_layer)(x, ws) for _ in range(2)]


@pytest.mark.parametrize(("fun", "count"), [(one_by_one_and_in_a_loop, 5), (two_loops, 18)])
def test_each_array_of_each_iteration_has_another_key(fun, count):
    @jax.jit
    def stored(*args):
        wrapped = compress_residuals(fun, WithKey(), key=KEY, rebuild=False)
        return jax.tree.leaves(jax.vjp(wrapped, *args)[1])

    keys = [k.reshape(-1, 2) for k in jax.device_get(stored(*LAYERS)) if k.dtype == np.uint32]
    assert len(np.unique(np.concatenate(keys), axis=0)) == len(np.concatenate(keys)) == count


def test_stochastic_rounding_is_unbiased():
    fun = lambda x, w, v: (x @ w) @ v  # noqa: E731
    args = normal(0, 6, 8), normal(1, 8, 8), normal(2, 8, 4)
    g = normal(3, 6, 4)

    def draw(key):
        return jax.vjp(compress_residuals(fun, RANDOM, key=key), *args)[1](g)[2]

    draws = jax.jit(jax.vmap(draw))(jax.random.split(KEY, 200))
    draws = np.asarray(draws)
    deviation = draws.std(0) / math.sqrt(200)
    # The mean of 200 is normal: one of 32 entries exceeds five deviations once in 50,000 runs.
    exact = (args[0] @ args[1]).T @ g
    assert np.all(np.abs(draws.mean(0) - exact) < 5 * deviation + 1e-5)


def test_keys_may_be_given_by_name():
    def fun(x, ws):
        h = jnp.sin(checkpoint_name(x @ ws[0], "first"))
        return scanned(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "second")))(h, ws)

    @jax.jit
    def run(keys):
        return jax.grad(loss_of(compress_residuals(fun, CoarseRandom(), key=keys)), 1)(*LAYERS)

    names = "first", "second", "carry"
    keys = dict(zip(names, jax.random.split(KEY, 3), strict=True))
    want, other = run(keys), jax.random.key(1)
    np.testing.assert_array_equal(run(dict(reversed(keys.items()))), want)
    for name in names:
        assert not np.array_equal(run({**keys, name: other}), want)
