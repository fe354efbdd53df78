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


# About 20 programs, each of another storage: the gradient of a storage is compiled once.
@functools.cache
def loss_and_gradient(storage: StorageChoice):
    """The jitted loss and gradient of a model, as a function of it and of a key."""
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


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_rematerialization_changes_no_gradient(policy):
    model = decoder()
    _, got = loss_and_gradient(Remat(policy))(model, KEY)
    assert_close(got, loss_and_gradient(Storage())(model, KEY)[1], 1e-6)


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        {"seq": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "seq": 2}, marks=pytest.mark.slow),
    ],
)
def test_long_sequences_in_chunks_change_no_gradient(mesh, monkeypatch):
    model, sizes = decoder(), {"data": 1, "fsdp": 1, "tensor": 1, "seq": 1, **(mesh or {})}
    want = loss_and_gradient(Storage())(model, KEY)
    loss_and_gradient.cache_clear()
    monkeypatch.setattr(chunks, "TOKENS", 6)
    calls = []
    monkeypatch.setattr(
        chunks.actjax, "checkpoint",
        lambda *args, **options: calls.append(options) or checkpoint(*args, **options),
    )  # fmt: skip
    with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 4)):
        got = loss_and_gradient(Remat())(model, KEY)
    loss_and_gradient.cache_clear()
    assert len(calls) == 2
    assert_close(got, want, 1e-6)


def test_lossy_linear_inputs_leave_the_loss_and_other_gradients_exact():
    model = decoder()
    loss, exact = loss_and_gradient(Storage())(model, KEY)
    lossy_loss, lossy = loss_and_gradient(LOSSY)(model, KEY)
    assert lossy_loss == loss
    # dx is exact, so weights of other operators have exact gradients at every depth.
    for get in (
        lambda m: m.embedding,
        lambda m: m.norm,
        lambda m: m.layers.attention_norm,
        lambda m: m.layers.mlp_norm,
        lambda m: m.output,
    ):
        assert_close(get(lossy), get(exact), 1e-6)
    assert largest_difference(lossy.layers.mlp.down, exact.layers.mlp.down) > 1e-4


def largest_difference(a, b) -> float:
    return float(np.abs(np.asarray(a.get_value()) - np.asarray(b.get_value())).max())


def test_another_key_draws_other_numbers():
    model = decoder()
    one, other = (loss_and_gradient(LOSSY)(model, jax.random.key(i))[1] for i in (0, 1))
    for a, b in (
        (one.layers.attention.o, other.layers.attention.o),
        (one.layers.mlp.up, other.layers.mlp.up),
    ):
        assert largest_difference(a, b) > 1e-4


def test_random_storage_needs_a_key():
    with pytest.raises(ValueError, match=r"`Storage.mlp_in` is PointApproximation\(points=3\)"):
        loss_and_gradient(Storage(mlp_in=PointApproximation(points=3)))(decoder(), None)


def test_exact_is_the_default_everywhere():
    for storage in (Storage(), Remat(), CompressedResiduals()):
        assert set(storage.codecs.values()) == {Exact()}
    assert set(Storage().codecs) == set(SITES)


@pytest.mark.parametrize(
    "storage",
    [
        in_codes(Exact()),
        as_residuals(Exact()),
        in_codes(Exact(), mlp_in=Exact(), attention_out=Exact()),
    ],
    ids=["rebuilt", "residuals", "some rebuilt"],
)
def test_inputs_rebuilt_from_exact_values_give_the_exact_gradient(storage):
    model = decoder()
    loss, gradient = loss_and_gradient(storage)(model, KEY)
    want_loss, want = loss_and_gradient(Storage())(model, KEY)
    assert loss == want_loss
    # The same sums in float32, in another order.
    assert distance(gradient, want) < 1e-5


@pytest.mark.parametrize(
    ("make", "bits"),
    [(in_codes, (2, 4, 8)), (as_residuals, (2, 8)), (lambda c: Remat(codec=c), (2, 8))],
    ids=["codes", "residuals", "remat"],
)
def test_more_bits_bring_the_gradient_closer_and_leave_the_loss_exact(make, bits):
    model = decoder()
    want_loss, want = loss_and_gradient(Storage())(model, KEY)
    errors = {}
    for n in bits:
        loss, gradient = loss_and_gradient(make(Quantized(n, group=8)))(model, KEY)
        assert loss == want_loss
        errors[n] = distance(gradient, want)
    # Levels are 5 times finer from 2 to 4 bits, and 17 times finer from 4 to 8.
    assert errors[2] > 16 * errors[8] > 0
    if 4 in errors:
        assert errors[2] > 2 * errors[4] > 16 * errors[8]


def test_attention_weights_of_decoded_scores_add_up_to_one():
    """Both storages decode q and k from 2 bits: a log-sum-exp of exact scores would not fit."""
    model = decoder()
    # Scores of trained models reach tens; the levels of 2 bits are as far apart as some of them.
    for weight in (model.layers.attention.q, model.layers.attention.k):
        weight.set_value(40 * np.asarray(weight.get_value()))
    codes = {"q": Quantized(2, group=8), "k": Quantized(2, group=8)}
    exact, by_operator, as_whole = (
        loss_and_gradient(storage)(model, KEY)[1]
        for storage in (
            Storage(),
            # The residuals of a block hold the output of attention, too.
            in_codes(Exact(), attention_out=Exact(), **codes),
            dataclasses.replace(as_residuals(Exact()), **codes),
        )
    )
    assert distance(by_operator, exact) > 0.1
    # The same sums in float32, in another order, with scores of tens in the exponent.
    assert distance(as_whole, by_operator) < 1e-4


def test_every_stored_value_is_in_the_table_once():
    tokens, targets = batch()
    for storage, more in ((in_codes(Quantized(4)), 0), (as_residuals(Quantized(4)), 1)):
        loss = lambda m, storage=storage: m.loss(tokens, targets, storage=storage)  # noqa: E731
        coded = [r for r in explain(loss, decoder()).residuals if "Quantized" in r.codec]
        assert len(coded) == len(STORED) + more
        assert all(r.shape[0] == CONFIG.num_layers for r in coded)


def test_a_key_for_each_site_changes_that_site_only():
    model, keys = decoder(), dict.fromkeys(SITES, jax.random.key(1))
    gradient = loss_and_gradient(in_codes(Quantized(2, group=8, rounding="stochastic")))
    base, other = (gradient(model, k)[1] for k in (keys, {**keys, "gate": jax.random.key(2)}))
    # The gradient of the output projection reads no code. That of the down projection reads the
    # gate.
    assert distance(base.output, other.output) == 0
    assert distance(base.layers.mlp.down, other.layers.mlp.down) > 0
