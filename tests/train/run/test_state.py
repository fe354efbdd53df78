"""The first state of a run: the arrays of `init_state`, made a few at a time."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.train.steps import recipe
from train.run import state
from train.run.sharding import make_mesh
from train.run.step import init_state


def placed(one):
    shapes = jax.eval_shape(functools.partial(init_state, one))
    return state.shardings_of_run(one, shapes, make_mesh(""))


def contents(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("together", [2**13, 2**26])
def test_the_arrays_are_those_of_one_program(monkeypatch, together):
    monkeypatch.setattr(state, "_TOGETHER", together)
    one = recipe()
    expected = jax.jit(functools.partial(init_state, one))()
    made = state.first_state(one, placed(one))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    assert contents(made) == contents(expected)


def test_the_arrays_of_a_pretrained_model_are_not_copied():
    one = recipe()
    model = jax.jit(functools.partial(init_state, recipe()))().model
    made = state.first_state(one, placed(one), model)
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(model)]
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(made.model)] == addresses
    others = jax.tree.leaves(dataclasses.replace(made, model=None))
    assert not {x.unsafe_buffer_pointer() for x in others} & set(addresses)


def test_large_arrays_are_made_alone_and_small_ones_together():
    sizes = [4, 2**24, 8, 8, 2**25, 2**24, 2**24]
    leaves = [(i, jax.ShapeDtypeStruct((n,), "float32")) for i, n in enumerate(sizes)]
    assert state._groups(leaves, alone=()) == [[0], [1], [2, 3], [4], [5], [6]]
    assert state._groups(leaves[:4], alone=(2,)) == [[0], [1], [2], [3]]
    assert state._groups([], alone=()) == []
