"""Tests of `compress_residuals`: decoded values, and where the backward pass reads them."""

import functools

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
    MLP_SHAPES,
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


@pytest.mark.parametrize(
    "codec",
    [
        CoarseRandom(1.0),
        Spanned(1),
    ],
    ids=repr,
)
def test_the_value_is_exact_to_the_bit(codec):
    def fun(x, ws):
        h = scanned(lambda c, w: jax.nn.relu(c @ w) + c)(x, ws)
        return h, jnp.argmax(h, 1), x

    wrapped = compress_residuals(fun, codec, key=KEY)
    (value, gradient), (want, exact), alone = jax.jit(
        lambda *args: [output_and_gradient(f, args) for f in (wrapped, fun)] + [wrapped(*args)]
    )(*LAYERS)
    for a, b, c in zip(value, want, alone, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, b)
    # The gradient is far from exact with so few bits or directions, so the codecs were used.
    assert relative_error(gradient, exact) > 0.01


def with_residuals_replaced(fun, codec, smallest, *args):
    """Returns the pullback of JAX with its residuals encoded and decoded."""
    _, pullback = jax.vjp(fun, *args)
    given = {id(x) for x in jax.tree.leaves(args)}

    def replace(x: jax.Array) -> jax.Array:
        kept = id(x) in given or not is_float(x) or x.size < smallest
        return x if kept else lossy(codec, x)

    return jax.tree.map(replace, pullback)


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (mlp, [(6, 8), (8, 8), (8, 4)]),
        (lambda x, w: jnp.sin(jnp.sin(x @ w)) * jax.nn.sigmoid(x @ w), [(6, 8), (8, 8)]),
        (lambda x, w: jax.nn.softmax(x @ w) @ w, [(6, 8), (8, 8)]),
        (lambda x, w: jnp.sort(jnp.exp(x @ w), 1)[::-1] ** 3, [(6, 8), (8, 8)]),
        (lambda x, w: jnp.where(x @ w > 0, jnp.exp(x @ w), jax.nn.relu(x) @ w), [(6, 8), (8, 8)]),
        (scanned(two_products, reverse=True), [(6, 8), (3, 8, 8)]),
    ],
    ids=["mlp", "sines", "softmax", "sort", "where", "scan"],
)
def test_without_rebuilding_each_residual_is_replaced_by_its_decoded_value(x64, fun, shapes):
    codec = CODE
    # Arrays [6, 8] of an iteration are encoded; statistics [6, 1] are not.
    rule = lambda c: codec if c.size >= 48 else None  # noqa: E731

    @jax.jit
    def run(args):
        y, pullback = jax.vjp(compress_residuals(fun, rule, rebuild=False), *args)
        others = with_residuals_replaced(fun, codec, 48, *args), jax.vjp(fun, *args)[1]
        return [f(jnp.cos(3 * y)) for f in (pullback, *others)]

    got, want, exact = run([normal(i, *shape) / 2 for i, shape in enumerate(shapes)])
    assert_close(got, want)
    assert relative_error(got, exact) > 0.01


def check_by_hand(fun, by_hand, args, tolerance=1e-12, **options):
    """Compares gradients with `by_hand(g, *args)` for a cotangent g; `options` contain the rule."""

    @jax.jit
    def run(*args):
        y, pullback = jax.vjp(compress_residuals(fun, **options), *args)
        g = jnp.cos(3 * y)
        return pullback(g), by_hand(g, *args)

    got, want = run(*args)
    assert_close(got, want, tolerance)


def test_an_exponential_by_hand(x64):
    def by_hand(g, x, w, v):
        e = lossy(CODE, jnp.exp(x @ w))
        dh = g @ v.T * e
        return dh @ w.T, x.T @ dh, e.T @ g

    args = [normal(i, *shape) / 2 for i, shape in enumerate(MLP_SHAPES)]
    check_by_hand(lambda x, w, v: jnp.exp(x @ w) @ v, by_hand, args, rule=CODE, rebuild=False)


@pytest.mark.parametrize("approximate", [True, False])
def test_a_gelu_by_hand(x64, approximate):
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)

    def by_hand(g, x, w, v):
        h = lossy(CODE, x @ w)
        dh = g @ v.T * jax.grad(lambda h: jnp.sum(gelu(h)))(h)
        return dh @ w.T, x.T @ dh, gelu(h).T @ g

    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    check_by_hand(lambda x, w, v: gelu(x @ w) @ v, by_hand, args, rule=CODE)


