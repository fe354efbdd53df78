"""Parameters split into layers and the rest, and merged again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax.optim.layers as layers_module
from actjax import LowRank
from actjax.optim.layers import (
    densify,
    layers_of,
    merge,
    put,
    split,
    split_gradient,
    square_norm,
    take,
)


class Params(NamedTuple):
    embedding: jax.Array
    layers: dict
    bias: None = None


def params(count: int = 3) -> Params:
    stack = np.arange(count * 4.0, dtype="float32").reshape(count, 2, 2)
    layers = {"w": jnp.asarray(stack), "b": jnp.ones((count, 2))}
    return Params(jnp.full((5, 2), 7.0), {**layers, "absent": None})


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


@pytest.mark.parametrize(("count", "i"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_put_replaces_the_layer_that_take_returns_and_no_other(count, i):
    stacks = params(count).layers
    layer = jax.tree.map(lambda x: np.asarray(x)[i] - 100, stacks)
    changed = jax.jit(put)(stacks, layer, i)
    taken = jax.jit(lambda tree: [take(tree, j) for j in range(count)])(changed)
    for j in range(count):
        expected = jax.tree.map(lambda x, j=j: np.asarray(x)[j], stacks)
        assert_same(taken[j], layer if j == i else expected)


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


def test_factors_are_multiplied_out_and_norms_are_in_float32():
    factors = LowRank(np.full((4, 1), 3.0, "float32"), np.full((1, 2), 2.0, "float32"))

    @jax.jit
    def dense_and_norms(gradient):
        dense = densify(gradient)
        return dense, square_norm(dense | {"w": dense["w"].astype(jnp.bfloat16)}), square_norm({})

    dense, norm, nothing = dense_and_norms({"w": factors, "b": np.ones(2, "float32")})
    np.testing.assert_array_equal(dense["w"], np.full((4, 2), 6.0))
    assert norm.dtype == jnp.float32
    assert norm == 8 * 36 + 2
    assert nothing == 0
