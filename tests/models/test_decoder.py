import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny import CONFIG, batch, decoder

from actjax import Exact, PointApproximation, RandomizedSVD, RandomProjection, explain
from models import Decoder, RopeScaling, Storage
from models.decoder import rope_tables

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


def gradient(model: Decoder, storage: Storage, key=None, **options):
    tokens, targets = batch(model.config)
    options = {"compute_dtype": "float32"} | options
    return jax.jit(
        jax.grad(lambda m: m.loss(tokens, targets, storage=storage, key=key, **options))
    )(model)


def assert_close(got, want, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(remat):
    model = decoder()
    assert_close(gradient(model, Storage(remat=remat)), gradient(model, Storage()), 1e-6)


def test_rematerialisation_draws_the_same_random_numbers():
    model, key = decoder(), jax.random.key(5)
    remat = dataclasses.replace(LOSSY, remat="full")
    assert_close(gradient(model, remat, key), gradient(model, LOSSY, key), 1e-5)


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
    with pytest.raises(ValueError, match=r"`storage.mlp_in` is PointApproximation\(points=3\)"):
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
    assert all(
        isinstance(value, Exact) for name, value in vars(Storage()).items() if name != "remat"
    )
