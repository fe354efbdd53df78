"""Tests of convolutions, group norms, cells and attention of Equinox that store codes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals.residual_helpers import KEY, held_bytes, normal, relative_error

from actjax import Exact, Quantized, RandomizedSVD
from actjax import equinox as coded

Q8 = Quantized(8, group=32)
KEYS = jax.random.split(KEY, 8)


class Image(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    last: eqx.nn.Conv2d
    scale: jax.Array

    def __init__(self):
        self.conv = eqx.nn.Conv2d(3, 8, 3, padding=1, key=KEYS[0])
        self.norm = eqx.nn.GroupNorm(2, 8)
        self.last = eqx.nn.Conv2d(8, 4, 3, stride=2, key=KEYS[1])
        self.scale = jnp.ones(4)

    def __call__(self, x):
        y = self.last(jax.nn.relu(self.norm(self.conv(x))))
        return jnp.mean(y, (1, 2)) * self.scale


class Recurrent(eqx.Module):
    gru: eqx.nn.GRUCell
    lstm: eqx.nn.LSTMCell

    def __init__(self):
        self.gru = eqx.nn.GRUCell(8, 32, key=KEYS[2])
        self.lstm = eqx.nn.LSTMCell(32, 32, key=KEYS[3])

    def __call__(self, x):
        def step(state, row):
            h, (c, d) = state
            h = self.gru(row, h)
            return (h, self.lstm(h, (c, d))), None

        zero = jnp.zeros(32)
        (_, (h, _)), _ = jax.lax.scan(step, (zero, (zero, zero)), x)
        return h


class Attention(eqx.Module):
    first: eqx.nn.MultiheadAttention
    second: eqx.nn.MultiheadAttention

    def __init__(self):
        self.first = eqx.nn.MultiheadAttention(4, 32, key=KEYS[4])
        self.second = eqx.nn.MultiheadAttention(2, 32, dropout_p=0.5, inference=True, key=KEYS[5])

    def __call__(self, x):
        causal = jnp.tri(len(x), dtype=bool)
        x = x + self.first(x, x, x, causal, process_heads=lambda q, k, v: (2 * q, k, v))
        return x + self.second(x, x[:8], x[:8], jnp.ones((2, len(x), 8), bool))


MODELS = {
    "image": (eqx.filter_jit(Image)(), normal(0, 4, 3, 16, 16)),
    "recurrent": (eqx.filter_jit(Recurrent)(), normal(1, 16, 12, 8)),
    "attention": (eqx.filter_jit(Attention)(), normal(2, 4, 64, 32)),
}


def loss(model, x):
    return jnp.mean(jnp.sin(3 * jax.vmap(model)(x)))


def held(model, x):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return held_bytes(lambda p: loss(eqx.combine(p, static), x), params)


@pytest.mark.parametrize("name", MODELS)
def test_exact_layers_are_those_of_equinox_and_codes_take_less(name):
    model, x = MODELS[name]
    exact, small = (coded.replace(model, c, verbose=False) for c in (Exact(), Q8))
    models = [eqx.filter_jit(eqx.filter_grad(loss))(m, x) for m in (model, exact, small)]
    want, got, lossy = (jax.tree.leaves(eqx.filter(m, eqx.is_inexact_array)) for m in models)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.max(np.abs(b))))
    assert max(relative_error(a, b) for a, b in zip(lossy, want, strict=True)) < 0.05
    assert held(small, x) < 0.6 * held(model, x)


def test_a_convolution_of_a_batch_has_one_gradient_at_the_decoded_input():
    layer, x = MODELS["image"][0].conv, MODELS["image"][1]
    codec = Quantized(4, group=16)
    small = coded.replace(layer, codec, verbose=False)
    decoded = codec.decode(codec.encode(x))
    got = eqx.filter_jit(eqx.filter_grad(loss))(small, x).weight
    # The cotangent is that of exact outputs.
    g = jax.grad(lambda y: jnp.mean(jnp.sin(3 * y)))(jax.vmap(layer)(x))
    at = lambda w: jax.vmap(eqx.tree_at(lambda m: m.weight, layer, w))(decoded)  # noqa: E731
    want = jax.vjp(at, layer.weight)[1](g)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_random_codecs_need_a_key_and_stacks_get_one_each():
    cells = eqx.filter_vmap(lambda key: eqx.nn.GRUCell(8, 8, key=key))(KEYS[:3])
    with pytest.raises(ValueError, match="`key` of replace is None"):
        coded.replace(cells, RandomizedSVD(2), verbose=False)
    made = coded.replace(cells, RandomizedSVD(2), key=KEY, verbose=False)
    assert made.codes.shape[:1] == (3,)


@pytest.mark.parametrize("path", ["", "first$", "proj$"])
def test_attention_and_its_projections_take_random_codecs(path):
    model, x = MODELS["attention"]
    codec = Quantized(8, group=8, rounding="stochastic")
    small = coded.replace(model, {path: codec} if path else codec, key=KEY, verbose=False)
    both = eqx.filter_jit(lambda *models: [eqx.filter_grad(loss)(m, x) for m in models])
    got, want = (eqx.filter(g, eqx.is_inexact_array) for g in both(small, model))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    assert 1e-5 < max(relative_error(a, b) for a, b in pairs) < 0.1


def test_a_stack_of_attention_has_a_key_for_each_layer():
    make = eqx.filter_vmap(lambda key: eqx.nn.MultiheadAttention(2, 8, key=key))
    codec = Quantized(8, group=4, rounding="stochastic")
    made = coded.replace(make(KEYS[:3]), {".*": codec}, key=KEY, verbose=False)
    assert made.codes.shape == made.query_proj.codes.shape == (3,)


def test_what_is_left_alone_is_listed(capsys):
    model = MODELS["image"][0]
    coded.replace(model, Q8)
    assert capsys.readouterr().out == (
        "replace: 3 layers store codes; left alone: 1 Image (the model itself)\n"
    )
    coded.replace(model, {"conv": Q8})
    assert "1 GroupNorm (norm), 1 Conv2d (last)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"Layers with parameters: 1 Embedding \(the model itself"):
        coded.replace(eqx.nn.Embedding(4, 4, key=KEY), Q8)


def test_attention_with_dropout_is_that_of_equinox():
    model, x = MODELS["attention"]
    small = coded.replace(model, Q8, verbose=False)

    @eqx.filter_jit
    def attend(layer, x):
        return [layer(x, x, x, key=KEY, inference=inference) for inference in (False, True)]

    for got, want in zip(attend(small.second, x[0]), attend(model.second, x[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
