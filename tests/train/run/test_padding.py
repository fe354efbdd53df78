"""Padding of packed batches: methods whose codes a sequence shares embed it as zero."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import decoder

import actjax
from tests.train.steps import batch, programs, recipe, with_method
from train.run.loss import inputs_of, loss_function

PADDING = 7
LENGTHS = np.array([[5], [16], [9], [0]])


def packed(padding: int = PADDING):
    """Returns a batch with one example a row, and padding after it."""
    segments = (np.arange(16) < LENGTHS).astype(np.int32)
    tokens = np.where(batch()["inputs"] == PADDING, 0, batch()["inputs"])
    inputs = np.where(segments, tokens, padding).astype(np.int32)
    return {**batch(), "inputs": inputs, "mask": np.float32(segments), "segments": segments}


@jax.jit
def with_large_padding(model):
    """Returns the model with another embedding of padding, as large as that of trained models."""
    model.embedding[...] = model.embedding[...].at[PADDING].set(1e3)
    return model


def test_padding_is_minus_one_for_methods_that_ask_for_it():
    given = packed()
    np.testing.assert_array_equal(inputs_of(given, "lean"), packed(-1)["inputs"])
    np.testing.assert_array_equal(inputs_of(given, "low_rank"), given["inputs"])
    del given["segments"]
    np.testing.assert_array_equal(inputs_of(given, "lean"), given["inputs"])


@pytest.mark.parametrize(
    ("method", "paddings"), [("lean", [PADDING]), ("exact", [PADDING, -1])], ids=["lean", "exact"]
)
def test_padding_changes_neither_loss_nor_gradient(method, paddings):
    one = recipe(with_method(method, in_backward=False))
    run = jax.jit(actjax.value_and_grad(loss_function(one.config, one.storage)))
    want = run(with_large_padding(decoder()), packed(), jax.random.key(0))
    for padding in paddings:
        got = run(decoder(), packed(padding), jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_padding_does_not_change_codes_in_the_backward_pass():
    run = programs(with_method("lean"))
    large = dataclasses.replace(run.state, model=with_large_padding(run.state.model))
    want, got = (run.step(state, packed()) for state in (run.state, large))
    jax.tree.map(np.testing.assert_array_equal, got[0].model.layers, want[0].model.layers)
    np.testing.assert_array_equal(got[1]["loss"], want[1]["loss"])
