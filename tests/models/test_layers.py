"""Tests of models/layers.py: gradients of a decoder with each choice of storage."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from tiny import CONFIG, batch, decoder

from actjax import (
    Exact,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
    checkpoint,
    explain,
)
from models import CompressedResiduals, Remat, Storage, StorageChoice, chunks
from models.storage import LINEAR_INPUTS, SITES

LOSSY = Storage(
    RandomizedSVD(4), RandomProjection(4), PointApproximation(points=3), RandomizedSVD(4)
)
STORED = [site for site in SITES if site not in LINEAR_INPUTS]
KEY = jax.random.key(5)


def in_codes(codec, **changes) -> Storage:
    """Every site stored by a codec; linear inputs rebuilt."""
    rebuilt: dict[str, Any] = dict.fromkeys(LINEAR_INPUTS)
    return Storage(**{**dict.fromkeys(STORED, codec), **rebuilt, **changes})


def as_residuals(codec) -> CompressedResiduals:
    return CompressedResiduals(**dict.fromkeys((*STORED, "attention_out"), codec))


@functools.cache
def loss_and_gradient(storage: StorageChoice):
    """The loss and gradient of a model, as a function of it and of a key, compiled once."""
    return compiled(storage)


@functools.cache
def exact():
    """The loss and gradient of `decoder()` with everything stored as it is."""
    return loss_and_gradient(Storage())(decoder(), KEY)


def compiled(storage: StorageChoice):
    tokens, targets = batch(length=16)

    def loss(model, key):
        return model.loss(tokens, targets, storage=storage, key=key, compute_dtype="float32")

    return jax.jit(jax.value_and_grad(loss))


def distance(a, b) -> float:
    """Relative distance of two trees, in the norm over all their leaves."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    error = sum(np.sum((np.float64(x) - np.float64(y)) ** 2) for x, y in pairs)
    return float(np.sqrt(error / sum(np.sum(np.float64(y) ** 2) for _, y in pairs)))


def assert_close(got, want, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_rematerialization_changes_no_gradient():
    assert_close(loss_and_gradient(Remat("dots"))(decoder(), KEY)[1], exact()[1], 1e-6)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("mesh", [slow({}), {"seq": 2, "tensor": 2}, slow({"fsdp": 2, "seq": 2})])
def test_long_sequences_in_chunks_change_no_gradient(mesh, monkeypatch):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "seq": 1, **mesh}
    monkeypatch.setattr(chunks, "TOKENS", 6)
    calls = []
    monkeypatch.setattr(
        chunks.actjax, "checkpoint",
        lambda *args, **options: calls.append(options) or checkpoint(*args, **options),
    )  # fmt: skip
    with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 4)):
        got = compiled(Remat())(decoder(), KEY)
    assert len(calls) == 2
    assert_close(got, exact(), 1e-6)


def test_lossy_linear_inputs_leave_the_loss_and_other_gradients_exact():
    loss, gradient = exact()
    lossy_loss, lossy = loss_and_gradient(LOSSY)(decoder(), KEY)
    assert lossy_loss == loss
    # dx is exact, so weights of other operators have exact gradients at every depth.
    for get in (
        lambda m: m.embedding,
        lambda m: m.norm,
        lambda m: m.layers.attention_norm,
        lambda m: m.layers.mlp_norm,
        lambda m: m.output,
    ):
        assert_close(get(lossy), get(gradient), 1e-6)
    assert largest_difference(lossy.layers.mlp.down, gradient.layers.mlp.down) > 1e-4


def largest_difference(a, b) -> float:
    return float(np.abs(np.asarray(a.get_value()) - np.asarray(b.get_value())).max())


def test_another_key_draws_other_numbers():
    first, second = (
        loss_and_gradient(LOSSY)(decoder(), jax.random.key(i))[1].layers for i in (0, 1)
    )
    assert largest_difference(first.attention.o, second.attention.o) > 1e-4
    assert largest_difference(first.mlp.up, second.mlp.up) > 1e-4


