import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny import CONFIG, batch, decoder

from actjax import (
    Exact,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
    explain,
)
from models import CompressedResiduals, Decoder, Remat, RopeScaling, Storage, StorageChoice
from models.decoder import rope_tables
from models.storage import LINEAR_INPUTS, SITES

TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
STRETCHED = dataclasses.replace(
    CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_seq_len=32), head_size=8
)
LOSSY = Storage(
    RandomizedSVD(4), RandomProjection(4), PointApproximation(points=3), RandomizedSVD(4)
)


def oracle_hidden(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The decoder again, layer by layer in NumPy float64."""
    config = model.config
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), model)
    scaling = config.rope_scaling and {
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_freq_factor,
        "high_freq_factor": config.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
    }
    positions = np.arange(tokens.shape[1])

    def rotated(x):
        return oracles.rope(x, positions, config.rope_theta, scaling)

    x = weights.embedding[...][tokens]
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda w, i=i: w[i], weights.layers)
        h = oracles.rms_norm(x, layer.attention_norm[...], config.norm_eps)
        q, k, v = (
            (h @ w[...]).reshape(*h.shape[:2], -1, config.head_size)
            for w in (layer.attention.q, layer.attention.k, layer.attention.v)
        )
        out = oracles.attention(rotated(q), rotated(k), v, True)
        x = x + out.reshape(*x.shape[:2], -1) @ layer.attention.o[...]
        h = oracles.rms_norm(x, layer.mlp_norm[...], config.norm_eps)
        x = x + oracles.swiglu(h @ layer.mlp.gate[...], h @ layer.mlp.up[...]) @ layer.mlp.down[...]
    return oracles.rms_norm(x, weights.norm[...], config.norm_eps)


@pytest.mark.parametrize("config", [CONFIG, TIED, STRETCHED], ids=["untied", "tied", "stretched"])
def test_logits_and_loss_agree_with_the_oracle(config):
    model, (tokens, targets) = decoder(config), batch(config)
    hidden = oracle_hidden(model, np.asarray(tokens))
    head = np.asarray(model.head, np.float64)
    logits = jax.jit(functools.partial(Decoder.__call__, compute_dtype="float32"))(model, tokens)
    # Float32 sums of up to 44 terms through three layers: some hundred roundings of 6e-8.
    np.testing.assert_allclose(logits, hidden @ head, rtol=2e-4, atol=2e-4)
    flat = hidden.reshape(-1, config.hidden_size)
    want = oracles.cross_entropy(flat, head, np.asarray(targets).ravel(), None, 0.0)
    loss = model.loss(tokens, targets, compute_dtype="float32")
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def gradient(model: Decoder, storage: StorageChoice, key=None, **options):
    tokens, targets = batch(model.config)
    options = {"compute_dtype": "float32"} | options
    return jax.jit(
        jax.grad(lambda m: m.loss(tokens, targets, storage=storage, key=key, **options))
    )(model)


def assert_close(got, want, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_rematerialization_changes_no_gradient(policy):
    model = decoder()
    assert_close(gradient(model, Remat(policy)), gradient(model, Storage()), 1e-6)


def test_gradients_agree_with_finite_differences():
    with jax.enable_x64(True):
        model = jax.tree.map(lambda w: w.astype(jnp.float64), decoder())
        tokens, targets = batch()

        @jax.jit
        def loss(m):
            return m.loss(tokens, targets, compute_dtype="float64")

        grads = jax.jit(jax.grad(loss))(model)
        leaves, treedef = jax.tree.flatten(model)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
            direction = jax.random.normal(keys[i], leaf.shape, jnp.float64)

            def moved(step, i=i, direction=direction):
                changed = [*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]
                return loss(jax.tree.unflatten(treedef, changed))

            step = 1e-6
            slope = (moved(step) - moved(-step)) / (2 * step)
            # The slope's own error: step² times a third derivative of up to 1e4 (a norm of a small
            # embedding), and 1e-16 / step of rounding.
            np.testing.assert_allclose(jnp.vdot(grad, direction), slope, rtol=1e-7, atol=1e-8)


def test_lossy_storage_leaves_the_loss_and_what_is_above_it_exact():
    model, key = decoder(), jax.random.key(5)
    tokens, targets = batch()
    losses = [
        model.loss(tokens, targets, storage=s, key=key, compute_dtype="float32")
        for s in (Storage(), LOSSY)
    ]
    assert losses[0] == losses[1]
    exact, lossy = gradient(model, Storage()), gradient(model, LOSSY, key)
    # dx is exact, so what is no linear weight has exact gradients at every depth.
    for get in (
        lambda m: m.embedding,
        lambda m: m.norm,
        lambda m: m.layers.attention_norm,
        lambda m: m.layers.mlp_norm,
        lambda m: m.output,
    ):
        assert_close(get(lossy), get(exact), 1e-6)
    differs = jnp.abs(lossy.layers.mlp.down[...] - exact.layers.mlp.down[...]).max()
    assert differs > 1e-4


def test_random_storage_needs_a_key():
    with pytest.raises(ValueError, match=r"`Storage.mlp_in` is PointApproximation\(points=3\)"):
        gradient(decoder(), Storage(mlp_in=PointApproximation(points=3)))


def test_another_key_draws_other_numbers_and_layers_differ():
    model = decoder()
    storage = Storage(mlp_in=RandomProjection(4))
    a, b = (gradient(model, storage, jax.random.key(i)).layers.mlp.up[...] for i in (0, 1))
    assert jnp.abs(a - b).max() > 1e-4


def test_bfloat16_weights_and_compute_stay_bfloat16():
    model = decoder(dtype="bfloat16")
    tokens, targets = batch()
    hidden = model.hidden(tokens)
    assert hidden.dtype == jnp.bfloat16
    grads = gradient(model, Storage(), compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert model.loss(tokens, targets).dtype == jnp.float32


def test_a_block_keeps_what_it_promises_and_no_more():
    config = CONFIG
    model, (tokens, targets) = decoder(), batch(rows=4, length=32)
    explanation = explain(
        lambda m: m.loss(tokens, targets, storage=Storage(), compute_dtype="float32"), model
    )
    tokens_count, d, f = tokens.size, config.hidden_size, config.ffn_size
    queries = config.num_heads * config.head_size
    keys = config.num_kv_heads * config.head_size
    # Norm inputs and linear inputs (4 d), q and the output (2 queries), k and v, gate, up, product,
    # and the log-sum-exp.
    values = 4 * d + 2 * queries + 2 * keys + 3 * f + config.num_heads
    head = d * config.vocab_size
    small = explanation.stored_bytes - 4 * (
        config.num_layers * tokens_count * values + 2 * tokens_count * d + head
    )
    assert 0 <= small < 4 * tokens_count * config.head_size


def test_frequencies_are_stretched_as_published():
    cos, sin = rope_tables(STRETCHED, 16)
    want = oracles.rope(
        np.ones((1, 16, 1, 8)),
        np.arange(16),
        STRETCHED.rope_theta,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )[0, :, 0]
    np.testing.assert_allclose(np.concatenate([cos - sin, cos + sin], axis=-1), want, atol=1e-5)


def test_exact_is_the_default_everywhere():
    for storage in (Storage(), Remat(), CompressedResiduals()):
        assert set(storage.codecs.values()) == {Exact()}
    assert set(Storage().codecs) == set(SITES)


KEPT = [site for site in SITES if site not in LINEAR_INPUTS]


def in_codes(codec, **changes):
    """Every kept value stored by a codec, linear inputs rebuilt."""
    rebuilt: dict[str, Any] = dict.fromkeys(LINEAR_INPUTS)
    return Storage(**{**dict.fromkeys(KEPT, codec), **rebuilt, **changes})


def as_residuals(codec):
    return CompressedResiduals(**dict.fromkeys((*KEPT, "attention_out"), codec))


def loss_and_gradient(storage, dtype="float32"):
    tokens, targets = batch(length=16)
    key = jax.random.key(3)
    loss = lambda m: m.loss(tokens, targets, storage=storage, key=key, compute_dtype=dtype)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(decoder())


def distance(a, b):
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    error = sum(np.sum((np.float64(x) - np.float64(y)) ** 2) for x, y in pairs)
    return float(np.sqrt(error / sum(np.sum(np.float64(y) ** 2) for _, y in pairs)))


@pytest.mark.parametrize(
    "storage",
    [
        in_codes(Exact()),
        as_residuals(Exact()),
        in_codes(Exact(), mlp_in=Exact(), attention_out=Exact()),
    ],
    ids=["rebuilt", "residuals", "some rebuilt"],
)
def test_what_is_rebuilt_from_exact_values_gives_the_exact_gradient(storage, quick_compile):
    loss, gradient = loss_and_gradient(storage)
    want_loss, want = loss_and_gradient(Storage())
    assert loss == want_loss
    # The same sums in float32, in another order.
    assert distance(gradient, want) < 1e-5


@pytest.mark.parametrize("make", [in_codes, as_residuals, lambda c: Remat(codec=c)])
def test_more_bits_bring_the_gradient_closer_and_leave_the_loss_alone(make, quick_compile):
    want_loss, want = loss_and_gradient(Storage())
    errors = []
    for bits in (2, 4, 8):
        loss, gradient = loss_and_gradient(make(Quantized(bits, group=8)))
        assert loss == want_loss
        errors.append(distance(gradient, want))
    # Levels are 5 and 17 times finer from one to the next.
    assert errors[0] > 2 * errors[1] > 16 * errors[2] > 0


def test_residuals_of_attention_are_normalised_anew_where_scores_are_large(quick_compile):
    """Both read q and k in 2 bits, and weights of attention must add up to one for these."""
    tokens, targets = batch(length=16)
    model = decoder()
    # Scores of trained models reach tens; a step of 2 bits is as large as some of them.
    model.layers.attention.q[...] *= 40
    model.layers.attention.k[...] *= 40
    codes = {"q": Quantized(2, group=8), "k": Quantized(2, group=8)}
    exact, by_operator, as_whole = (
        jax.jit(jax.grad(lambda m, s=storage: m.loss(tokens, targets, storage=s)))(model)
        for storage in (
            Storage(),
            dataclasses.replace(in_codes(Exact()), **codes),
            dataclasses.replace(as_residuals(Exact()), **codes),
        )
    )
    assert distance(by_operator, exact) > 0.1
    # The same sums in float32, in another order, with scores of tens in the exponent.
    assert distance(as_whole, by_operator) < 1e-4


def test_every_value_that_is_kept_is_in_the_table_once():
    tokens, targets = batch()
    for storage, more in ((in_codes(Quantized(4)), ()), (as_residuals(Quantized(4)), ("out",))):
        loss = lambda m, storage=storage: m.loss(tokens, targets, storage=storage)  # noqa: E731
        coded = [r for r in explain(loss, decoder()).residuals if "Quantized" in r.codec]
        assert len(coded) == len(KEPT) + len(more)
        assert all(r.shape[0] == CONFIG.num_layers for r in coded)


def test_a_key_for_each_site_moves_that_site_alone(quick_compile):
    codec = Quantized(2, group=8, rounding="stochastic")
    tokens, targets = batch()
    keys = dict.fromkeys(SITES, jax.random.key(1))

    @jax.jit
    def gradient(keys):
        return jax.grad(lambda m: m.loss(tokens, targets, storage=in_codes(codec), key=keys))(
            decoder()
        )

    base, other = gradient(keys), gradient({**keys, "gate": jax.random.key(2)})
    # Of the last layer, attention is upstream of its gate, and the output projection is not.
    assert distance(base.output, other.output) == 0
    assert distance(base.layers.mlp.down, other.layers.mlp.down) > 0
