"""Tests of `actjax.equinox`: exact layers are those of Equinox, and coded ones store codes."""

import functools
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from messages import assert_messages
from residuals.residual_helpers import KEY, normal, relative_error

import actjax
from actjax import Exact, Quantized, RandomizedSVD
from actjax import equinox as coded
from actjax._core.tokenwise import tokenwise

X = normal(0, 3, 16, 32)
Q8 = Quantized(8, group=32)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    root: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP
    score: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm, self.root = eqx.nn.LayerNorm(32), eqx.nn.RMSNorm(32)
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[0])
        self.mlp = eqx.nn.MLP(32, 32, 64, 1, jnp.tanh, key=keys[1])
        self.score = eqx.nn.Linear(32, "scalar", key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(self.mlp)(jax.vmap(self.root)(x))
        return jax.vmap(self.score)(x)


MODEL = eqx.filter_jit(Block)(jax.random.key(0))


def stack_of(count, width):
    """Returns a stack of linear layers, made by one program."""
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(width, width, key=key))
    return eqx.filter_jit(lambda: make(jax.random.split(KEY, count)))()


def loss(model, x):
    return jnp.mean(jnp.sin(3 * jax.vmap(model)(x)))


@eqx.filter_jit
@eqx.filter_grad
def gradient(model, x=X):
    """Returns the gradient in the floats of a model."""
    return loss(model, x)


def assert_same(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(np.max(np.abs(y)) + 1e-9))


def test_a_replaced_model_has_the_same_gradient_and_stores_less():
    exact, small = coded.replace(MODEL, Exact()), coded.replace(MODEL, Q8)
    assert type(exact.attention.query_proj) is coded.Linear
    assert type(exact.mlp.layers[1]) is coded.Linear
    assert type(exact.norm) is coded.LayerNorm
    assert type(exact.root) is coded.RMSNorm
    assert exact.mlp.layers[1].code_name == "mlp/layers/1"
    # The same leaves, so a checkpoint of one is that of the other.
    files = io.BytesIO(), io.BytesIO()
    for file, model in zip(files, (MODEL, small), strict=True):
        eqx.tree_serialise_leaves(file, model)
    assert files[0].getvalue() == files[1].getvalue()
    want = gradient(MODEL)
    assert_same(gradient(exact), want)
    values = eqx.filter_jit(lambda *models: [loss(model, X) for model in models])
    assert_same(*values(small, MODEL))
    assert 0 < relative_error(gradient(small), want) < 0.02
    rows = [r.codec for r in actjax.explain(loss, small, X).residuals]
    # The three projections of attention and the two of the perceptron, `out_proj` and the score.
    assert rows.count(repr(Q8)) == 7


def test_all_tokens_are_one_product():
    layer = coded.replace(MODEL.attention, {"query": Q8}).query_proj
    floats, static = eqx.partition(layer, eqx.is_inexact_array)
    grad = jax.grad(lambda w: jnp.sum(jax.vmap(jax.vmap(eqx.combine(w, static)))(X) ** 2))
    # The input, and nothing of the size of a gradient for each token.
    sizes = [x.aval.size for e in equations(jax.make_jaxpr(grad)(floats)) for x in e.outvars]
    assert max(sizes) <= X.size < X[..., 0].size * 32 * 32

    def flops(model):
        floats, static = eqx.partition(model, eqx.is_inexact_array)
        grad = jax.grad(lambda floats, x: loss(eqx.combine(floats, static), x))
        return jax.jit(grad).lower(floats, X).compile().cost_analysis()["flops"]

    assert flops(coded.replace(MODEL, Exact())) <= 1.01 * flops(MODEL)


