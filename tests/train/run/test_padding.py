"""Padding of packed batches: methods whose codes a sequence shares embed it as zero."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import decoder

import actjax
from tests.train.steps import batch, first_state, recipe, with_method
from train.run.loss import inputs_of, loss_function
from train.run.step import make_train_step

PADDING = 7
LENGTHS = np.array([[5], [16], [9], [0]])


def packed(padding: int = PADDING):
    """Returns a batch with one example a row, and padding after it."""
    segments = (np.arange(16) < LENGTHS).astype(np.int32)
    tokens = np.where(batch()["inputs"] == PADDING, 0, batch()["inputs"])
    inputs = np.where(segments, tokens, padding).astype(np.int32)
    return {**batch(), "inputs": inputs, "mask": np.float32(segments), "segments": segments}


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


def test_the_embedding_of_padding_does_not_change_codes():
    one = recipe(with_method("lean", in_backward=False))
    run = jax.jit(actjax.value_and_grad(loss_function(one.config, one.storage)))
    want, got = (
        run(model, packed(), jax.random.key(0))
        for model in (decoder(), with_large_padding(decoder()))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_in_the_backward_pass_neither():
    one = recipe(with_method("lean"))
    step, state = jax.jit(make_train_step(one)), first_state(one)
    large = with_large_padding(first_state(one).model)
    want, got = (
        step(dataclasses.replace(state, model=model), packed()) for model in (state.model, large)
    )
    jax.tree.map(np.testing.assert_array_equal, got[0].model.layers, want[0].model.layers)
    np.testing.assert_array_equal(got[1]["loss"], want[1]["loss"])


@pytest.mark.parametrize("padding", [PADDING, -1])
def test_zero_padding_changes_neither_loss_nor_exact_gradient(padding):
    one = recipe()
    run = jax.jit(actjax.value_and_grad(loss_function(one.config, one.storage)))
    loss, grads = run(decoder(), packed(padding), jax.random.key(0))
    other, other_grads = run(with_large_padding(decoder()), packed(), jax.random.key(0))
    np.testing.assert_array_equal(loss, other)
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)