def test_exact_is_the_default_everywhere():
    for storage in (Storage(), Remat(), CompressedResiduals()):
        assert set(storage.codecs.values()) == {Exact()}
    assert set(Storage().codecs) == set(SITES)


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(in_codes(Exact()), id="rebuilt"),
        pytest.param(as_residuals(Exact()), id="residuals"),
        slow(in_codes(Exact(), mlp_in=Exact(), attention_out=Exact()), id="some rebuilt"),
    ],
)
def test_inputs_rebuilt_from_exact_values_give_the_exact_gradient(storage):
    loss, gradient = loss_and_gradient(storage)(decoder(), KEY)
    assert loss == exact()[0]
    # The same sums in float32, in another order.
    assert distance(gradient, exact()[1]) < 1e-5


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        pytest.param(in_codes, (2, 8), id="codes"),
        slow(in_codes, (2, 4), id="codes of 2 and 4 bits"),
        slow(in_codes, (4, 8), id="codes of 4 and 8 bits"),
        pytest.param(as_residuals, (2, 8), id="residuals"),
        pytest.param(lambda codec: Remat(codec=codec), (2, 8), id="remat"),
    ],
)
def test_more_bits_bring_the_gradient_closer_and_leave_the_loss_exact(make, bits):
    errors = []
    for n in bits:
        loss, gradient = loss_and_gradient(make(Quantized(n, group=8)))(decoder(), KEY)
        assert loss == exact()[0]
        errors.append(distance(gradient, exact()[1]))
    # Levels are 5 times finer from 2 to 4 bits, and 17 times finer from 4 to 8.
    assert errors[0] > {(2, 8): 16, (2, 4): 2, (4, 8): 8}[bits] * errors[1] > 0


def test_attention_weights_of_decoded_scores_add_up_to_one():
    """Both storages decode q and k from 2 bits: a log-sum-exp of exact scores would not fit."""
    model = decoder()
    # Scores of trained models reach tens; the levels of 2 bits are as far apart as some of them.
    for weight in (model.layers.attention.q, model.layers.attention.k):
        weight.set_value(40 * np.asarray(weight.get_value()))
    codes = {"q": Quantized(2, group=8), "k": Quantized(2, group=8)}
    stored, by_operator, as_whole = (
        loss_and_gradient(storage)(model, KEY)[1]
        for storage in (
            Storage(),
            # The residuals of a block hold the output of attention, too.
            in_codes(Exact(), attention_out=Exact(), **codes),
            dataclasses.replace(as_residuals(Exact()), **codes),
        )
    )
    assert distance(by_operator, stored) > 0.1
    # The same sums in float32, in another order, with scores of tens in the exponent.
    assert distance(as_whole, by_operator) < 1e-4


def test_every_stored_value_is_in_the_table_once():
    tokens, targets = batch()
    for storage, extra in ((in_codes(Quantized(4)), 0), (as_residuals(Quantized(4)), 1)):
        loss = lambda m, storage=storage: m.loss(tokens, targets, storage=storage)  # noqa: E731
        coded = [r for r in explain(loss, decoder()).residuals if "Quantized" in r.codec]
        assert len(coded) == len(STORED) + extra
        assert all(r.shape[0] == CONFIG.num_layers for r in coded)


def test_a_key_for_each_site_changes_that_site_only():
    model, keys = decoder(), dict.fromkeys(SITES, jax.random.key(1))
    gradient = loss_and_gradient(in_codes(Quantized(2, group=8, rounding="stochastic")))
    base, other = (gradient(model, k)[1] for k in (keys, {**keys, "gate": jax.random.key(2)}))
    # The gradient of the output projection reads no code. That of the down projection reads the
    # gate.
    assert distance(base.output, other.output) == 0
    assert distance(base.layers.mlp.down, other.layers.mlp.down) > 0
