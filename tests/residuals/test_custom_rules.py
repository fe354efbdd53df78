"""Tests of residuals that custom rules of others save: which are codes, and which must be exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from residuals.residual_helpers import asked, held_bytes, normal, relative_error

from actjax import Quantized, compress_residuals

X, W = normal(0, 64, 64), normal(1, 64, 64) / 8
TWO_BITS = Quantized(2, group=16)


def rule_of(bwd, saved=lambda y: y, wrap=jax.custom_vjp):
    """Returns the sine, with a custom rule that saves something of its argument."""
    rule = wrap(jnp.sin)
    rule.defvjp(lambda y: (jnp.sin(y), saved(y)), lambda saved, g: (bwd(saved, g),))
    return rule


def by_a_solver(y, g):
    """Halves `y` until it is small, as an adaptive solver would."""
    small, _ = jax.lax.while_loop(
        lambda c: jnp.max(jnp.abs(c[0])) > 1e-3, lambda c: (c[0] / 2, c[1] + 1), (y, 0)
    )
    return g * small


def by_a_kernel(y, g):
    def kernel(y_ref, g_ref, out_ref):
        def step(i, carry):
            rows = pl.ds(i * 16, 16)
            out_ref[rows] = jnp.cos(y_ref[rows]) * g_ref[rows]
            return carry

        # A bound that is no constant makes a while loop, as in kernels of causal attention.
        jax.lax.fori_loop(0, pl.program_id(0) + 4, step, 0)

    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return pl.pallas_call(kernel, shape, grid=(1,), interpret=True)(y, g)


def by_a_loop(y, g):
    def step(total, slices):
        row, gradient = slices
        return total + row.sum(), jnp.cos(row) * gradient

    return jax.lax.scan(step, 0.0, (y, g))[1]


def by_clipping_gradients(y, g):
    """Rounds and compares gradients only."""
    product = g * jnp.cos(y)
    return jnp.where(jnp.abs(product) > 0.5, jnp.round(product), product)


def by_a_kernel_that_compares(y, g):
    def kernel(y_ref, g_ref, out_ref):
        out_ref[...] = jnp.where(y_ref[...] > 0, g_ref[...], 0.0)

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(y.shape, y.dtype), interpret=True)(y, g)


def by_a_loop_that_compares(y, g):
    """The second iteration compares what the first one read."""
    step = lambda last, row: (row, last > 0)  # noqa: E731
    return g * jax.lax.scan(step, y[0], y)[1]


CODED = {
    "products": rule_of(lambda y, g: g * jnp.cos(y)),
    # The backward function of nnx also gets the cotangents of updated variables.
    "nnx": rule_of(lambda y, g: g[1] * jnp.cos(y), wrap=nnx.custom_vjp),
    "loop": rule_of(by_a_loop),
    "kernel": rule_of(by_a_kernel),
    "clipped gradients": rule_of(by_clipping_gradients),
}
EXACT = {
    "comparison": rule_of(lambda y, g: jnp.where(y > 0, g, 0.1 * g)),
    "rounding": rule_of(lambda y, g: g * jnp.round(y)),
    "order": rule_of(lambda y, g: jnp.take_along_axis(g, jnp.argsort(y, 1), 1)),
    "solver": rule_of(by_a_solver),
    "kernel that compares": rule_of(by_a_kernel_that_compares),
    "loop that compares": rule_of(by_a_loop_that_compares),
    "callback": rule_of(lambda y, g: g * jax.pure_callback(np.cos, y, y)),
    "tables": rule_of(
        lambda saved, g: g * saved.reshape(64, 64),
        lambda y: jnp.cumsum(jnp.full(y.size, 1e-3)),
    ),
    "branch with a table": lambda y: jax.lax.cond(
        y[0, 0] > 9,
        jnp.zeros_like,
        rule_of(
            lambda saved, g: g * saved.reshape(64, 64),
            lambda y: jnp.cumsum(jnp.full(y.size, 1e-3)),
        ),
        y,
    ),
}


def over_devices(y):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d")
    return jax.shard_map(EXACT["comparison"], mesh=mesh, in_specs=spec, out_specs=spec)(y)


EXACT["comparison over devices"] = over_devices


def gradients(fun):
    """Returns the gradient of the sum of `fun(X W)` at 2 bits, and exactly."""

    def of(rule):
        return jax.grad(lambda w: jnp.sum(rule(X @ w)))

    return jax.jit(of(compress_residuals(fun, TWO_BITS, activations=0)))(W), jax.jit(of(fun))(W)


@pytest.mark.parametrize("name", CODED)
def test_residuals_of_continuous_rules_are_codes(name):
    y = X @ W
    coded = compress_residuals(CODED[name], TWO_BITS, activations=0)
    assert held_bytes(coded, y) == TWO_BITS.stored_bytes(y.shape, y.dtype)
    decoded = TWO_BITS.decode(TWO_BITS.encode(y))
    want = jax.vjp(CODED[name], decoded)[1](jnp.ones_like(y))[0]
    got = jax.vjp(coded, y)[1](jnp.ones_like(y))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_residuals_that_must_be_exact_are(name):
    got, want = gradients(EXACT[name])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_arrays_beside_an_exact_one_are_coded():
    rule = EXACT["comparison"]
    fun = lambda w: jnp.sum(rule(jnp.tanh(X @ w) @ W))  # noqa: E731
    assert [x.primitive for x in asked(fun, W)] == ["tanh"]


def weights(q, k, lse):
    return jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) - lse[..., None])


@jax.custom_vjp
def flash_attention(q, k, v):
    """Attention of a single head that stores a log-sum-exp, as fused kernels do."""
    return flash_fwd(q, k, v)[0]


def flash_fwd(q, k, v):
    lse = jax.nn.logsumexp(jnp.einsum("bqd,bkd->bqk", q, k), -1)
    o = weights(q, k, lse) @ v
    return o, (q, k, v, o, lse)


def flash_bwd(saved, g):
    q, k, v, o, lse = saved
    p = weights(q, k, lse)
    ds = p * (jnp.einsum("bqd,bkd->bqk", g, v) - jnp.sum(g * o, -1, keepdims=True))
    return ds @ k, ds.mT @ q, p.mT @ g


flash_attention.defvjp(flash_fwd, flash_bwd)


def test_a_rule_with_a_log_sum_exp_runs_again_from_decoded_inputs():
    # Scores of up to 30: with an exact log-sum-exp and decoded q and k, weights reach e^10.
    q, k, v = (normal(i, 2, 16, 64) for i in range(3))
    codec = Quantized(4)
    coded = compress_residuals(flash_attention, codec, activations=(0, 1, 2))
    assert held_bytes(coded, q, k, v) == 3 * codec.stored_bytes(q.shape, q.dtype)
    g = normal(3, *q.shape)

    @jax.jit
    def both(q, k, v):
        decoded = [codec.decode(codec.encode(x)) for x in (q, k, v)]
        return jax.vjp(coded, q, k, v)[1](g), jax.vjp(flash_attention, *decoded)[1](g)

    for got, want in zip(*both(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_softmax_with_a_log_sum_exp_runs_again_too():
    softmax = jax.custom_vjp(lambda x: softmax_fwd(x)[0])

    def softmax_fwd(x):
        lse = jax.nn.logsumexp(x, -1, keepdims=True)
        return jnp.exp(x - lse), (x, lse)

    def softmax_bwd(saved, g):
        p = jnp.exp(saved[0] - saved[1])
        return (p * (g - jnp.sum(g * p, -1, keepdims=True)),)

    softmax.defvjp(softmax_fwd, softmax_bwd)
    y, g, codec = 4 * normal(0, 64, 64), normal(1, 64, 64), Quantized(4)

    @jax.jit
    def both(y):
        coded = compress_residuals(softmax, codec, activations=0)
        decoded = codec.decode(codec.encode(y))
        return jax.vjp(coded, y)[1](g), jax.vjp(softmax, decoded)[1](g)

    np.testing.assert_allclose(*both(y), rtol=1e-4, atol=1e-6)


def quantized_product(x, w):
    """A product in 8 bits, whose gradient is that of the exact product, as qwix has it."""

    def whole(x, scale):
        return jnp.round(x / scale).astype(jnp.int8)

    @jax.custom_vjp
    def product(x, w):
        a, b = (jnp.max(jnp.abs(z)) / 127 for z in (x, w))
        return jnp.dot(whole(x, a), whole(w, b), preferred_element_type=jnp.int32) * (a * b)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda s, g: (g @ s[1].T, s[0].T @ g))
    return product(x, w)


def test_quantized_products_store_codes_of_floats_instead_of_integers():
    def loss(ws, product=quantized_product):
        y = functools.reduce(lambda x, w: jnp.tanh(product(x, w)), ws, X)
        return jnp.sum(y**2)

    ws = [normal(i, 64, 64) / 8 for i in range(4)]
    small = compress_residuals(loss, Quantized(4))
    assert held_bytes(small, ws) < 0.2 * held_bytes(loss, ws)
    got, want = jax.jit(lambda ws: [jax.grad(f)(ws) for f in (small, loss)])(ws)
    assert all(relative_error(a, b) < 0.15 for a, b in zip(got, want, strict=True))
