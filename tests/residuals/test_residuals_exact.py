"""Tests of `compress_residuals` with exact codecs: functions of all kinds are unchanged."""

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

from actjax import Exact, compress_residuals


def attention(x, w):
    q, k, v = (x @ part for part in w)
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.T / 3, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def dropout(x, w, key):
    h = jnp.tanh(x @ w)
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0) @ w


# All kinds of functions: name -> function, arguments.


def activation(name):
    fun = lambda x, w, v: getattr(jax.nn, name)(x @ w) @ v  # noqa: E731
    return fun, lambda: (normal(0, 6, 8), normal(1, 8, 8), normal(2, 8, 4))


def of_x(fun):
    return fun, lambda: (normal(0, 6, 8),)


def of_x_w(fun):
    return fun, lambda: (normal(0, 6, 8), normal(1, 8, 8) / 3)


def of_layers(fun):
    return fun, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3)


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


def scattered(x, w):
    h = jnp.tanh(x @ w)
    return (h.at[jnp.array([0, 3, 3])].add(jnp.exp(h[:3])) @ w).at[1].set(jnp.sin(h[0]))


CASES = {
    **{f"MLP with {name}": activation(name) for name in ("gelu", "relu", "tanh", "silu")},
    "MLP with relu6 and softplus": of_x_w(
        lambda x, w: jax.nn.softplus(jax.nn.relu6(x @ w) @ w) + jax.nn.leaky_relu(x @ w)
    ),
    "layer norm": (
        lambda x, w, s, b: layer_norm(x @ w, s, b) @ w,
        lambda: (normal(0, 6, 8), normal(1, 8, 8), normal(2, 8), normal(3, 8)),
    ),
    "softmax attention": (attention, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 2)),
    "dropout": (dropout, lambda: (normal(0, 6, 8), normal(1, 8, 8), KEY)),
    "dropout, raw key that is returned": (
        lambda x, w, key: (dropout(x, w, jax.random.split(key)[0]), key),
        lambda: (normal(0, 6, 8), normal(1, 8, 8), jax.random.PRNGKey(0)),
    ),
    "convolution": (
        lambda x, k: jnp.sin(
            lax.conv_general_dilated(jnp.tanh(x), jnp.sin(k), (1, 1), "SAME")
        ),
        lambda: (normal(0, 2, 3, 5, 5), normal(1, 4, 3, 3, 3)),
    ),
    "pooling": of_x(lambda x: lax.reduce_window(
        jnp.sin(x), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"
    )),
    "cumulative": of_x(lambda x: jnp.cumsum(jnp.sin(x), 0) * jnp.cumprod(x, 1)),
    "sort": of_x(lambda x: lax.cummax(jnp.sin(x), 0) * jnp.sort(x, 1)),
    "gather": (
        lambda x, i: jnp.sin(x)[i] * jnp.take_along_axis(x, jnp.argsort(x, 1), 1)[:3],
        lambda: (normal(0, 6, 8), jnp.array([0, 1, 1])),
    ),
    "scatter": of_x_w(scattered),
    "masks": of_x(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), jnp.exp(x)) * x),
    "extrema": of_x(
        lambda x: jnp.max(jnp.sin(x), 0) + jnp.min(x) + jnp.abs(x).sum() * jnp.clip(x, -0.5, 0.5)
    ),
    "steps": of_x(lambda x: x * jnp.round(2 * x) * jnp.sign(x) + x % 0.7),
    "powers": of_x(lambda x: jnp.abs(x) ** 2.3 + x**3 + 2**x),
    "einsum": of_x_w(lambda x, w: jnp.einsum("bi,ij,bk->bjk", jnp.sin(x), w, jnp.tanh(x))),
    "broadcast": of_x(lambda x: jnp.sin(x[:, None] * x[None, :, :1]) * jnp.exp(x[0])),
    "nested jit": of_x_w(
        lambda x, w: jax.jit(lambda y: jnp.sin(jax.jit(jnp.tanh)(y @ w)))(x) @ w
    ),
    "vmap within": of_x_w(lambda x, w: jax.vmap(lambda row: jnp.sin(row @ w) * row)(x)),
    "custom_jvp": of_x_w(lambda x, w: with_jvp(with_jvp(x @ w) @ w)),
    "custom_vjp": of_x_w(lambda x, w: with_vjp(with_vjp(x @ w, x) @ w, x)),
    "rfft": of_x(lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x))) ** 2),
    "solve": of_x(lambda x: jnp.linalg.solve(x @ x.T + 9 * jnp.eye(6), jnp.sin(x))),
    "cond": of_x_w(lambda x, w: lax.cond(
        jnp.sum(x @ w) > 0, lambda y: jnp.sin(y @ w), lambda y: jnp.exp(y) * (y @ w), jnp.tanh(x)
    )),
    "scan": of_layers(
        lambda x, ws: lax.scan(lambda c, w: (tanh_layer(c, w), jnp.sin(c).sum()), x, ws)
    ),
    "scan, reverse and unrolled": of_layers(
        lambda x, ws: lax.scan(
            lambda c, w: (tanh_layer(c, w), jnp.sin(c)), x, ws, reverse=True, unroll=2
        )
    ),
    "scan of nothing": of_x_w(
        lambda x, w: lax.scan(lambda c, _: (tanh_layer(c, w), c), x, None, 3)
    ),
    "scan, no iteration": of_layers(lambda x, ws: scanned(tanh_layer)(jnp.sin(x), ws[:0])),
    "scan with integers": of_layers(lambda x, ws: lax.scan(integers_and_floats, (x, 0, 0.0), ws)),
    "scan with keys in the carry": (
        keys_in_the_carry, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3, KEY)
    ),
    "scan over the outputs of a loop": of_layers(
        lambda x, ws: scanned(tanh_layer)(
            x, jnp.sin(lax.map(lambda w: jnp.exp(w) @ w, ws) / 9)
        )
    ),
    "nested scan": of_layers(nested_loops),
    "fori_loop": of_x_w(lambda x, w: lax.fori_loop(0, 3, lambda i, c: tanh_layer(c, w) * i + c, x)),
    "associative scan": of_x(lambda x: lax.associative_scan(jnp.multiply, jnp.sin(x))),
    "checkpoint": of_x_w(lambda x, w: jax.checkpoint(two_products)(jnp.sin(x), w) * x),
    "checkpoint, products saved": of_x_w(
        lambda x, w: jax.checkpoint(
            two_products, policy=jax.checkpoint_policies.dots_saveable
        )(jnp.sin(x), w) * x
    ),
    "checkpoint, names saved": of_x_w(checkpoint_with_names),
    "scan of checkpointed layers": of_layers(scanned(jax.checkpoint(tanh_layer))),
    "integers out": of_x(lambda x: (jnp.argmax(jnp.sin(x), 1), jnp.sin(x) * jnp.exp(x), True)),
    "trees": (
        lambda d: {"y": jnp.sin(d["x"] @ d["w"]) @ d["w"], "rest": (d["x"], None)},
        lambda: ({"x": normal(0, 6, 8), "w": normal(1, 8, 8)},),
    ),
    "Python numbers": (
        lambda x, f, i, b: jnp.sin(jnp.exp(x * f) * i) * b,
        lambda: (normal(0, 6, 8), 0.25, 3, True),
    ),
    "NumPy arrays": (
        lambda x, s: jnp.sin(jnp.exp(x) * s),
        lambda: (np.asarray(normal(0, 6, 8)), np.float32(2)),
    ),
    "constants": of_x_w(a_closed_over_array),
    "nothing but constants out": of_x(lambda x: (jnp.ones(3), 2.0, 1, jnp.sin(jnp.exp(x)))),
    "linear": of_x(lambda x: (2 * x + 1).T),
    "identity": of_x(lambda x: x),
    "an argument unchanged": of_x_w(lambda x, w: (x, jnp.sin(x @ w) @ w, w)),
    "an output is a residual": of_x_w(an_output_is_a_residual),
    "used three times": of_x_w(used_thrice),
    "an output unused": of_x_w(lambda x, w: (jnp.sin(x @ w), jnp.exp(w))[:1]),
    "zero-size": of_x(lambda x: (jnp.sin(jnp.exp(x)), jnp.exp(jnp.sin(x[:0])) @ x.T)),
    "scalars": (lambda s: jnp.sin(jnp.dot(s, s)) * jnp.exp(s), lambda: (normal(0, 1)[0],)),
    "nested compress_residuals": of_x_w(
        lambda x, w: jnp.sin(compress_residuals(two_products, Exact())(jnp.sin(x), w) @ w)
    ),
    "attention of jax.nn": (
        lambda x: jax.nn.dot_product_attention(
            *(x[:, None, :] * c for c in (1, 2, jnp.sin(x)[:, None, :])), is_causal=True
        ),
        lambda: (normal(0, 5, 2, 4),),
    ),
}  # fmt: skip


NOTHING_TO_DECIDE = {"linear", "identity", "no iteration", "NumPy arrays", "extrema", "powers",
                     "steps", "broadcast", "masks", "constants", "integers out", "Python numbers",
                     "nothing but constants out", "attention of jax.nn"}  # fmt: skip
"""Cases whose residuals all follow from their arguments, so that no rule is asked."""


@pytest.mark.parametrize("name", CASES)
def test_exact_codecs_change_nothing(x64, name):
    fun, make = CASES[name]
    args = make()
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    found = []
    variants = (
        fun,
        compress_residuals(fun, Exact()),
        compress_residuals(fun, found.append, rebuild=False),
    )

    @jax.jit
    def run(given):
        merged = list(leaves)  # Python numbers stay Python numbers.
        for i, x in zip(arrays, given, strict=True):
            merged[i] = x
        args = jax.tree.unflatten(treedef, merged)
        return [output_and_gradient(variant, args) for variant in variants]

    want, *others = run([leaves[i] for i in arrays])
    assert jax.tree.leaves(want[1])
    for got in others:
        assert_close(got, want)
    if name not in NOTHING_TO_DECIDE:
        assert found