def test_a_layer_norm_by_hand(x64):
    def by_hand(g, x, w, v, scale):
        h = lossy(CODE, x @ w)
        deviation = jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        unit = (h - h.mean(-1, keepdims=True)) / deviation
        dn = g @ v.T * scale
        # Ba et al.: the components along ones and along the result vanish.
        along = dn.mean(-1, keepdims=True) + unit * jnp.mean(dn * unit, -1, keepdims=True)
        dh = (dn - along) / deviation
        return dh @ w.T, x.T @ dh, (unit * scale).T @ g, jnp.sum(g @ v.T * unit, 0)

    args = [normal(i, *shape) for i, shape in enumerate((*MLP_SHAPES, (8,)))]
    fun = lambda x, w, v, s: layer_norm(x @ w, s, 0.0) @ v  # noqa: E731
    check_by_hand(
        fun, by_hand, args, 1e-11, rule=CODE
    )  # Differences of numbers ten times as large.


@pytest.mark.parametrize("rebuild", [True, False])
def test_a_relu_by_hand_with_the_mask_of_true_values(x64, rebuild):
    codec = Quantized(1, group=8)

    def by_hand(g, x, w, v):
        h = x @ w
        stored = jax.nn.relu(lossy(codec, h)) if rebuild else lossy(codec, jax.nn.relu(h))
        dh = jnp.where(h > 0, g @ v.T, 0)
        return dh @ w.T, x.T @ dh, stored.T @ g

    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    fun = lambda x, w, v: jax.nn.relu(x @ w) @ v  # noqa: E731
    check_by_hand(fun, by_hand, args, rule=codec, rebuild=rebuild)


def test_a_residual_stream_by_hand(x64):
    def fun(x, w0, w1, w2):
        h = x @ w0
        return (h + jnp.tanh(h @ w1)) @ w2

    def by_hand(g, x, w0, w1, w2):
        h, u = x @ w0, x @ w0 @ w1
        s = lossy(CODE, h + jnp.tanh(u))  # The sum has a separate code.
        h, u = lossy(CODE, h), lossy(CODE, u)
        ds = g @ w2.T
        du = ds * (1 - jnp.tanh(u) ** 2)
        dh = ds + du @ w1.T
        return dh @ w0.T, x.T @ dh, h.T @ du, s.T @ g

    check_by_hand(fun, by_hand, [normal(i, 8, 8) / 2 for i in range(4)], rule=CODE)


def test_a_loop_by_hand(x64):
    def by_hand(g, x, ws):
        codes = []
        for w in ws:
            codes.append((lossy(CODE, x), lossy(CODE, x @ w)))
            x = jnp.tanh(x @ w)
        dws = []
        for w, (c, u) in reversed([*zip(ws, codes, strict=True)]):
            du = g * (1 - jnp.tanh(u) ** 2)
            g, dws = du @ w.T, [c.T @ du, *dws]
        return g, jnp.stack(dws)

    args = normal(0, 6, 8), normal(1, 3, 8, 8) / 2
    check_by_hand(scanned(tanh_layer), by_hand, args, rule=CODE)


# When codes are made and decoded.


def downstream(jaxpr, sources, across_barriers: bool) -> set:
    """Returns the variables that depend on `sources`, optionally also through barriers."""
    found = {*sources}
    for eqn in jaxpr.eqns:
        reached = [not isinstance(x, core.Literal) and x in found for x in eqn.invars]
        if eqn.primitive.name == "optimization_barrier" and not across_barriers:
            found |= {x for x, is_reached in zip(eqn.outvars, reached, strict=True) if is_reached}
        elif any(reached):
            found |= {*eqn.outvars}
    return found


def arrays(jaxpr, dtype, *shape) -> set:
    made = {x for eqn in jaxpr.eqns for x in eqn.outvars}
    return {x for x in made if (x.aval.dtype, x.aval.shape) == (dtype, shape)}


