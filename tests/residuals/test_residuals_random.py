"""Tests of `compress_residuals` with codecs that draw random numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import CoarseRandom
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from residuals.residual_helpers import (
    KEY,
    LAYERS,
    ONE,
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


def codes_of(fun, *args) -> list[np.ndarray]:
    """Returns the stored bytes, one array a code."""

    @jax.jit
    def run(*args):
        wrapped = compress_residuals(fun, RANDOM, key=KEY, rebuild=False)
        leaves = jax.tree.leaves(jax.vjp(wrapped, *args)[1])
        return [leaf for leaf in leaves if leaf.dtype == jnp.uint8]

    return [np.asarray(leaf) for leaf in run(*args)]


def test_each_array_and_each_iteration_draws_different_numbers():
    def fun(x, ws):
        stacked = lax.scan(lambda c, w: (c, jnp.exp(x @ w)), x, ws)
        return stacked, jnp.exp(x @ ws[0]), jnp.exp(x @ ws[0])

    x, w = ONE
    *single, stack = sorted(codes_of(fun, x, np.stack([w] * 3)), key=lambda code: code.ndim)
    # These are five codes of equal arrays.
    assert len({code.tobytes() for code in (*stack, *single)}) == 5


def test_two_loops_draw_different_numbers():
    fun = lambda x, ws: [scanned(tanh_layer)(x, ws) for _ in range(2)]  # noqa: E731
    codes = codes_of(fun, *LAYERS)
    half = len(codes) // 2  # Both loops encode equal arrays.
    assert half > 1
    assert len({code.tobytes() for code in codes}) == 2 * half


def test_stochastic_rounding_is_unbiased():
    fun = lambda x, w, v: (x @ w) @ v  # noqa: E731
    args = normal(0, 6, 8), normal(1, 8, 8), normal(2, 8, 4)
    g = normal(3, 6, 4)

    def draw(key):
        return jax.vjp(compress_residuals(fun, RANDOM, key=key), *args)[1](g)[2]

    draws = jax.jit(jax.vmap(draw))(jax.random.split(KEY, 600))
    draws = np.asarray(draws)
    deviation = draws.std(0) / math.sqrt(600)
    # The mean of 600 is normal: one of 32 entries exceeds five deviations once in 50,000 runs.
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
