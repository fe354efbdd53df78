"""Tests of actjax/bits.py: which values the gradient suffers from, and where bits go."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actjax
from actjax import Exact, Quantized, allocate_bits, compression_variance, sampling_variance
from actjax.transforms.bits import error_of_bits, sensitivity

KEY = jax.random.key(5)
TOKENS, FEATURES = 48, 16
ESTIMATES = ("probe", "algorithm 1")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


X, W, DZ = normal(0, TOKENS, FEATURES), normal(1, FEATURES, 5), normal(2, TOKENS, 5)


def of_linear(codecs, keys, w):
    """The gradient of a linear operator, whose input is stored as `x`."""
    return jax.grad(lambda w: jnp.sum(DZ * actjax.linear(X, w, codec=codecs["x"], key=keys["x"])))(
        w
    )


def variance_of_linear(bits):
    """By theory: `dw = x_hatᵀ dz`, errors of numbers independent, `t (1 - t) Δ²` each."""
    x, dz = np.float64(X), np.float64(DZ)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    share = (x - low) / step % 1
    return np.sum(share * (1 - share) * step**2 * np.sum(dz**2, 1, keepdims=True))


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_the_sensitivity_of_a_linear_operator_is_that_of_theory(estimate):
    codecs = {"x": Quantized(4, group=FEATURES, rounding="stochastic", scale_dtype="float32")}
    found = sensitivity(of_linear, codecs, KEY, W, estimate=estimate, samples=60)
    want = variance_of_linear(4) / error_of_bits(4)
    # A squared norm over 80 numbers, about normal, has a spread of sqrt(2 / 80) = 0.16; the mean of
    # 60 has 0.02, of which this is five. The probe takes 1/6 for the mean of t (1 - t) within a
    # group, which over 768 numbers has a spread of 0.075 * 6 / sqrt(768) = 0.016.
    np.testing.assert_allclose(found["x"], want, rtol=0.12)


def of_network(codecs, keys, weights):
    """A gradient to which stored values matter in quite different ways."""

    def loss(weights):
        a, b, c, scale = weights
        h = actjax.rms_norm(X, scale, codec=codecs["norm"], key=keys["norm"])
        gate = actjax.linear(h, a, codec=codecs["input"], key=keys["input"])
        y = actjax.swiglu(
            gate, 30 * gate, codec=(codecs["gate"], codecs["up"]), key=(keys["gate"], keys["up"])
        )
        apart = actjax.linear(X, c, codec=codecs["apart"], key=keys["apart"])
        return jnp.mean(actjax.linear(y, b) ** 2) + jnp.mean(apart**2)

    return jax.grad(loss)(weights)


def test_the_probe_ranks_values_as_algorithm_1_does():
    weights = normal(3, FEATURES, 24), normal(4, 24, 3), normal(6, FEATURES, 2), jnp.ones(FEATURES)
    codecs = dict.fromkeys(("norm", "input", "gate", "up", "apart"), Quantized(4, group=8))
    probe, reference = (
        sensitivity(of_network, codecs, KEY, weights, estimate=estimate, samples=16)
        for estimate in ESTIMATES
    )
    for name in codecs:
        # Each is the mean of 16 squared norms; a factor of two is far beyond their spread.
        assert 0.5 < probe[name] / reference[name] < 2
    # So those further apart than that are ranked alike.
    assert max(reference.values()) > 4 * min(reference.values())
    for a, b in itertools.combinations(codecs, 2):
        if not 0.25 < reference[a] / reference[b] < 4:
            assert (probe[a] > probe[b]) == (reference[a] > reference[b])


def test_what_is_not_read_has_no_sensitivity():
    codecs = {"x": Quantized(4, group=8), "nothing": Quantized(4, group=8)}
    for estimate in ESTIMATES:
        found = sensitivity(of_linear, codecs, KEY, W, estimate=estimate, samples=1)
        assert found["x"] > found["nothing"] == 0


def test_a_key_gives_the_same_estimate_again():
    codecs = {"x": Quantized(4, group=8)}
    first, again, other = (
        sensitivity(of_linear, codecs, key, W, samples=1) for key in (KEY, KEY, jax.random.key(6))
    )
    assert first == again != other


def test_wrong_arguments_are_named():
    codecs = {"x": Quantized(4)}
    with pytest.raises(ValueError, match="`estimate` must be one of"):
        sensitivity(of_linear, codecs, KEY, W, estimate="guess")
    with pytest.raises(ValueError, match="`samples` must be at least 1"):
        sensitivity(of_linear, codecs, KEY, W, samples=0)
    with pytest.raises(TypeError, match=re.escape("must be Quantized, got Exact() for x")):
        sensitivity(of_linear, {"x": Exact()}, KEY, W)
    with pytest.raises(ValueError, match="must have the same names"):
        allocate_bits({"a": 1.0}, {"b": 1}, 4)
    with pytest.raises(ValueError, match="`average_bits` must be at least 1"):
        allocate_bits({"a": 1.0}, {"a": 1}, 0.5)
    with pytest.raises(ValueError, match="`gradients` must be two or more, got 1"):
        sampling_variance([W])


# Allocation.


def test_bits_go_where_they_matter():
    # 75 bits: 10 for c, which gains nothing; 4 for b takes 40, of which 2 for a leaves 5.
    bits = allocate_bits({"a": 1.0, "b": 100.0, "c": 0.0}, {"a": 10, "b": 10, "c": 10}, 2.5)
    assert bits == {"a": 2, "b": 4, "c": 1}


def test_equal_values_get_equal_bits():
    names = ("a", "b", "c")
    assert allocate_bits(dict.fromkeys(names, 2.0), dict.fromkeys(names, 7), 4) == dict.fromkeys(
        names, 4
    )


costs = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 50)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(costs, st.floats(1, 8))
def test_no_choice_within_the_budget_is_better_by_more_than_one_step(pairs, average):
    sensitivities = {str(i): c for i, (c, _) in enumerate(pairs)}
    sizes = {str(i): n for i, (_, n) in enumerate(pairs)}
    budget = average * sum(sizes.values())
    chosen = allocate_bits(sensitivities, sizes, average)
    spent = sum(sizes[name] * n for name, n in chosen.items())
    assert spent <= budget * (1 + 1e-12)
    best = min(
        compression_variance(sensitivities, dict(zip(sizes, bits, strict=True)))
        for bits in itertools.product((1, 2, 3, 4, 8), repeat=len(sizes))
        if sum(n * b for n, b in zip(sizes.values(), bits, strict=True)) <= budget
    )
    # What greedy choice may lose is the first step that did not fit: with it, it would be at least
    # as good as the best (the knapsack bound), as gains for their price only fall.
    following = {1: 2, 2: 3, 3: 4, 4: 8}
    raised = [
        compression_variance(sensitivities, {**chosen, name: following[n]})
        for name, n in chosen.items()
        if n < 8
    ]
    found = compression_variance(sensitivities, chosen)
    assert found <= best * (1 + 1e-9) or min(raised) <= best * (1 + 1e-9)


def test_variances():
    assert compression_variance({"a": 3.0, "b": 9.0}, {"a": 1, "b": 2}) == pytest.approx(3 + 1)
    gradients = [{"w": normal(seed, 200, 50)} for seed in range(4)]
    values = np.stack([g["w"] for g in gradients]).astype(np.float64)
    # Of the mean of four, from what they differ by.
    want = values.var(0, ddof=1).sum() / 4
    np.testing.assert_allclose(sampling_variance(gradients), want, rtol=1e-5)
