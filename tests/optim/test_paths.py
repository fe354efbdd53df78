"""Which part of a path is whose."""

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
        # The end of a name is not that of a path.
        ("mu.layernorm", ["mu", "layernorm"], None),
    ],
)
def test_a_path_ends_in_that_of_the_longest_parameter(name, fields, weight):
    assert split_path(name, WEIGHTS) == (fields, weight)


def names_of(tx, params):
    """Returns a state with what `map_state` says of each array in its place."""
    return map_state(lambda fields, weight, _: (fields, weight), tx.init(params), params)


def test_a_parameter_may_have_the_name_of_a_field():
    params = {"w": jnp.ones(2), "nu": {"w": jnp.ones(2)}}
    state = names_of(optax.adam(1e-3), params)[0]
    assert state.mu == {"w": (["0", "mu"], "w"), "nu": {"w": (["0", "mu"], "nu.w")}}
    assert state.nu == {"w": (["0", "nu"], "w"), "nu": {"w": (["0", "nu"], "nu.w")}}
    assert state.count == (["0", "count"], None)


def test_one_array_may_be_all_parameters():
    assert names_of(optax.trace(0.9), jnp.ones(2)).trace == (["trace"], "")


def test_what_a_mask_hides_has_the_path_of_its_parameter():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = names_of(optax.masked(optax.trace(0.9), {"a": True, "b": False}), params)
    assert state.inner_state.trace["a"] == (["inner_state", "trace"], "a")
    assert jax.tree.leaves(state.inner_state.trace["b"]) == []