def test_a_weight_has_the_gradient_at_the_decoded_tokens():
    codecs, dz = (Quantized(2, group=8), RandomizedSVD(4)), normal(1, 3, 16, 8)

    @jax.jit
    def run(x):
        results = []
        for codec in codecs:
            layer = coded.Linear(32, 8, codec=codec, codes=KEY, key=jax.random.key(1))
            value = lambda layer: jnp.sum(jax.vmap(jax.vmap(layer))(x) * dz)  # noqa: E731
            got = eqx.filter_grad(value)(layer)
            tokens = codec.decode(codec.encode(x, KEY if codec.needs_key else None))
            results.append((got.weight, got.bias, tokens))
        return results

    wide = np.asarray(dz, np.float64).reshape(48, 8)
    for weight, bias, tokens in run(X):
        want = wide.T @ np.asarray(tokens, np.float64).reshape(48, 32)
        np.testing.assert_allclose(weight, want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(bias, wide.sum(0), rtol=1e-5, atol=1e-4)


def test_gradients_of_examples_and_models_of_an_ensemble():
    floats, static = eqx.partition(coded.replace(MODEL, Q8), eqx.is_inexact_array)

    def loss_of_example(floats, x):
        return loss(eqx.combine(floats, static), x[None])

    over_examples = jax.jit(jax.vmap(jax.grad(loss_of_example), (None, 0)))
    each = over_examples(floats, X)
    # Groups are of a token, so a code of three examples is that of each.
    assert_same(jax.tree.map(lambda g: g.mean(0), each), gradient(eqx.combine(floats, static)))
    larger = jax.tree.map(lambda w: np.asarray(w) * np.float32(1.5), floats)
    two = jax.tree.map(lambda *w: np.stack(w), floats, larger)
    got = jax.jit(jax.vmap(jax.grad(loss_of_example), (0, None)))(two, X[0])
    wants = [
        jax.tree.map(lambda g: g[0], gradients) for gradients in (each, over_examples(larger, X))
    ]
    assert_same(got, jax.tree.map(lambda *g: np.stack(g), *wants))


def test_under_scan_checkpoint_and_a_mesh():
    layers = stack_of(3, 32)

    def run(layers, x):
        floats, static = eqx.partition(layers, eqx.is_array)

        def body(x, layer):
            return jnp.tanh(jax.vmap(jax.vmap(eqx.combine(layer, static)))(x)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, floats)[0] ** 2)

    grad = eqx.filter_jit(eqx.filter_grad(run))
    exact = coded.replace(layers, {"": Exact()})
    want = grad(layers, X)
    assert_same(grad(exact, X), want)
    # A stack of layers has a key for each.
    drawing = coded.replace(exact, {"": Quantized(8, rounding="stochastic")}, key=KEY)
    assert drawing.codes.shape == (3,)
    assert 0 < relative_error(grad(drawing, X), want) < 0.02
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((3,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
            assert_same(grad(exact, placed), want)


def test_a_scanned_stack_stores_no_weight():
    layers = stack_of(8, 64)

    def memory(layers):
        floats, static = eqx.partition(layers, eqx.is_inexact_array)

        def run(floats):
            def body(x, layer):
                return jnp.tanh(jax.vmap(eqx.combine(layer, static))(x)), None

            return jnp.sum(jax.lax.scan(body, normal(0, 32, 64), floats)[0] ** 2)

        return jax.jit(jax.grad(run)).lower(floats).compile().memory_analysis().temp_size_in_bytes

    plain, exact, small = map(
        memory, (layers, coded.replace(layers, Exact()), coded.replace(layers, Quantized(4)))
    )
    # JAX stores the input of a layer, which is the output of `tanh` before it, once.
    assert exact <= plain + 8 * 32 * 64 * 4 + 1024
    assert small < exact - 0.8 * 8 * 32 * 64 * 4


def test_each_step_has_its_keys():
    rules = {"(query|key)_proj$": RandomizedSVD(4)}
    with pytest.raises(ValueError, match="`key` of replace is None, and the codec Randomized"):
        coded.replace(MODEL, rules)
    model = coded.replace(MODEL, rules, key=jax.random.key(1))
    again = coded.with_keys(model, jax.random.key(1))
    other = coded.with_keys(model, jax.random.key(2))
    assert type(model.attention.value_proj) is eqx.nn.Linear
    assert not jnp.array_equal(
        jax.random.key_data(model.attention.query_proj.codes),
        jax.random.key_data(model.attention.key_proj.codes),
    )
    first = gradient(model)
    assert_same(gradient(again), first)
    assert relative_error(gradient(other), first) > 1e-4


def test_layers_in_bfloat16_and_norms_over_several_axes():
    x = np.asarray(X[0]).astype("bfloat16")
    norms = (coded.LayerNorm, eqx.nn.LayerNorm), (coded.RMSNorm, eqx.nn.RMSNorm)
    free = {"use_weight": False, "use_bias": False}

    @jax.jit
    def run(x, wide):
        linears = coded.Linear(32, 8, codec=Exact(), key=KEY), eqx.nn.Linear(32, 8, key=KEY)
        of_norms = [
            [(norm((16, 32))(wide), jax.vmap(norm(32, **free))(x)) for norm in pair]
            for pair in norms
        ]
        return [jax.vmap(layer)(x) for layer in linears], of_norms

    (got, want), of_norms = run(x, X[0])
    assert got.dtype == want.dtype == jnp.float32
    assert_same(got, want)
    for (over_axes, free_got), (want_over_axes, free_want) in of_norms:
        assert_same(over_axes, want_over_axes)
        assert free_got.dtype == jnp.bfloat16
        assert_same(free_got, free_want, rtol=2**-7)


def test_wrong_arguments():
    make = functools.partial(eqx.filter_eval_shape, coded.Linear, 32, 8)
    layer = eqx.filter_jit(coded.Linear)(32, 8, codec=RandomizedSVD(4), key=KEY)
    assert_messages(TypeError, [
        (lambda: make(codec=4, key=KEY), "`codec` of a layer must be an actjax.Codec, got 4"),
        (lambda: coded.replace(MODEL, 4), "`rules` of replace must be an actjax.Codec"),
        (lambda: coded.with_keys(layer, 3),
         "`key` of with_keys must be a key of jax.random, got 3"),
    ])  # fmt: skip
    assert_messages(ValueError, [
        (lambda: coded.replace(MODEL, {"no such layer": Q8}),
         "fit no layer of the model that is equinox.nn.Linear"),
        (lambda: layer(X[0, 0]), "key"),
        # For 32 tokens Equinox computes `weight @ x`, which is another product.
        (lambda: layer(np.ones((32, 32)), key=KEY), "must be one token, [32], got [32, 32]"),
        *((lambda norm=norm: norm(32)(X), "shape") for norm in (coded.LayerNorm, coded.RMSNorm)),
    ])  # fmt: skip
    # A key of the call comes first, as in layers with dropout.
    assert jax.eval_shape(lambda: layer(X[0, 0], key=KEY)).shape == (8,)


def test_a_shared_argument_may_be_mapped_alone():
    class Scaled:
        def __call__(self, x, /, scale):
            return x * scale

    scaled = Scaled()
    got = jax.jit(jax.vmap(lambda s: tokenwise(scaled, X, s)))(np.arange(3.0, dtype=np.float32))
    np.testing.assert_array_equal(got, X * np.arange(3.0).reshape(3, 1, 1, 1))
