"""Tests that nothing with the shape of a weight is computed for a factored gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS
from cheap_codecs import Projected
from factored.gradient_helpers import KEY, RP, project, total
from jaxprs import equations
from ops.helpers import compiled_temporaries, shaped

import actjax
from actjax import Exact
from actjax.codecs.base import FactoredCodec

FACTORED = {name: codec for name, codec in CODECS.items() if isinstance(codec, FactoredCodec)}


def made(fun, shape, *args) -> list[str]:
    """Returns the primitives whose outputs have `shape` as their last axes."""
    eqns = equations(jax.make_jaxpr(fun)(*args))
    shapes = [(eqn.primitive.name, var.aval.shape) for eqn in eqns for var in eqn.outvars]
    return [name for name, made in shapes if made[-2:] == shape and name != "name"]


LAYERS, FEATURES, OUTPUTS = 5, 11, 13


def square_layers(ws, x, codec, layers=LAYERS):
    """Runs layers that keep the shape of x, with weights of shape [FEATURES, OUTPUTS]."""

    def layer(x, slices):
        w, key = slices
        return x + jnp.tanh(project(x, w, codec, key)).sum(-1, keepdims=True), None

    return total(jax.lax.scan(layer, x, (ws, jax.random.split(KEY, layers)))[0])


WS, X = np.ones((LAYERS, FEATURES, OUTPUTS), np.float32), np.ones((2, 7, FEATURES), np.float32)


@pytest.mark.parametrize("codec", FACTORED.values(), ids=FACTORED)
def test_no_array_with_the_shape_of_the_weight_is_computed(codec):
    fun = functools.partial(square_layers, codec=codec)
    assert made(actjax.value_and_grad(fun), (FEATURES, OUTPUTS), WS, X) == []


def test_no_array_with_the_shape_of_a_weight_in_a_basis_is_computed():
    fun = functools.partial(square_layers, codec=RP)
    dense = made(jax.value_and_grad(fun), (FEATURES, OUTPUTS), WS, X)
    assert dense.count("dot_general") == 1
    bases = {"": np.ones((LAYERS, FEATURES, 3), np.float32)}
    assert made(actjax.value_and_grad(fun, bases=bases), (FEATURES, OUTPUTS), WS, X) == []


def test_no_product_over_tokens_has_the_shape_of_the_weight():
    def over_tokens(value_and_grad, codec):
        jaxpr = jax.make_jaxpr(value_and_grad(functools.partial(square_layers, codec=codec)))(WS, X)
        shapes = []
        for eqn in equations(jaxpr):
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                if [eqn.invars[0].aval.shape[i] for i in contracted] == [2, 7]:
                    shapes.append(eqn.outvars[0].aval.shape)
        return shapes

    assert over_tokens(actjax.value_and_grad, RP) == [(3, OUTPUTS)]
    assert over_tokens(jax.value_and_grad, Exact()) == [(FEATURES, OUTPUTS)]


def test_the_compiled_program_has_no_room_for_a_dense_gradient():
    codec, layers, features, outputs = Projected(4), 8, 128, 512
    shapes = shaped(layers, features, outputs), shaped(32, features)
    bases = {"": np.ones((layers, features, 4), np.float32)}
    fun = functools.partial(square_layers, codec=codec, layers=layers)

    def temporary(value_and_grad) -> int:
        def run(ws, x):
            value, gradient = value_and_grad(ws, x)
            # The gradient is consumed, as by an optimizer, so it is not an output.
            return value, actjax.global_norm(gradient)

        return compiled_temporaries(run, *shapes)

    dense = temporary(jax.value_and_grad(fun))
    for in_factors in (actjax.value_and_grad(fun), actjax.value_and_grad(fun, bases=bases)):
        assert dense - temporary(in_factors) >= 0.9 * 4 * layers * features * outputs
