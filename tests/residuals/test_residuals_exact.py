"""Tests of `compress_residuals` and `checkpoint` with exact codecs: all functions are unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from residuals.residual_helpers import (
    KEY,
    assert_close,
    layer_norm,
    normal,
    output_and_gradient,
    scanned,
    tanh_layer,
    two_products,
)

from actjax import Exact, checkpoint, compress_residuals


def together(functions):
    """Returns a function of the outputs of all, in one program."""
    return functions[0] if len(functions) == 1 else lambda *args: [f(*args) for f in functions]


def of_x(*functions):
    return together(functions), lambda: (normal(0, 6, 8),)


def of_x_w(*functions):
    return together(functions), lambda: (normal(0, 6, 8), normal(1, 8, 8) / 3)


def of_layers(*functions):
    return together(functions), lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3)


def activation(name):
    return lambda x, w: getattr(jax.nn, name)(x @ w) @ w


def attention(x, w):
    q, k, v = x @ w, x @ w.T, x @ w[::-1]
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.T / 3, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def dropout(x, w, key):
    h = jnp.tanh(x @ w)
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0) @ w


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x) * x


@with_jvp.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return with_jvp(x), 1.5 * jnp.cos(x) * x * dx


@jax.custom_vjp
def with_vjp(x, y):
    return jnp.sin(x) * y


def _forward(x, y):
    return with_vjp(x, y), (jnp.cos(x), y, jnp.sin(x))


def _backward(residuals, g):
    cos, y, sin = residuals
    return 2 * g * cos * y, 3 * g * sin


with_vjp.defvjp(_forward, _backward)


def used_thrice(x, w):
    h = jnp.tanh(x @ w)
    return h @ w, {"twice": h @ w[:, :4], "transposed": h.T @ x}


def an_output_is_a_residual(x, w):
    y = jnp.exp(x @ w)
    return y, y @ w, y


def integers_and_floats(carry, w):
    x, count, weak = carry
    return (tanh_layer(x, w), count + 1, weak * 1.5 + count), count


def nested_loops(x, ws):
    def inner(carry, w):
        return lax.scan(lambda c, _: (tanh_layer(c, w), c[0] * jnp.sin(c[1])), carry, None, 2)

    return lax.scan(inner, x, ws)


def keys_in_the_carry(x, ws, key):
    def layer(carry, w):
        x, key = carry
        key, subkey = jax.random.split(key)
        return (dropout(x, w, subkey), key), None

    return lax.scan(layer, (x, key), ws)


def a_closed_over_array(x, w):
    table = np.arange(48.0).reshape(6, 8) / 10
    return jax.jit(lambda y: jnp.sin(y * table) @ w)(x)


def checkpoint_with_names(x, w):
    def block(x):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "mine") @ w)

    policy = jax.checkpoint_policies.save_only_these_names("mine")
    return jax.checkpoint(block, policy=policy)(jnp.sin(x)) * x


def products_saved(x, w):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(two_products, policy=policy)(jnp.sin(x), w) * x


def scattered(x, w):
    h = jnp.tanh(x @ w)
    return (h.at[jnp.array([0, 3, 3])].add(jnp.exp(h[:3])) @ w).at[1].set(jnp.sin(h[0]))


CASES = {
    "activations": of_x_w(
        *map(activation, ("gelu", "silu", "relu6", "softplus"))
    ),
    "norm and attention": of_x_w(lambda x, w: layer_norm(x @ w, w[0], w[1]) @ w, attention),
    "dropout, raw key that is returned": (
        lambda x, w, raw: (dropout(x, w, jax.random.split(raw)[0]), raw),
        lambda: (normal(0, 6, 8), normal(1, 8, 8), jax.random.PRNGKey(0)),
    ),
    "convolution and pooling": (
        lambda x, k: lax.reduce_window(
            jnp.sin(lax.conv_general_dilated(jnp.tanh(x), jnp.sin(k), (1, 1), "SAME")),
            -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID",
        ),
        lambda: (normal(0, 2, 3, 5, 5), normal(1, 4, 3, 3, 3)),
    ),
    "sums and orders": of_x(
        lambda x: jnp.cumsum(jnp.sin(x), 0) * jnp.cumprod(x, 1),
        lambda x: lax.cummax(jnp.sin(x), 0) * jnp.sort(x, 1),
        lambda x: lax.associative_scan(jnp.multiply, jnp.sin(x)),
    ),
    "gather and scatter": of_x_w(
        lambda x, _: jnp.sin(x)[np.array([0, 1, 1])],
        lambda x, _: jnp.take_along_axis(jnp.sin(x), jnp.argsort(x, 1), 1)[:3] * x[:3],
        scattered,
    ),
    "kinks and powers": of_x(
        lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), jnp.exp(x)) * x,
        lambda x: jnp.max(jnp.sin(x), 0) + jnp.min(x) + jnp.abs(x).sum() * jnp.clip(x, -0.5, 0.5),
        lambda x: x * jnp.round(2 * x) * jnp.sign(x) + x % 0.7,
        lambda x: jnp.abs(x) ** 2.3 + x**3 + 2**x,
        lambda x: jnp.sin(x[:, None] * x[None, :, :1]) * jnp.exp(x[0]),
    ),
    "calls": of_x_w(
        lambda x, w: jnp.einsum("bi,ij,bk->bjk", jnp.sin(x), w, jnp.tanh(x)),
        lambda x, w: jax.jit(lambda y: jnp.sin(jax.jit(jnp.tanh)(y @ w)))(x) @ w,
        lambda x, w: jax.vmap(lambda row: jnp.sin(row @ w) * row)(x),
        lambda x, w: jnp.sin(compress_residuals(two_products, Exact())(jnp.sin(x), w) @ w),
        a_closed_over_array,
    ),
    "custom derivatives": of_x_w(
        lambda x, w: with_jvp(with_jvp(x @ w) @ w),
        lambda x, w: with_vjp(with_vjp(x @ w, x) @ w, x),
    ),
    "rfft and solve": of_x(
        lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x))) ** 2,
        lambda x: jnp.linalg.solve(x @ x.T + 9 * jnp.eye(6), jnp.sin(x)),
    ),
    "cond": of_x_w(lambda x, w: lax.cond(
        jnp.sum(x @ w) > 0, lambda y: jnp.sin(y @ w), lambda y: jnp.exp(y) * (y @ w), jnp.tanh(x)
    )),
    "scan": of_layers(
        lambda x, ws: lax.scan(lambda c, w: (tanh_layer(c, w), jnp.sin(c).sum()), x, ws),
        lambda x, ws: lax.scan(
            lambda c, w: (tanh_layer(c, w), jnp.sin(c)), x, ws, reverse=True, unroll=2
        ),
        lambda x, ws: lax.scan(lambda c, _: (tanh_layer(c, ws[0]), c), x, None, 3),
    ),
    "scan, no iteration": of_layers(lambda x, ws: scanned(tanh_layer)(jnp.sin(x), ws[:0])),
    "scan with integers": of_layers(lambda x, ws: lax.scan(integers_and_floats, (x, 0, 0.0), ws)),
    "scan with keys in the carry": (
        keys_in_the_carry, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3, KEY)
    ),
    "loops of loops": of_layers(
        lambda x, ws: scanned(tanh_layer)(x, jnp.sin(lax.map(lambda w: jnp.exp(w) @ w, ws) / 9)),
        nested_loops,
        lambda x, ws: lax.fori_loop(0, 3, lambda i, c: tanh_layer(c, ws[0]) * i + c, x),
    ),
    "checkpoint": of_x_w(
        lambda x, w: jax.checkpoint(two_products)(jnp.sin(x), w) * x,
        products_saved,
        checkpoint_with_names,
        lambda x, w: scanned(jax.checkpoint(tanh_layer))(x, jnp.stack([w, w.T])),
    ),
    "integers and constants out": of_x(
        lambda x: (jnp.argmax(jnp.sin(x), 1), jnp.sin(x) * jnp.exp(x), True),
        lambda x: (jnp.ones(3), 2.0, 1, jnp.sin(jnp.exp(x))),
    ),
    "trees": (
        lambda d: {"y": jnp.sin(d["x"] @ d["w"]) @ d["w"], "rest": (d["x"], None)},
        lambda: ({"x": normal(0, 6, 8), "w": normal(1, 8, 8)},),
    ),
    "numbers": (
        lambda x, f, i, b, s: jnp.sin(jnp.exp(x * f) * i * s) * b,
        lambda: (normal(0, 6, 8), 0.25, 3, True, np.float32(2)),
    ),
    "linear": of_x(lambda x: (2 * x + 1).T),
    "identity": of_x(lambda x: x),
    "outputs that are arguments and residuals": of_x_w(
        lambda x, w: (x, jnp.sin(x @ w) @ w, w),
        an_output_is_a_residual,
        used_thrice,
        lambda x, w: (jnp.sin(x @ w), jnp.exp(w))[:1],
    ),
    "zero-size": of_x(lambda x: (jnp.sin(jnp.exp(x)), jnp.exp(jnp.sin(x[:0])) @ x.T)),
    "scalars": (lambda s: jnp.sin(jnp.dot(s, s)) * jnp.exp(s), lambda: (normal(0, 1)[0],)),
}  # fmt: skip
NOTHING_TO_DECIDE = {"linear", "identity", "scan, no iteration", "integers and constants out",
                     "numbers", "kinks and powers"}  # fmt: skip
"""Cases whose residuals all follow from their arguments, so that no rule may be asked."""


@pytest.mark.parametrize("name", CASES)
def test_exact_codecs_change_nothing(x64, name):
    fun, make = CASES[name]
    args = make()
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    asked = []
    variants = (
        fun,
        compress_residuals(fun, Exact()),
        compress_residuals(fun, asked.append, rebuild=False),
        checkpoint(fun, Exact()),
    )

    @jax.jit
    def run(traced):
        merged = list(leaves)  # Python numbers stay Python numbers.
        for i, x in zip(arrays, traced, strict=True):
            merged[i] = x
        args = jax.tree.unflatten(treedef, merged)
        return [output_and_gradient(variant, args) for variant in variants]

    want, *others = run([leaves[i] for i in arrays])
    assert jax.tree.leaves(want[1])
    for got in others:
        assert_close(got, want)
    assert asked or name in NOTHING_TO_DECIDE