def test_codes_are_made_before_outputs_are_read():
    # Only the backward pass of the second function reads the cosine that it encodes.
    wrapped = compress_residuals(mlp, CODE)
    sine = compress_residuals(lambda x, w, v: jnp.sin(x @ w) @ v, CODE, rebuild=False)
    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    for fun in (wrapped, sine):
        jaxpr = jax.make_jaxpr(lambda *args, fun=fun: jax.vjp(fun, *args))(*args).jaxpr
        barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
        made = {x for eqn in jaxpr.eqns for x in eqn.outvars if x.aval.dtype == "uint8"}
        codes = made & {x for eqn in barriers for x in eqn.invars if isinstance(x, core.Var)}
        assert codes
        for code in codes:
            assert jaxpr.outvars[0] in downstream(jaxpr, [code], True)


def test_no_code_is_decoded_before_it_is_needed():
    wrapped = compress_residuals(lambda x, w, v: jnp.sin(jnp.tanh(x @ w) @ v), CODE)
    args = normal(3, 6, 24), normal(0, 6, 8), normal(1, 8, 16), normal(2, 16, 24)
    jaxpr = jax.make_jaxpr(lambda g, *args: jax.vjp(wrapped, *args)[1](g))(*args).jaxpr
    # Decoded arrays are floats that follow from bytes.
    last, first = (
        arrays(jaxpr, "float32", 6, width)
        & downstream(jaxpr, arrays(jaxpr, "uint8", 6, width), False)
        for width in (24, 16)
    )
    assert last
    assert first
    # The last array waits for the cotangent, the first for values computed from the last.
    assert last <= downstream(jaxpr, jaxpr.invars[:1], True)
    assert first <= downstream(jaxpr, last, True)


# Masks are exact: with a mask from lossy values the gradient would flow where it must be zero.


KINKS = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu6": jax.nn.relu6,
    "abs": jnp.abs,
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "product with a mask": lambda x: x * (x > 0),
    "integer part": lambda x: x * lax.stop_gradient(x.astype(int).astype(x.dtype)),
    "maximum of a row": lambda x: jnp.max(x, 1),
}


def gradients_of_sums(functions, x):
    """Returns the gradients of the sums of functions, in one program."""
    run = jax.jit(lambda x: [jax.grad(lambda x, f=f: f(x).sum())(x) for f in functions])
    return map(np.asarray, run(x))


def test_gradients_of_kinks_are_zero_exactly_where_they_should_be():
    functions = []
    for kink in KINKS.values():
        fun = lambda x, kink=kink: kink(x @ jnp.eye(16))  # noqa: E731
        functions += compress_residuals(fun, Quantized(2, group=16)), fun
    found = gradients_of_sums(functions, normal(2, 40, 16))
    for name, got, want in zip(KINKS, found, found, strict=True):
        np.testing.assert_array_equal(got == 0, want == 0, err_msg=name)
        # Slopes are 0, 1, -1 or shares of a tie: exact, or decoded with a scale of 8 bits.
        np.testing.assert_allclose(got, want, atol=2 * 2**-8, err_msg=name)


def thrice(kink):
    return lambda x: lax.scan(lambda c, _: (kink(c) - 0.3, None), x, None, 3)[0]


DYING = {"activation": (lambda kink: kink, 0), "carry": (thrice, ())}


@pytest.mark.parametrize("where", DYING)
def test_gradients_of_kinks_are_zero_also_if_their_input_is_encoded(where):
    wrap, activations = DYING[where]
    names, functions = ("relu", "maximum", "clip", "product with a mask"), []
    for name in names:
        fun = wrap(KINKS[name])
        functions += compress_residuals(fun, Quantized(2, group=16), activations=activations), fun
    found = gradients_of_sums(functions, normal(2, 40, 16))
    for name, got, want in zip(names, found, found, strict=True):
        np.testing.assert_array_equal(got == 0, want == 0, err_msg=name)
        # As above, three times.
        np.testing.assert_allclose(got, want, atol=3 * 2 * 2**-8, err_msg=name)


@pytest.mark.parametrize("rebuild", [True, False])
def test_the_mask_of_dropout_is_exact(rebuild):
    def fun(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)

    x, eye = normal(0, 16, 16), jnp.eye(16)
    wrapped = compress_residuals(fun, Quantized(1), rebuild=rebuild)
    got, want = jax.jit(
        lambda x: [jax.grad(lambda x: f(x, eye, KEY).sum())(x) for f in (wrapped, fun)]
    )(x)
    np.testing.assert_array_equal(got, want)
    # The mask follows from the key, which is alive, so with rebuilding no mask is stored. Without
    # rebuilding it takes one bit a number.
    assert held_bytes(wrapped, x, eye, KEY) == (0 if rebuild else x.size // 8)
