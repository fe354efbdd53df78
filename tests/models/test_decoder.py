"""Tests of models/decoder.py: a NumPy oracle, finite differences, dtypes and stored bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny import CONFIG, batch, decoder

from actjax import explain
from models import Decoder, RopeScaling
from models.rope import rope_tables

SCALING = RopeScaling(8.0, 1.0, 4.0, original_max_seq_len=32)
SCALING_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
SCALED = dataclasses.replace(CONFIG, rope_scaling=SCALING, head_size=8)


def oracle_hidden(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The hidden states of a decoder, layer by layer in NumPy float64."""
    config = model.config
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), model)
    scaling = config.rope_scaling and SCALING_FIELDS
    positions = np.arange(tokens.shape[1])

    def rotated(x):
        return oracles.rope(x, positions, config.rope_theta, scaling)

    x = weights.embedding.get_value()[tokens]
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda w, i=i: w[i], weights.layers)
        attention, mlp = layer.attention, layer.mlp
        h = oracles.rms_norm(x, layer.attention_norm.get_value(), config.norm_eps)
        q, k, v = (
            (h @ w.get_value()).reshape(*h.shape[:2], -1, config.head_size)
            for w in (attention.q, attention.k, attention.v)
        )
        out = oracles.attention(rotated(q), rotated(k), v, True)
        x = x + out.reshape(*x.shape[:2], -1) @ attention.o.get_value()
        h = oracles.rms_norm(x, layer.mlp_norm.get_value(), config.norm_eps)
        gate, up = h @ mlp.gate.get_value(), h @ mlp.up.get_value()
        x = x + oracles.swiglu(gate, up) @ mlp.down.get_value()
    return oracles.rms_norm(x, weights.norm.get_value(), config.norm_eps)


@pytest.mark.parametrize("config", [CONFIG, TIED, SCALED], ids=["untied", "tied", "scaled"])
def test_logits_and_loss_agree_with_the_oracle(config):
    @jax.jit
    def logits_and_loss(model, tokens, targets):
        logits = model(tokens, compute_dtype="float32")
        return logits, model.loss(tokens, targets, compute_dtype="float32"), model.head

    model, (tokens, targets) = decoder(config), batch(config)
    logits, loss, head = logits_and_loss(model, tokens, targets)
    hidden, head = oracle_hidden(model, np.asarray(tokens)), np.asarray(head, np.float64)
    # Float32 sums of up to 44 terms through three layers: some hundred roundings of 6e-8.
    np.testing.assert_allclose(logits, hidden @ head, rtol=2e-4, atol=2e-4)
    flat = hidden.reshape(-1, config.hidden_size)
    want = oracles.cross_entropy(flat, head, np.asarray(targets).ravel(), None, 0.0)
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_gradients_agree_with_finite_differences():
    rng = np.random.default_rng(3)
    tokens, targets = (np.asarray(x) for x in batch())
    with jax.enable_x64(True):
        model = jax.tree.map(lambda w: np.asarray(w, np.float64), decoder())
        leaves, treedef = jax.tree.flatten(model)

        def loss(leaves):
            model = jax.tree.unflatten(treedef, leaves)
            return model.loss(tokens, targets, compute_dtype="float64")

        value, grads = jax.jit(loss), jax.jit(jax.grad(loss))(leaves)
        for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            direction, step = rng.standard_normal(leaf.shape), 1e-6
            moved = [
                float(value([*leaves[:i], leaf + sign * step * direction, *leaves[i + 1 :]]))
                for sign in (1, -1)
            ]
            slope = (moved[0] - moved[1]) / (2 * step)
            # The slope's own error: step² times a third derivative of up to 1e4 (a norm of a small
            # embedding), and 1e-16 / step of rounding.
            np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-7, atol=1e-8)


def test_bfloat16_weights_and_compute_stay_bfloat16():
    tokens, targets = batch()
    model = jax.eval_shape(lambda: decoder(dtype="bfloat16"))
    hidden = jax.eval_shape(lambda m: m.hidden(tokens), model)
    assert hidden.dtype == jnp.bfloat16
    loss, grads = jax.eval_shape(jax.value_and_grad(lambda m: m.loss(tokens, targets)), model)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert loss.dtype == jnp.float32


def test_a_block_stores_what_its_operators_promise():
    config = CONFIG
    model, (tokens, targets) = decoder(), batch(rows=4, length=32)
    explanation = explain(lambda m: m.loss(tokens, targets, compute_dtype="float32"), model)
    tokens_count, d, f = tokens.size, config.hidden_size, config.stored_ffn_size
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


def test_frequencies_are_scaled_as_published():
    cos, sin = jax.jit(functools.partial(rope_tables, SCALED, 16))()
    ones = np.ones((1, 16, 1, 8))
    want = oracles.rope(ones, np.arange(16), SCALED.rope_theta, SCALING_FIELDS)[0, :, 0]
    cos, sin = np.asarray(cos), np.asarray(sin)
    np.testing.assert_allclose(np.concatenate([cos - sin, cos + sin], axis=-1), want, atol=1e-5)
