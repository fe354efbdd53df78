"""Tests of `actjax.equinox`: exact layers are those of Equinox, and coded ones store codes."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (x.aval.size for x in eqn.outvars)
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
                if is_program(inner):
                    yield from sizes(getattr(inner, "jaxpr", inner))

    def is_program(x):
        return hasattr(getattr(x, "jaxpr", x), "eqns")

    layer = coded.Linear(32, 32, codec=Q8, key=KEY)
    floats, static = eqx.partition(layer, eqx.is_inexact_array)
    grad = jax.grad(lambda w: jnp.sum(jax.vmap(jax.vmap(eqx.combine(w, static)))(X) ** 2))
    # The input, and nothing of the size of a gradient for each token.
    assert max(sizes(jax.make_jaxpr(grad)(floats).jaxpr)) <= X.size < X[..., 0].size * 32 * 32

    def flops(model):
        floats, static = eqx.partition(model, eqx.is_inexact_array)
        grad = jax.grad(lambda floats, x: loss(eqx.combine(floats, static), x))
        return jax.jit(grad).lower(floats, X).compile().cost_analysis()["flops"]

    assert flops(coded.replace(MODEL, Exact())) <= 1.01 * flops(MODEL)


@pytest.mark.parametrize("codec", [Quantized(2, group=8), RandomizedSVD(4)], ids=str)
def test_a_weight_has_the_gradient_at_the_decoded_tokens(codec):
    layer = coded.Linear(32, 8, codec=codec, codes=KEY, key=jax.random.key(1))
    dz = normal(1, 3, 16, 8)

    def value(layer):
        return jnp.sum(jax.vmap(jax.vmap(layer))(X) * dz)

    got = eqx.filter_jit(eqx.filter_grad(value))(layer)
    key = KEY if codec.needs_key else None
    tokens = jax.jit(lambda x: codec.decode(codec.encode(x, key)))(X)
    tokens, dz = (np.asarray(y, np.float64).reshape(48, -1) for y in (tokens, dz))
    np.testing.assert_allclose(got.weight, dz.T @ tokens, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(got.bias, dz.sum(0), rtol=1e-5, atol=1e-4)


def test_gradients_of_examples_and_models_of_an_ensemble():
    floats, static = eqx.partition(coded.replace(MODEL, Q8), eqx.is_inexact_array)

    def one(floats, x):
        return loss(eqx.combine(floats, static), x[None])

    each = jax.jit(jax.vmap(jax.grad(one), (None, 0)))(floats, X)
    # Groups are of a token, so a code of three examples is that of each.
    assert_same(jax.tree.map(lambda g: g.mean(0), each), gradient(eqx.combine(floats, static)))
    two = jax.tree.map(lambda w: np.stack([w, 1.5 * w]), jax.tree.map(np.asarray, floats))
    got = jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.grad(one), (0, None)))(two, X[0]))
    gradient_of_one = jax.jit(jax.grad(one))
    for i in range(2):
        own, model = (jax.tree.map(lambda g, i=i: g[i], tree) for tree in (got, two))
        assert_same(own, gradient_of_one(model, X[0]))


def test_under_scan_checkpoint_and_a_mesh():
    layers = stack_of(3, 32)

    def run(layers, x):
        floats, static = eqx.partition(layers, eqx.is_array)

        def body(x, own):
            return jnp.tanh(jax.vmap(jax.vmap(eqx.combine(own, static)))(x)), None

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
            def body(x, own):
                return jnp.tanh(jax.vmap(eqx.combine(own, static))(x)), None

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
    layer = coded.Linear(32, 8, codec=Exact(), key=KEY)
    plain = eqx.nn.Linear(32, 8, key=KEY)
    x = X[0].astype("bfloat16")
    got, want = (jax.jit(jax.vmap(one))(x) for one in (layer, plain))
    assert got.dtype == want.dtype == jnp.float32
    assert_same(got, want)
    # Of 32 tokens Equinox computes `weight @ x`, which is something else.
    with pytest.raises(ValueError, match=r"must be one token, \[32\], got \[32, 32\]"):
        layer(jnp.ones((32, 32)))
    for twin, of_equinox in ((coded.LayerNorm, eqx.nn.LayerNorm), (coded.RMSNorm, eqx.nn.RMSNorm)):
        assert_same(*(eqx.filter_jit(norm((16, 32)))(X[0]) for norm in (twin, of_equinox)))
        free = {"use_weight": False, "use_bias": False}
        got, want = (jax.jit(jax.vmap(norm(32, **free)))(x) for norm in (twin, of_equinox))
        assert got.dtype == jnp.bfloat16
        assert_same(got, want, rtol=2**-7)
        with pytest.raises(ValueError, match=r"shape"):
            twin(32)(X)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"`codec` of a layer must be an actjax.Codec, got 4"):
        coded.Linear(4, 4, codec=4, key=KEY)
    with pytest.raises(ValueError, match=r"fit no layer of the model that is equinox.nn.Linear"):
        coded.replace(MODEL, {"no such layer": Q8})
    with pytest.raises(TypeError, match=r"`rules` of replace must be an actjax.Codec"):
        coded.replace(MODEL, 4)
    layer = coded.Linear(32, 8, codec=RandomizedSVD(4), key=KEY)
    with pytest.raises(ValueError, match="key"):
        layer(X[0, 0])
    # A key of the call comes first, as in layers with dropout.
    assert layer(X[0, 0], key=KEY).shape == (8,)
    with pytest.raises(TypeError, match=r"`key` of with_keys must be a key of jax.random, got 3"):
        coded.with_keys(layer, 3)


def test_what_is_shared_may_be_mapped_alone():
    class Scaled:
        def __call__(self, x, /, scale):
            return x * scale

    scaled = Scaled()
    got = jax.jit(jax.vmap(lambda s: tokenwise(scaled, X, s)))(np.arange(3.0, dtype=np.float32))
    np.testing.assert_array_equal(got, X * np.arange(3.0).reshape(3, 1, 1, 1))
