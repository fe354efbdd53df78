"""How parameters are taken apart into layers and put together again."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax import LowRank
from actjax.optim.layers import (
    count_layers,
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
    layers = {"w": jnp.arange(count * 4.0).reshape(count, 2, 2), "b": jnp.ones((count, 2))}
    return Params(jnp.full((5, 2), 7.0), {**layers, "absent": None})


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_split_has_each_array_once_and_merges_to_what_it_was():
    stacked, rest = split(params(), layers_of)
    assert stacked.embedding is None
    assert rest.layers == {"w": None, "b": None, "absent": None}
    assert_same(merge(stacked, rest, params()), params())
    assert_same(split_gradient(params(), params(), layers_of), (stacked, rest))


def test_a_gradient_of_another_structure_is_named():
    with pytest.raises(ValueError, match=r"`grads` must have the structure of `params`"):
        split_gradient({"w": jnp.ones(2)}, params(), layers_of)


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 2), ()])
def test_a_gradient_of_another_shape_is_named(shape):
    # JAX would broadcast it, or take the last layer's for those that are not there.
    bad = params()._replace(layers=params().layers | {"w": jnp.ones(shape)})
    with pytest.raises(ValueError, match=r"gradient of `layers.w` .* \(3, 2, 2\), got"):
        split_gradient(bad, params(), layers_of)
    thin = LowRank(jnp.ones((3, 2, 1)), jnp.ones((3, 1, 5)))
    with pytest.raises(ValueError, match=r"gradient of `layers.w` .*got \(3, 2, 5\)"):
        split_gradient(params()._replace(layers=params().layers | {"w": thin}), params(), layers_of)


def test_layers_are_an_attribute_or_an_entry():
    assert layers_of({"layers": 1, "norm": 2}) == 1
    assert layers_of(params()) is not None
    assert layers_of(types.MappingProxyType({"layers": [1, 2]})) == [1, 2]
    with pytest.raises(ValueError, match=r"dict has no `layers`: pass `layers`"):
        layers_of({"blocks": 1})


@pytest.mark.parametrize(
    "layers", [[{"w": 1}, {"w": 2}], ({"w": 1}, {"w": 2}), {0: {"w": 1}, 1: {"w": 2}}]
)
def test_a_tree_for_each_layer_is_no_stack(layers):
    with pytest.raises(ValueError, match=r"`layers` of dict holds 2 trees, one a layer: stack"):
        layers_of({"layers": layers})


def test_stacks_must_share_their_leading_axis():
    assert count_layers(params(4).layers) == 4
    for bad, lengths in (
        ({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}, "2, 3"),
        ({"a": jnp.ones(())}, "a scalar's"),
        ({"a": jnp.ones((0, 3))}, "0"),
        ({}, "none"),
    ):
        with pytest.raises(ValueError, match=rf"lengths are {lengths}\.$"):
            count_layers(bad)


@pytest.mark.parametrize(("count", "i"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_what_is_put_is_taken_and_nothing_else_changes(count, i):
    stacks = params(count).layers
    layer = jax.tree.map(lambda x: x[i] - 100, stacks)
    changed = put(stacks, layer, i)
    for j in range(count):
        assert_same(take(changed, j), layer if j == i else take(stacks, j))


def test_one_array_in_two_places_is_sliced_once():
    stack = jnp.ones((3, 2))
    a, b = take((stack, stack), 1)
    assert a is b


def test_what_is_put_takes_the_dtype_of_the_stack():
    stack = jnp.zeros((2, 3), jnp.bfloat16)
    assert put(stack, jnp.ones(3, jnp.float32), 0).dtype == jnp.bfloat16


def test_factors_are_multiplied_out_and_norms_are_in_float32():
    left, right = jnp.full((4, 1), 3.0), jnp.full((1, 2), 2.0)
    dense = densify({"w": LowRank(left, right), "b": jnp.ones(2)})
    np.testing.assert_array_equal(dense["w"], np.full((4, 2), 6.0))
    norm = square_norm({"w": dense["w"].astype(jnp.bfloat16), "b": dense["b"]})
    assert norm.dtype == jnp.float32
    assert norm == 8 * 36 + 2
    assert square_norm({}) == 0
