"""A model whose inputs are stored in the subspace of its optimizer."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny

import actjax
from actjax import optim
from models import Storage

RANK = 6


def loss_function(model, tokens, targets, key):
    codec = actjax.RandomizedSVD(RANK)
    storage = Storage(codec, codec, codec, codec)
    return model.loss(tokens, targets, storage=storage, key=key, compute_dtype="float32")


@functools.cache
def model():
    return tiny.decoder()


@functools.cache
def groups():
    return actjax.input_groups(loss_function, model(), *tiny.batch(), jax.random.key(0))


def test_weights_of_one_input_share_a_basis_and_its_stored_copy():
    tx = optim.subspace(optax.scale_by_adam(), RANK, groups=groups())
    state = jax.jit(functools.partial(optim.init, tx))(model())
    names = {"layers.attention.k", "layers.attention.o", "layers.mlp.down", "layers.mlp.gate"}
    assert set(state.layers.bases) == names
    down = np.asarray(state.layers.bases["layers.mlp.down"])
    assert down.shape == (3, 48, RANK)
    # Each layer has a separate basis.
    assert np.abs(down[0] - down[1]).max() > 0.1
    explained = actjax.explain(
        actjax.with_bases(loss_function, tx.bases(state)), model(), *tiny.batch(), jax.random.key(0)
    )
    linear = [r for r in explained.residuals if r.operator == "linear"]
    assert {r.codec for r in linear if r.name != "head"} == {f"Basis(rank={RANK})"}
    assert {r.name for r in linear} >= {"attention_in", "attention_out", "mlp_in", "mlp_out"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"source": "random", "bits": 8}], ids=["svd", "random"])
def test_a_model_trains_through_refreshes(options):
    tx = optim.subspace(
        optax.scale_by_adam(), RANK, groups=groups(), outer=optax.scale_by_learning_rate(2e-2),
        scale=1.0, **options,
    )  # fmt: skip
    data = tiny.batch()

    @functools.partial(jax.jit, static_argnames="refresh")
    def step(model, state, key, refresh):
        if refresh and tx.source == "random":
            state = optim.redraw(tx, state, model)
        in_gradient = refresh and tx.source == "gradient"
        bases = None if in_gradient else tx.bases(state)
        loss, grads = actjax.value_and_grad(loss_function, bases=bases)(model, *data, key)
        model, state = optim.apply(tx, grads, state, model, refresh=in_gradient)
        return model, state, loss

    trained, state = model(), jax.jit(functools.partial(optim.init, tx))(model())
    losses = []
    for i in range(12):
        trained, state, loss = step(trained, state, jax.random.key(i), i % 6 == 0)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    assert int(state.layers.step[0]) == 12
