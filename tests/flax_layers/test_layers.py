"""Tests of `actjax.flax`: exact layers are those of Flax, and coded ones store codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from residuals.residual_helpers import KEY, normal, relative_error

import actjax
from actjax import Exact, Quantized, RandomProjection
from actjax.flax import linen as coded_linen
from actjax.flax import nnx as coded_nnx
from actjax.flax import products, replace

X = normal(0, 4, 16, 32)
IMAGE = normal(0, 2, 8, 8, 6)
Q8 = Quantized(8, group=32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.root = nnx.RMSNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.root(x))))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(4, name="attention")(linen.LayerNorm()(x))
        x = linen.RMSNorm()(x)
        y = linen.Conv(16, (3,), strides=2, name="conv")(x)
        return x, linen.Dense(8, name="last")(y)


@nnx.jit
def block():
    return Block(nnx.Rngs(0))


def total(tree):
    return sum(jnp.sum(jnp.sin(1.3 * y)) for y in jax.tree.leaves(tree))


@nnx.jit
def value_and_gradient(model, x):
    return nnx.value_and_grad(lambda model, x: total(model(x)))(model, x)


def assert_same(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(np.max(np.abs(y)) + 1e-9))


def test_a_replaced_model_of_nnx_has_the_same_gradient_and_stores_less():
    model = block()
    exact, small = replace(model, Exact()), replace(model, Q8)
    assert type(small.up) is coded_nnx.Linear
    assert type(small.attention.query) is coded_nnx.LinearGeneral
    assert type(small.norm) is coded_nnx.LayerNorm
    assert type(model.up) is nnx.Linear
    (value, got), (plain, gradient) = (value_and_gradient(m, X) for m in (exact, model))
    assert_same(value, plain)
    # Gradients of the biases of keys are zero but for rounding.
    assert relative_error(got, gradient) < 1e-5
    error = relative_error(value_and_gradient(small, X)[1], gradient)
    assert 1e-5 < error < 0.02
    graph, state = nnx.split(small)
    found = actjax.explain(lambda state, x: total(nnx.merge(graph, state)(x)), state, X)
    stored = {f"{r.operator}: {r.name}" for r in found.residuals}
    assert {"linear: up", "linear: attention/query", "rms_norm: root"} <= stored


def test_rules_by_path_and_by_function():
    model = block()
    by_path = replace(model, {"attention/(query|key)$": Q8, "up": None})
    assert type(by_path.attention.key) is coded_nnx.LinearGeneral
    assert type(by_path.attention.value) is nnx.LinearGeneral
    assert type(by_path.up) is nnx.Linear
    by_function = replace(model, lambda path, layer: Q8 if path == "down" else None)
    assert type(by_function.down) is coded_nnx.Linear
    assert type(by_function.norm) is nnx.LayerNorm


def test_random_codecs_draw_from_the_stream_of_codes_and_gradients_are_factored():
    model = replace(block(), {"up": RandomProjection(4)}, rngs=nnx.Rngs(codes=3))
    first, second = (value_and_gradient(model, X)[1]["up"]["kernel"][...] for _ in range(2))
    assert not np.array_equal(first, second)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = lambda params, x: total(nnx.merge(graph, params, rest, copy=True)(x))  # noqa: E731
    kernel = actjax.value_and_grad(run)(params, X)[1]["up"]["kernel"].get_value()
    assert isinstance(kernel, actjax.LowRank)
    assert kernel.rank == 4


def test_layers_of_nnx_take_a_codec():
    attention = {"num_heads": 4, "in_features": 32, "decode": False}
    layers = [
        ("Linear", (32, 8), {}, X),
        ("Conv", (6, 4, (3, 3)), {"strides": 2}, IMAGE),
        ("Einsum", ("...d,ndh->n...h", (4, 32, 2), (4, 2)), {}, X),
        ("MultiHeadAttention", (), attention, X),
    ]
    for name, arguments, options, x in layers:

        @nnx.jit
        def make(name=name, arguments=arguments, options=options):
            rngs = nnx.Rngs(0, codes=1)
            coded = getattr(coded_nnx, name)(*arguments, **options, codec=Q8, rngs=rngs)
            return coded, getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))

        own, plain = make()
        nnx.update(own, nnx.state(plain, nnx.Param))
        (value, got), (exact, gradient) = (value_and_gradient(m, x) for m in (own, plain))
        assert_same(value, exact)
        assert 0 < relative_error(nnx.state(got, nnx.Param), gradient) < 0.02


def test_a_model_of_linen_under_the_interceptor():
    model = LinenBlock()
    params = jax.jit(model.init)(KEY, X)
    loss = lambda params: total(model.apply(params, X))  # noqa: E731

    def under(rules):
        def run(params):
            with linen.intercept_methods(coded_linen.interceptor(rules)):
                return total(model.apply(params, X))

        return run

    functions = loss, under(Exact()), under(Q8)
    run = jax.jit(lambda params: [jax.value_and_grad(f)(params) for f in functions])
    plain, (value, gradient), (_, got) = run(params)
    assert_same(value, plain[0])
    assert relative_error(gradient, plain[1]) < 1e-5
    assert 1e-5 < relative_error(got, plain[1]) < 0.02
    table = str(actjax.explain(under({"query|last": Q8}), params))
    assert "linear: attention/query" in table
    assert "linear: attention/key" not in table


def test_layers_of_linen_take_a_codec():
    for own, plain, x in (
        (coded_linen.Dense(8, codec=Q8), linen.Dense(8), X),
        (coded_linen.DenseGeneral((4, 2), codec=Q8), linen.DenseGeneral((4, 2)), X),
        (coded_linen.Conv(4, (3, 3), codec=Q8), linen.Conv(4, (3, 3)), IMAGE),
        (
            coded_linen.Einsum((4, 32, 2), "...d,ndh->n...h", codec=Q8),
            linen.Einsum((4, 32, 2), "...d,ndh->n...h"),
            X,
        ),
        (
            coded_linen.MultiHeadDotProductAttention(4, codec=Q8),
            linen.MultiHeadDotProductAttention(4),
            X,
        ),
        (coded_linen.LayerNorm(codec=Q8), linen.LayerNorm(), X),
        (coded_linen.RMSNorm(), linen.RMSNorm(), X),
    ):
        params = jax.jit(plain.init)(KEY, x)
        of_own = jax.eval_shape(own.init, KEY, x)
        assert jax.tree.structure(of_own) == jax.tree.structure(params)
        losses = [lambda p, m=m, x=x: total(m.apply(p, x)) for m in (own, plain)]
        results = jax.jit(lambda p, fs=losses: [jax.value_and_grad(f)(p) for f in fs])(params)
        assert_same(results[0][0], results[1][0])
        assert relative_error(results[0][1], results[1][1]) < 0.02


@pytest.mark.parametrize(
    ("spec", "x_shape", "w_shape", "is_linear"),
    [
        ("BTD,NDH->BTNH", (2, 3, 16), (4, 16, 2), True),
        ("BTNH,NHD->BTD", (2, 3, 4, 8), (4, 8, 5), True),
        ("dbt , df -> ftb", (16, 2, 3), (16, 5), True),
        ("...d,df->...f", (16,), (16, 5), True),
        ("bd,bdf->bf", (3, 16), (3, 16, 5), False),
        ("btd,df->bf", (2, 3, 16), (16, 5), False),
        ("bd,df->bdf", (3, 16), (16, 5), False),
    ],
)
def test_an_einsum_stores_codes_where_it_is_a_linear_layer(spec, x_shape, w_shape, is_linear):
    x, w = normal(1, *x_shape), normal(2, *w_shape)
    own = functools.partial(products.einsum, spec, codec=Q8, key=None, name="mine")
    functions = own, functools.partial(jnp.einsum, spec)

    @jax.jit
    def run(x, w):
        gradients = [
            jax.grad(lambda x, w, f=f: total(f(x, w)), argnums=(0, 1))(x, w) for f in functions
        ]
        return [f(x, w) for f in functions], gradients

    values, (got, exact) = run(x, w)
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[0], exact[0], rtol=1e-5, atol=1e-5)
    assert (relative_error(got[1], exact[1]) > 1e-5) == is_linear


def test_a_product_that_a_user_gave_is_never_replaced():
    def doubled(x, w, *args, **kwargs):
        return 2 * jax.lax.dot_general(x, w, *args, **kwargs)

    model = nnx.Linear(32, 8, dot_general=doubled, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="fit no layer of the model"):
        replace(model, Q8)
    layer = linen.Dense(8, dot_general=doubled)
    params = jax.jit(layer.init)(KEY, X)
    with linen.intercept_methods(coded_linen.interceptor(Q8)):
        assert_same(layer.apply(params, X), 2 * linen.Dense(8).apply(params, X))
    with pytest.raises(ValueError, match=r"`dot_general` of a layer of actjax\.flax"):
        coded_nnx.Linear(32, 8, dot_general=doubled, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"`dot_general` of a layer of actjax\.flax"):
        coded_linen.Dense(8, dot_general=doubled).apply(params, X)


def test_wrong_arguments_are_refused():
    model = block()
    with pytest.raises(TypeError, match=r"`rules` of replace must be an actjax\.Codec.*got 3"):
        replace(model, 3)
    with pytest.raises(TypeError, match=r"use linen\.intercept_methods"):
        replace(LinenBlock(), Q8)
    with pytest.raises(TypeError, match=r"must be a flax\.nnx.Module, got 3"):
        replace(3, Q8)
    with pytest.raises(ValueError, match="fit no layer of the model"):
        replace(model, {"nothing": Q8})
    with pytest.raises(ValueError, match="pass `rngs` with a stream `codes`"):
        replace(model, RandomProjection(4))
    with pytest.raises(TypeError, match="`rules` returned 4 for"):
        replace(model, lambda path, layer: 4)
