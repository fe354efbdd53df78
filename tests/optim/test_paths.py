"""The field and the parameter that an array of an optax state belongs to."""

import jax
import jax.numpy as jnp
import optax
import pytest

from actjax.optim.paths import map_state, split_path

WEIGHTS = ("layers.attention.q", "q", "norm")


@pytest.mark.parametrize(
    ("name", "fields", "weight"),
    [
        ("0.mu.layers.attention.q", ["0", "mu"], "layers.attention.q"),
        ("0.nu.q", ["0", "nu"], "q"),
        ("q", [], "q"),
        ("count", ["count"], None),
        # A parameter's path must match whole names.
        ("mu.layernorm", ["mu", "layernorm"], None),
    ],
)
def test_a_path_is_split_before_the_longest_matching_parameter(name, fields, weight):
    assert split_path(name, WEIGHTS) == (fields, weight)


def names_of(tx, params):
    """Returns a state with the fields and the parameter of each array in its place."""
    return map_state(lambda fields, weight, _: (fields, weight), tx.init(params), params)


def test_a_parameter_may_be_named_like_a_field():
    params = {"w": jnp.ones(2), "nu": {"w": jnp.ones(2)}}
    state = names_of(optax.adam(1e-3), params)[0]
    assert state.mu == {"w": (["0", "mu"], "w"), "nu": {"w": (["0", "mu"], "nu.w")}}
    assert state.nu == {"w": (["0", "nu"], "w"), "nu": {"w": (["0", "nu"], "nu.w")}}
    assert state.count == (["0", "count"], None)


def test_the_parameters_may_be_one_array():
    assert names_of(optax.trace(0.9), jnp.ones(2)).trace == (["trace"], "")


def test_an_array_of_a_masked_transform_has_the_path_of_its_parameter():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = names_of(optax.masked(optax.trace(0.9), {"a": True, "b": False}), params)
    assert state.inner_state.trace["a"] == (["inner_state", "trace"], "a")
    assert jax.tree.leaves(state.inner_state.trace["b"]) == []
