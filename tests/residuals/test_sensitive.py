"""Gradients where a small error of the wrong array would be a large one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from residuals.residual_helpers import normal, relative_error

from actjax import Quantized, compress, compress_residuals
from actjax.residuals.graph.growth import Growth

X, W, V = normal(0, 128, 32), normal(1, 32, 64) / 32**0.5, normal(2, 64, 64) / 8
LABELS = np.random.default_rng(3).integers(1, 16, (8, 6))
EDGES = np.random.default_rng(4).integers(0, 128, (2, 512))
KEEP = np.random.default_rng(5).random((128, 64)) < 0.7


def connectionist(p):
    logits = jnp.tanh(X @ p[0]).reshape(8, 16, 64) @ p[1][:, :16]
    return optax.ctc_loss(logits, jnp.zeros((8, 16)), LABELS, jnp.zeros((8, 6))).mean()


def graph_attention(p):
    source, target = EDGES
    h = X @ p[0]
    scores = jax.nn.leaky_relu(h[source, :1] * 3 + h[target, 1:2] * 3, 0.2)
    e = jnp.exp(scores - jax.ops.segment_max(scores, target, 128)[target])
    a = e / jax.ops.segment_sum(e, target, 128)[target]
    return jnp.mean((jax.ops.segment_sum(a * h[source], target, 128) @ p[1]) ** 2)


def mean_by_degree(p):
    source, target = EDGES
    weight = jax.nn.softplus(4 * X @ p[0])[source]
    total = jax.ops.segment_sum(weight * jnp.tanh(X @ p[0])[source], target, 128)
    return jnp.mean((total / (jax.ops.segment_sum(weight, target, 128) + 0.02) @ p[1]) ** 2)


def siren(p):
    return jnp.mean((jnp.sin(8 * X @ p[0]) @ p[1] - 1) ** 2)


def learned_variance(p):
    mean, s = jnp.split(jnp.tanh(X @ p[0]) @ p[1], 2, -1)
    return jnp.mean(((X - mean) / jnp.exp(3 * s)) ** 2 / 2 + 3 * s)


def sharp(p):
    return jnp.mean((jax.nn.gelu(6 * X @ p[0]) @ p[1]) ** 2)


def masked(p):
    h = jnp.where(KEEP, X @ p[0], -1e9)
    return jnp.mean((jax.nn.softmax(jnp.sort(h, 1)) @ p[1]) ** 2)


@pytest.mark.parametrize(
    "loss",
    [connectionist, graph_attention, mean_by_degree, siren, learned_variance, sharp, masked],
)
def test_eight_bits_are_a_small_error(loss):
    run = jax.jit(
        lambda p: [jax.grad(f)(p) for f in (compress_residuals(loss, Quantized(8)), loss)]
    )
    assert 0 < relative_error(*run((W, V))) < 0.02


@pytest.mark.parametrize(
    "fun",
    [
        lambda h: jnp.exp(-1 / jax.nn.relu(h - 0.5)),
        lambda h: jax.nn.relu(h) * jnp.log(jax.nn.relu(h)),
        lambda h: 1 / jnp.where(h > 0.1, h, 0),
        lambda h: jnp.exp(-1 / jnp.minimum(jax.nn.relu(h - 0.5), 9.0)),
    ],
    ids=["reciprocal", "logarithm", "selected divisor", "bounded divisor"],
)
def test_a_small_number_that_is_divided_by_is_not_decoded_as_zero(fun):
    def loss(p):
        h = X @ p[0]
        return jnp.mean((jnp.where(h > 0.5, fun(h), 0) @ p[1]) ** 2)

    run = jax.jit(
        lambda p: [jax.grad(f)(p) for f in (compress_residuals(loss, Quantized(4)), loss)]
    )
    assert relative_error(*run((W, V))) < 0.5


def log_space(p):
    """Its backward pass stores a NaN, which plain JAX does not use."""
    h = jnp.where(KEEP, X @ p[0], -jnp.inf)

    def step(best, row):
        best = jnp.logaddexp(best, row)
        return best, best

    sums = jax.lax.scan(step, jnp.full(64, -jnp.inf), h)[1][16:]
    return jnp.mean((jax.nn.gelu(sums @ p[1]) @ p[1].T) ** 2)


def test_nan_that_nothing_reads_ruins_no_group():
    small = compress_residuals(log_space, Quantized(8))
    got, want = jax.jit(lambda p: [jax.grad(f)(p) for f in (small, log_space)])((W, V))
    assert relative_error(got, want) < 0.01


def test_compress_keeps_what_a_code_ruins_and_codes_the_rest(monkeypatch):
    monkeypatch.setattr(Growth, "may_be_nan", lambda *_: False)
    small = compress(log_space, error=0.05, remat=False, verbose=False).measure((W, V))
    assert any(small.choice.bits.values())
    assert not all(small.choice.bits.values())
    run = jax.jit(lambda p: [jax.grad(f)(p) for f in (small, log_space)])
    assert 0 < relative_error(*run((W, V))) < 0.06


def test_a_promise_holds_jitted_closed_over_and_in_neither_way():
    def loss(p, x):
        a = jax.nn.softmax((x @ p[0]) @ (x @ p[0]).T / 4)
        return jnp.mean((jnp.tanh(a @ x @ p[0] * x[:, :1]) @ p[1]) ** 2)

    small = compress(loss, error=0.05, verbose=False).measure((W, V), X)
    exact = jax.grad(loss)((W, V), X)
    closed = [lambda p: small(p, X), lambda p: small(p, jnp.asarray(X))]
    for gradient in (
        jax.jit(jax.grad(small)), jax.grad(small),
        *(lambda p, _, f=f: jax.grad(f)(p) for f in closed),
        lambda p, _: jax.jit(jax.grad(closed[0]))(p),
    ):  # fmt: skip
        assert relative_error(gradient((W, V), X), exact) < 0.06


def test_rare_classes_of_a_softmax_keep_their_probability():
    # A code of exp(x - max) rounds the probabilities of odd classes to zero, in all rows.
    bias = np.where(np.arange(64) % 2, -9.0, 0.0).astype("float32")

    def loss(p):
        logits = X @ p[0] + p[1]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, 2 * EDGES[0, :128] % 64
        ).mean()

    small = compress_residuals(loss, Quantized(8))
    got, want = jax.jit(lambda p: [jax.grad(f)(p)[1][1::2] for f in (small, loss)])((W, bias))
    # Logits within 20 of each other: half a step of 20 / 255, and offsets in bfloat16.
    assert relative_error(got, want) < 0.5 * 20 / 255 + 20 * 2.0**-8
