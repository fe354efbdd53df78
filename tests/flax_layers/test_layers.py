"""Tests of `actjax.flax`: exact layers are those of Flax, and coded ones store codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from messages import assert_messages
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


@functools.cache
def block():
    return nnx.jit(lambda: Block(nnx.Rngs(0)))()


def total(tree):
    return sum(jnp.sum(jnp.sin(1.3 * y)) for y in jax.tree.leaves(tree))


@nnx.jit
def values_and_gradients(models, x):
    return [nnx.value_and_grad(lambda model: total(model(x)))(model) for model in models]


def assert_same(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(np.max(np.abs(y)) + 1e-9))


def test_a_replaced_model_of_nnx_has_the_same_gradient_and_stores_less():
    model = block()
    exact, small = replace(model, Exact()), replace(model, Q8)
    assert type(small.up) is coded_nnx.Linear
    assert type(small.attention.query) is coded_nnx.LinearGeneral
    assert type(small.norm) is coded_nnx.LayerNorm
    assert type(small.attention) is coded_nnx.StoredHeads
    assert type(model.up) is nnx.Linear
    results = values_and_gradients([exact, model, small], X)
    (value, got), (plain, gradient), (_, of_small) = results
    assert_same(value, plain)
    # Gradients of the biases of keys are zero but for rounding.
    assert relative_error(got, gradient) < 1e-5
    assert 1e-5 < relative_error(of_small, gradient) < 0.02
    graph, state = nnx.split(small)
    explanation = actjax.explain(lambda state, x: total(nnx.merge(graph, state)(x)), state, X)
    stored = {f"{r.operator}: {r.name}" for r in explanation.residuals}
    assert {"linear: up", "linear: attention/query", "rms_norm: root"} <= stored
    assert {"checkpoint: attention 0", "checkpoint: attention 2"} <= stored


class Picture(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(6, 8, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.cell = nnx.GRUCell(8, 8, rngs=rngs)
        self.places = nnx.Embed(8, 8, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.norm(self.conv(x))) + self.places(jnp.arange(8))
        return self.cell(jnp.zeros(8), y.mean((1, 2)))[1]


def test_norms_of_groups_and_cells_are_replaced_and_the_rest_is_listed(capsys):
    model = nnx.jit(lambda: Picture(nnx.Rngs(0)))()
    exact, small = replace(model, Exact()), replace(model, Quantized(8, group=8))
    line = "replace: 4 layers store codes; left alone: 1 Embed (places)\n"
    assert capsys.readouterr().out == 2 * line
    assert type(small.norm) is coded_nnx.GroupNorm
    (value, got), (plain, gradient), (_, of_small) = values_and_gradients(
        [exact, model, small], IMAGE
    )
    assert_same(value, plain)
    assert relative_error(got, gradient) < 1e-5
    assert 1e-5 < relative_error(of_small, gradient) < 0.02


def test_attention_takes_any_codec_by_its_path():
    model = block()
    rngs = nnx.Rngs(codes=3)
    drawn = replace(model, {"attention$": Quantized(8, group=8, rounding="stochastic")}, rngs=rngs)
    assert type(drawn.attention.query) is nnx.LinearGeneral
    results = values_and_gradients([drawn, model], X)
    assert 1e-5 < relative_error(results[0][1], results[1][1]) < 0.05


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
    linear = nnx.jit(lambda: nnx.List([nnx.Linear(32, 64, rngs=nnx.Rngs(0))]))()
    model = replace(linear, RandomProjection(4), rngs=nnx.Rngs(codes=3))

    @nnx.jit
    def gradient(model, x):
        return nnx.grad(lambda model: total(model[0](x)))(model)[0]["kernel"][...]

    assert not np.array_equal(gradient(model, X), gradient(model, X))
    graph, params, others = nnx.split(model, nnx.Param, ...)
    run = lambda params: total(nnx.merge(graph, params, others, copy=True)[0](X))  # noqa: E731
    gradients = jax.eval_shape(actjax.value_and_grad(run), params)[1]
    kernel = gradients[0]["kernel"].get_value()
    assert isinstance(kernel, actjax.LowRank)
    assert kernel.rank == 4


ATTENTION = {"num_heads": 4, "in_features": 32, "decode": False}
NNX_LAYERS = {
    "Linear": ((32, 8), {}, X),
    "Conv": ((6, 4, (3, 3)), {"strides": 2}, IMAGE),
    "Einsum": (("...d,ndh->n...h", (4, 32, 2), (4, 2)), {}, X),
    "MultiHeadAttention": ((), ATTENTION, X),
}


def test_layers_of_nnx_take_a_codec():
    @jax.jit
    def run():
        results = []
        for name, (arguments, options, x) in NNX_LAYERS.items():
            rngs = nnx.Rngs(0, codes=1)
            coded = getattr(coded_nnx, name)(*arguments, **options, codec=Q8, rngs=rngs)
            plain = getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
            nnx.update(coded, nnx.state(plain, nnx.Param))
            for layer in (coded, plain):
                loss = lambda layer, x=x: total(layer(x))  # noqa: E731
                value, gradient = nnx.value_and_grad(loss)(layer)
                results.append((value, nnx.to_pure_dict(nnx.state(gradient, nnx.Param))))
        return results

    results = run()
    for (value, got), (exact, gradient) in zip(results[::2], results[1::2], strict=True):
        assert_same(value, exact)
        assert 0 < relative_error(got, gradient) < 0.02


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


LINEN_LAYERS = {
    "Dense": ((8,), X),
    "DenseGeneral": (((4, 2),), X),
    "Conv": ((4, (3, 3)), IMAGE),
    "Einsum": (((4, 32, 2), "...d,ndh->n...h"), X),
    "MultiHeadDotProductAttention": ((4,), X),
    "LayerNorm": ((), X),
    "RMSNorm": ((), X),
}


def test_layers_of_linen_take_a_codec():
    layers = {}
    for name, (arguments, x) in LINEN_LAYERS.items():
        layers[name] = (
            x,
            getattr(coded_linen, name)(*arguments, codec=Q8),
            getattr(linen, name)(*arguments),
        )

    assert coded_linen.RMSNorm().codec == Exact()

    @jax.jit
    def run():
        results = {}
        for name, (x, coded, plain) in layers.items():
            params = plain.init(KEY, x)
            of_coded = jax.eval_shape(coded.init, KEY, x)
            assert jax.tree.structure(of_coded) == jax.tree.structure(params)
            losses = [lambda p, m=m, x=x: total(m.apply(p, x)) for m in (coded, plain)]
            results[name] = [jax.value_and_grad(loss)(params) for loss in losses]
        return results

    for (value, got), (exact, gradient) in run().values():
        assert_same(value, exact)
        assert 0 < relative_error(got, gradient) < 0.02


SPECS = {
    "BTD,NDH->BTNH": ((2, 3, 16), (4, 16, 2), True),
    "BTNH,NHD->BTD": ((2, 3, 4, 8), (4, 8, 5), True),
    "dbt , df -> ftb": ((16, 2, 3), (16, 5), True),
    "...d,df->...f": ((16,), (16, 5), True),
    "bd,bdf->bf": ((3, 16), (3, 16, 5), False),
    "btd,df->bf": ((2, 3, 16), (16, 5), False),
    "bd,df->bdf": ((3, 16), (16, 5), False),
}
"""Shapes of both arguments, and whether the einsum is a linear layer."""


def test_an_einsum_stores_codes_where_it_is_a_linear_layer():
    arrays = {spec: (normal(1, *x), normal(2, *w)) for spec, (x, w, _) in SPECS.items()}

    @jax.jit
    def run(arrays):
        results = {}
        for spec, args in arrays.items():
            coded = functools.partial(products.einsum, spec, codec=Q8, key=None, name="mine")
            results[spec] = []
            for fun in (coded, functools.partial(jnp.einsum, spec)):
                y, pullback = jax.vjp(fun, *args)
                results[spec].append((y, *pullback(jnp.cos(y))))
        return results

    for spec, ((y, dx, dw), (want_y, want_dx, want_dw)) in run(arrays).items():
        np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-5, err_msg=spec)
        np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5, err_msg=spec)
        assert (relative_error(dw, want_dw) > 1e-5) == SPECS[spec][2], spec


def doubled(x, w, *args, **kwargs):
    return 2 * jax.lax.dot_general(x, w, *args, **kwargs)


def test_a_product_that_a_user_gave_is_never_replaced():
    layer = linen.Dense(8, dot_general=doubled)

    @jax.jit
    def run():
        params = layer.init(KEY, X)
        with linen.intercept_methods(coded_linen.interceptor(Q8)):
            return layer.apply(params, X), linen.Dense(8).apply(params, X)

    twice, once = run()
    assert_same(twice, 2 * once)


def test_wrong_arguments_are_refused():
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    users = nnx.eval_shape(lambda: nnx.Linear(32, 8, dot_general=doubled, rngs=nnx.Rngs(0)))
    own_product = "`dot_general` of a layer of actjax.flax"
    with pytest.raises(TypeError, match=r"`rules` of replace must be an actjax\.Codec.*got 3"):
        replace(model, 3)
    assert_messages(TypeError, [
        (lambda: replace(LinenBlock(), Q8), "use linen.intercept_methods"),
        (lambda: replace(3, Q8), "must be a flax.nnx.Module, got 3"),
        (lambda: replace(model, lambda path, layer: 4), "`rules` returned 4 for"),
    ])  # fmt: skip
    assert_messages(ValueError, [
        (lambda: replace(model, {"nothing": Q8}), "fit no layer of the model"),
        (lambda: replace(users, Q8), "fit no layer of the model"),
        (lambda: replace(model, RandomProjection(4)), "pass `rngs` with a stream `codes`"),
        (lambda: coded_nnx.Linear(32, 8, dot_general=doubled, rngs=nnx.Rngs(0)), own_product),
        (lambda: coded_linen.Dense(8, dot_general=doubled).init(KEY, X), own_product),
    ])  # fmt: skip
