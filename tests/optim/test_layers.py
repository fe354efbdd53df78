"""Parameters split into layers and the rest, and merged again."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax.optim.layers as layers_module
from actjax import LowRank
from actjax.optim.layers import (
    count_layers,
    densify,
    layers_of,
    merge,
    put,
    split,
    split_gradient,
    take,
)
from actjax.optim.stepping.square_norm import square_norm


class Params(NamedTuple):
    embedding: jax.Array
    layers: dict
    bias: None = None


def params(count: int = 3) -> Params:
    stack = np.arange(count * 4.0, dtype="float32").reshape(count, 2, 2)
    layers = {"w": stack, "b": np.ones((count, 2), "float32"), "absent": None}
    return Params(np.full((5, 2), 7.0, "float32"), layers)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_split_holds_each_array_once_and_is_inverted_by_merge():
    stacked, rest = split(params(), layers_of)
    assert stacked.embedding is None
    assert rest.layers == {"w": None, "b": None, "absent": None}
    assert_same(merge(stacked, rest, params()), params())
    assert_same(split_gradient(params(), params(), layers_of), (stacked, rest))


@pytest.mark.parametrize("count", [1, 3])
def test_put_replaces_the_layer_that_take_returns_and_no_other(count):
    stacks = params(count).layers

    @jax.jit
    def run(stacks, i):
        layer = jax.tree.map(lambda x: x - 100, take(stacks, i))
        changed = put(stacks, layer, i)
        return layer, [take(changed, j) for j in range(count)]

    for i in range(count):
        layer, taken = run(stacks, i)
        for j in range(count):
            expected = jax.tree.map(lambda x, j=j: np.asarray(x)[j], stacks)
            assert_same(taken[j], layer if j == i else expected)
            assert_same(layer, jax.tree.map(lambda x, i=i: np.asarray(x)[i] - 100, stacks))


def test_an_array_in_two_places_is_sliced_once():
    stack = jnp.ones((3, 2))
    a, b = take((stack, stack), 1)
    assert a is b


def test_programs_do_not_depend_on_addresses(monkeypatch):
    stacks = [jnp.zeros((2, n)) for n in range(1, 9)]
    first = jax.make_jaxpr(lambda *x: take(x, 1))(*stacks)
    monkeypatch.setattr(layers_module, "id", lambda x: -id(x), raising=False)
    assert str(jax.make_jaxpr(lambda *x: take(x, 1))(*stacks)) == str(first)


def test_put_converts_to_the_dtype_of_the_stack():
    stack = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    layer = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert jax.eval_shape(lambda x, y: put(x, y, 0), stack, layer).dtype == jnp.bfloat16


def norm(tree):
    return jnp.sum(square_norm(tree))


def test_factors_are_multiplied_out_and_norms_are_in_float32():
    factors = LowRank(np.full((4, 1), 3.0, "float32"), np.full((1, 2), 2.0, "float32"))

    @jax.jit
    def dense_and_norms(gradient):
        dense = densify(gradient)
        return dense, norm(dense | {"w": dense["w"].astype(jnp.bfloat16)}), norm({})

    dense, got, nothing = dense_and_norms({"w": factors, "b": np.ones(2, "float32")})
    np.testing.assert_array_equal(dense["w"], np.full((4, 2), 6.0))
    assert got.dtype == jnp.float32
    assert got == 8 * 36 + 2
    assert nothing == 0


def test_layers_are_an_attribute_or_an_entry():
    assert layers_of({"layers": 1, "norm": 2}) == 1
    assert layers_of(types.MappingProxyType({"layers": [1, 2]})) == [1, 2]
    assert count_layers(layers_of(params(4))) == 4


def test_the_norm_of_a_large_matrix_is_that_of_every_sixteenth_row():
    x = np.random.default_rng(0).normal(size=(2, 1040, 3)).astype("float32")
    got, odd = jax.jit(lambda x: (norm(x), norm(x[:, :1030])))(x)
    np.testing.assert_allclose(got, 16 * np.sum(x[:, ::16] ** 2), rtol=1e-5)
    # Rows that sixteen does not divide are all read.
    np.testing.assert_allclose(odd, np.sum(x[:, :1030] ** 2), rtol=1e-5)
