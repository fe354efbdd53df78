"""Tests of `compress_residuals`: the backward pass reads decoded values and exact masks.

`tests/core/test_order.py` tests when codes are decoded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import CoarseRandom, Spanned
from jax import lax
from jax.extend import core
from residuals.residual_helpers import (
    CODE,
    KEY,
    LAYERS,
    assert_close,
    held_bytes,
    is_float,
    layer_norm,
    lossy,
    mlp,
    normal,
    output_and_gradient,
    relative_error,
    scanned,
    tanh_layer,
    two_products,
)

from actjax import Quantized, compress_residuals


def test_the_value_is_exact_to_the_bit():
    def fun(x, ws):
        h = scanned(lambda c, w: jax.nn.relu(c @ w) + c)(x, ws)
        return h, jnp.argmax(h, 1), x

    codecs = CoarseRandom(1.0), Spanned(1)
    variants = fun, *(compress_residuals(fun, codec, key=KEY) for codec in codecs)
    run = jax.jit(lambda *args: [(output_and_gradient(f, args), f(*args)) for f in variants])
    ((want, exact), _), *coded = run(*LAYERS)
    for (value, gradient), alone in coded:
        jax.tree.map(np.testing.assert_array_equal, (value, alone), (want, want))
        # The gradient is far from exact with so few bits or directions, so the codecs were used.
        assert relative_error(gradient, exact) > 0.01


def with_residuals_replaced(fun, codec, smallest, *args):
    """Returns the pullback of JAX with its residuals encoded and decoded."""
    _, pullback = jax.vjp(fun, *args)
    arguments = {id(x) for x in jax.tree.leaves(args)}

    def replace(x: jax.Array) -> jax.Array:
        is_kept = id(x) in arguments or not is_float(x) or x.size < smallest
        return x if is_kept else lossy(codec, x)

    return jax.tree.map(replace, pullback)


SQUARE = (6, 8), (8, 8)
FUNCTIONS = {
    "mlp": (mlp, [*SQUARE, (8, 4)]),
    "softmax": (lambda x, w: jax.nn.softmax(x @ w) @ w, SQUARE),
    "sort": (lambda x, w: jnp.sort(jnp.exp(x @ w), 1)[::-1] ** 3, SQUARE),
    "where": (lambda x, w: jnp.where(x @ w > 0, jnp.exp(x @ w), jax.nn.relu(x) @ w), SQUARE),
    "scan": (scanned(two_products, reverse=True), [(6, 8), (3, 8, 8)]),
}


def test_without_rebuilding_each_residual_is_replaced_by_its_decoded_value(x64):
    # Arrays [6, 8] of an iteration are encoded; statistics [6, 1] are not.
    rule = lambda c: CODE if c.size >= 48 else None  # noqa: E731

    @jax.jit
    def run(arguments):
        results = {}
        for name, (fun, _) in FUNCTIONS.items():
            args = arguments[name]
            y, pullback = jax.vjp(compress_residuals(fun, rule, rebuild=False), *args)
            others = with_residuals_replaced(fun, CODE, 48, *args), jax.vjp(fun, *args)[1]
            results[name] = [f(jnp.cos(3 * y)) for f in (pullback, *others)]
        return results

    arguments = {
        name: [normal(i, *shape) / 2 for i, shape in enumerate(shapes)]
        for name, (_, shapes) in FUNCTIONS.items()
    }
    for got, want, exact in run(arguments).values():
        assert_close(got, want)
        assert relative_error(got, exact) > 0.01


# Gradients by hand, for a cotangent g: at the numbers that are stored.

MLP = (6, 8), (8, 8), (8, 4)
ONE_BIT = Quantized(1, group=8)


def of_gelu(g, x, w, v):
    h, gelu = lossy(CODE, x @ w), jax.nn.gelu
    dh = g @ v.T * jax.grad(lambda h: jnp.sum(gelu(h)))(h)
    return dh @ w.T, x.T @ dh, gelu(h).T @ g


def of_layer_norm(g, x, w, v, scale):
    h = lossy(CODE, x @ w)
    deviation = jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
    unit = (h - h.mean(-1, keepdims=True)) / deviation
    dn = g @ v.T * scale
    # Ba et al.: the components along ones and along the result vanish.
    along = dn.mean(-1, keepdims=True) + unit * jnp.mean(dn * unit, -1, keepdims=True)
    dh = (dn - along) / deviation
    return dh @ w.T, x.T @ dh, (unit * scale).T @ g, jnp.sum(g @ v.T * unit, 0)


def of_relu(rebuild):
    def by_hand(g, x, w, v):
        h = x @ w
        stored = jax.nn.relu(lossy(ONE_BIT, h)) if rebuild else lossy(ONE_BIT, jax.nn.relu(h))
        dh = jnp.where(h > 0, g @ v.T, 0)  # The mask is that of the true values.
        return dh @ w.T, x.T @ dh, stored.T @ g

    return by_hand


def stream(x, w0, w1, w2):
    h = x @ w0
    return (h + jnp.tanh(h @ w1)) @ w2


def of_stream(g, x, w0, w1, w2):
    h, u = x @ w0, x @ w0 @ w1
    s = lossy(CODE, h + jnp.tanh(u))  # The sum has a separate code.
    h, u = lossy(CODE, h), lossy(CODE, u)
    ds = g @ w2.T
    du = ds * (1 - jnp.tanh(u) ** 2)
    dh = ds + du @ w1.T
    return dh @ w0.T, x.T @ dh, h.T @ du, s.T @ g


def of_loop(g, x, ws):
    codes = []
    for w in ws:
        codes.append((lossy(CODE, x), lossy(CODE, jnp.tanh(x @ w))))
        x = jnp.tanh(x @ w)
    dws = []
    for w, (c, t) in reversed([*zip(ws, codes, strict=True)]):
        du = g * (1 - t**2)
        g, dws = du @ w.T, [c.T @ du, *dws]
    return g, jnp.stack(dws)


def relu_mlp(x, w, v):
    return jax.nn.relu(x @ w) @ v


BY_HAND = {
    "gelu": (lambda x, w, v: jax.nn.gelu(x @ w) @ v, of_gelu, MLP, CODE, {}),
    "layer norm": (
        lambda x, w, v, s: layer_norm(x @ w, s, 0.0) @ v, of_layer_norm, (*MLP, (8,)), CODE, {}
    ),
    "relu": (relu_mlp, of_relu(True), MLP, ONE_BIT, {}),
    "relu, not rebuilt": (relu_mlp, of_relu(False), MLP, ONE_BIT, {"rebuild": False}),
    "residual stream": (stream, of_stream, [(8, 8)] * 4, CODE, {}),
    "loop": (scanned(tanh_layer), of_loop, [(6, 8), (3, 8, 8)], CODE, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_by_hand(x64, name):
    fun, by_hand, shapes, codec, options = BY_HAND[name]

    @jax.jit
    def run(*args):
        y, pullback = jax.vjp(compress_residuals(fun, codec, **options), *args)
        g = jnp.cos(3 * y)
        return pullback(g), by_hand(g, *args)

    got, want = run(*(normal(i, *shape) / 2 for i, shape in enumerate(shapes)))
    # Terms of a layer norm are differences of numbers ten times as large.
    assert_close(got, want, 1e-11 if name == "layer norm" else 1e-12)


def behind(jaxpr, source) -> set:
    """Returns the variables that depend on one."""
    reached = {source}
    for eqn in jaxpr.eqns:
        if any(isinstance(x, core.Var) and x in reached for x in eqn.invars):
            reached |= {*eqn.outvars}
    return reached


@pytest.mark.parametrize("rebuild", [True, False])
def test_outputs_wait_for_codes(rebuild):
    # Without rebuilding only the backward pass reads the cosine that is encoded.
    coded = compress_residuals(lambda x, w, v: jnp.sin(x @ w) @ v, CODE, rebuild=rebuild)
    args = [normal(i, *shape) for i, shape in enumerate(MLP)]
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(coded, *args))(*args).jaxpr
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    codes = [x for eqn in barriers for x in eqn.invars if x.aval.dtype == "uint8"]
    assert codes
    for code in codes:
        assert jaxpr.outvars[0] in behind(jaxpr, code)


# Masks are exact: with a mask from lossy values the gradient would flow where it must be zero.


KINKS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "abs": jnp.abs,
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "product with a mask": lambda x: x * (x > 0),
    "integer part": lambda x: x * lax.stop_gradient(x.astype(int).astype(x.dtype)),
    "maximum of a row": lambda x: jnp.max(x, 1),
}


def thrice(kink):
    return lambda x: lax.scan(lambda c, _: (kink(c) - 0.3, None), x, None, 3)[0]


def test_gradients_of_kinks_are_zero_exactly_where_they_should_be():
    """Also if their input is encoded, as an activation or as the carry of a loop."""
    cases = {name: (lambda x, kink=kink: kink(x @ jnp.eye(16)), ()) for name, kink in KINKS.items()}
    for name in ("relu", "product with a mask"):
        cases[f"{name} of an activation"] = KINKS[name], 0
        cases[f"{name} of a carry"] = thrice(KINKS[name]), ()

    @jax.jit
    def run(x):
        gradients = {}
        for name, (fun, activations) in cases.items():
            coded = compress_residuals(fun, Quantized(2, group=16), activations=activations)
            gradients[name] = [jax.grad(lambda x, f=f: f(x).sum())(x) for f in (coded, fun)]
        return gradients

    for name, (got, want) in run(normal(2, 40, 16)).items():
        np.testing.assert_array_equal(got == 0, want == 0, err_msg=name)
        # Slopes are 0, 1, -1 or shares of a tie: exact, or decoded with a scale of 8 bits, in a
        # loop three times.
        atol = (3 if "carry" in name else 1) * 2 * 2**-8
        np.testing.assert_allclose(got, want, atol=atol, err_msg=name)


def test_the_mask_of_dropout_is_exact():
    def fun(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)

    x, eye = normal(0, 16, 16), np.eye(16, dtype=np.float32)
    rebuilt, stored = (compress_residuals(fun, Quantized(1), rebuild=b) for b in (True, False))
    fs = rebuilt, stored, fun
    run = jax.jit(lambda x: [jax.grad(lambda x, f=f: f(x, eye, KEY).sum())(x) for f in fs])
    *masked, want = run(x)
    for got in masked:
        np.testing.assert_array_equal(got, want)
    # The mask follows from the key, which is alive, so with rebuilding no mask is stored. Without
    # rebuilding it takes one bit a number.
    assert held_bytes(rebuilt, x, eye, KEY) == 0
    assert held_bytes(stored, x, eye, KEY) == x.size // 8
