"""Tests that nothing with the shape of a weight is computed for a factored gradient."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import CODECS
from cheap_codecs import Projected
from factored.gradient_helpers import KEY, RP, normal, project, total
from jax.extend import core

import actjax
from actjax import Exact
from actjax.codecs.base import FactoredCodec

FACTORED = {name: codec for name, codec in CODECS.items() if isinstance(codec, FactoredCodec)}


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields all equations of a program, including those in bodies of loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                body = getattr(body, "jaxpr", body)
                if isinstance(body, core.Jaxpr):
                    yield from equations(body)


def shape_of(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def made(fun, shape, *args) -> list[str]:
    """Returns the primitives whose outputs have `shape` as their last axes."""
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    shapes = [(eqn.primitive.name, shape_of(var)) for eqn in eqns for var in eqn.outvars]
    return [name for name, made in shapes if made[-2:] == shape and name != "name"]


LAYERS, FEATURES, OUTPUTS = 5, 11, 13


def square_layers(ws, x, codec, layers=LAYERS):
    """Runs layers that keep the shape of x, with weights of shape [FEATURES, OUTPUTS]."""

    def layer(x, slices):
        w, key = slices
        return x + jnp.tanh(project(x, w, codec, key)).sum(-1, keepdims=True), None

    return total(jax.lax.scan(layer, x, (ws, jax.random.split(KEY, layers)))[0])


@pytest.mark.parametrize("codec", FACTORED.values(), ids=FACTORED)
def test_no_array_with_the_shape_of_the_weight_is_computed(codec):
    ws, x = normal(0, LAYERS, FEATURES, OUTPUTS), normal(1, 2, 7, FEATURES)
    fun, shape = functools.partial(square_layers, codec=codec), (FEATURES, OUTPUTS)
    assert made(actjax.value_and_grad(fun), shape, ws, x) == []
    dense = made(jax.value_and_grad(fun), shape, ws, x)
    assert dense.count("dot_general") == 1
    basis = normal(2, LAYERS, FEATURES, 3)
    assert made(actjax.value_and_grad(fun, bases={"": basis}), shape, ws, x) == []


def test_no_product_over_tokens_has_the_shape_of_the_weight():
    ws, x = normal(0, LAYERS, FEATURES, OUTPUTS), normal(1, 2, 7, FEATURES)

    def over_tokens(value_and_grad, codec):
        jaxpr = jax.make_jaxpr(value_and_grad(functools.partial(square_layers, codec=codec)))(ws, x)
        found = []
        for eqn in equations(jaxpr.jaxpr):
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                if [shape_of(eqn.invars[0])[i] for i in contracted] == [2, 7]:
                    found.append(shape_of(eqn.outvars[0]))
        return found

    assert over_tokens(actjax.value_and_grad, RP) == [(3, OUTPUTS)]
    assert over_tokens(jax.value_and_grad, Exact()) == [(FEATURES, OUTPUTS)]


@pytest.mark.parametrize("given", [False, True], ids=["without a basis", "in a basis"])
def test_the_compiled_program_has_no_room_for_a_dense_gradient(given):
    codec, layers, features, outputs = Projected(4), 8, 128, 512
    ws = jax.ShapeDtypeStruct((layers, features, outputs), jnp.float32)
    x = jax.ShapeDtypeStruct((32, features), jnp.float32)
    basis = jnp.ones((layers, features, 4))
    fun = functools.partial(square_layers, codec=codec, layers=layers)

    def temporary(value_and_grad) -> int:
        def run(ws, x):
            value, gradient = value_and_grad(ws, x)
            # The gradient is consumed, as by an optimizer, so it is not an output.
            return value, actjax.global_norm(gradient)

        compiled = jax.jit(run).lower(ws, x).compile()
        analysis: Any = compiled.memory_analysis()
        return analysis.temp_size_in_bytes

    mine = actjax.value_and_grad(fun, bases={"": basis} if given else None)
    dense_bytes = 4 * layers * features * outputs
    assert temporary(jax.value_and_grad(fun)) - temporary(mine) >= 0.9 * dense_bytes
