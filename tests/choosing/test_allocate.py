"""Tests of sensitivities of the gradient, and of the allocation of bits."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import assert_messages

import actjax
from actjax import (
    Exact,
    Quantized,
    allocate_bits,
    compression_variance,
    sampling_variance,
    sensitivity,
)
from actjax.choosing.allocate import error_of_bits, fewest_bits
from actjax.choosing.measure import Sensitivity

KEY = jax.random.key(5)
TOKENS, FEATURES = 48, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, W, DZ = normal(0, TOKENS, FEATURES), normal(1, FEATURES, 5), normal(2, TOKENS, 5)


def of_linear(codecs, keys, w):
    """Returns the gradient of a linear operator whose input is stored with the codec `x`."""
    linear = lambda w: actjax.linear(X, w, codec=codecs["x"], key=keys["x"])  # noqa: E731
    return jax.grad(lambda w: jnp.sum(DZ * linear(w)))(w)


def variance_of_linear(bits):
    """Returns the variance of `dw = x_hatᵀ dz` with independent errors `t (1 - t) Δ²`."""
    x, dz = np.float64(X), np.float64(DZ)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    share = (x - low) / scale % 1
    return np.sum(share * (1 - share) * scale**2 * np.sum(dz**2, 1, keepdims=True))


def test_the_sensitivity_of_a_linear_operator_agrees_with_theory():
    codec = Quantized(4, group=FEATURES, rounding="stochastic", scale_dtype="float32")
    measure = Sensitivity(of_linear, {"x": codec, "unread": codec})
    samples = [measure(key, W, samples=5) for key in jax.random.split(KEY, 12)]
    want = variance_of_linear(4) / error_of_bits(4)
    # A squared norm of 80 roughly normal numbers has a relative deviation of sqrt(2 / 80) = 0.16
    # and the mean of 60 has 0.02; this allows five of them.
    np.testing.assert_allclose(np.mean([s["x"] for s in samples]), want, rtol=0.12)
    assert all(s["unread"] == 0 for s in samples)
    # The estimate depends on the key only.
    again = measure(jax.random.split(KEY, 12)[0], W, samples=5)
    assert samples[0] == again != samples[1]


def test_messages():
    codecs = {"x": Quantized(4)}
    assert_messages(ValueError, [
        (lambda: sensitivity(of_linear, codecs, KEY, W, samples=0), "`samples` must be at least 1"),
        (lambda: allocate_bits({"a": 1.0}, {"b": 1}, 4), "must have the same names"),
        (lambda: allocate_bits({"a": 1.0}, {"a": 1}, 0.5), "`average_bits` must be at least 1"),
        (lambda: sampling_variance([W]), "`gradients` must be two or more, got 1"),
    ])  # fmt: skip
    with pytest.raises(TypeError, match=re.escape("must be Quantized, got Exact() for x")):
        sensitivity(of_linear, {"x": Exact()}, KEY, W)


# Allocation.


def test_sensitive_tensors_get_more_bits():
    # 75 bits: c gains nothing and gets 1 each (10), b gets 4 each (40), a 2 each (20); 5 are left.
    bits = allocate_bits({"a": 1.0, "b": 100.0, "c": 0.0}, {"a": 10, "b": 10, "c": 10}, 2.5)
    assert bits == {"a": 2, "b": 4, "c": 1}


def test_bits_go_where_they_gain_most_for_each_byte():
    # 90 bits, of which each tensor takes 1 bit a value at first. The other 30 lower the sum by
    # 1.5 * 8/9 in `wide`, or by 3 * 8/9 in the three others.
    sensitivities = {"a": 1.0, "b": 1.0, "c": 1.0, "wide": 1.5}
    sizes = {"a": 10, "b": 10, "c": 10, "wide": 30}
    assert allocate_bits(sensitivities, sizes, 1.5) == {"a": 2, "b": 2, "c": 2, "wide": 1}


def test_equal_values_get_equal_bits():
    bits = allocate_bits(dict.fromkeys("abc", 2.0), dict.fromkeys("abc", 7), 4)
    assert bits == dict.fromkeys("abc", 4)


costs = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 50)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(costs, st.floats(1, 8))
@example([(0.0, 1), (5e-324, 2), (5e-324, 2)], 2.0)
def test_the_allocation_is_the_best_one(pairs, average):
    cost, sizes = np.array(pairs).T
    # Quotients of the smallest floats would be rounded to nothing.
    cost_share = cost / (cost.max() or 1.0)
    names = [str(i) for i in range(len(pairs))]
    chosen = allocate_bits(
        dict(zip(names, cost.tolist(), strict=True)),
        dict(zip(names, sizes.astype(int).tolist(), strict=True)),
        average,
    )
    every = np.array(list(itertools.product((1, 2, 3, 4, 5, 6, 8), repeat=len(pairs))))
    every = np.array([[chosen[name] for name in names], *every])
    spent, variance = every @ sizes, (2.0**every - 1) ** -2 @ cost_share
    budget = average * sizes.sum()
    assert spent[0] <= budget * (1 + 1e-12)
    assert variance[0] <= variance[spent <= budget].min() * (1 + 1e-9)


def test_many_tensors_spend_their_budget():
    generator = np.random.default_rng(0)
    sensitivities = {str(i): 10.0 ** generator.uniform(-6, 2) for i in range(60)}
    sizes = {name: int(10 ** generator.uniform(2, 6)) for name in sensitivities}
    chosen = allocate_bits(sensitivities, sizes, 3.0)
    spent = sum(sizes[name] * n for name, n in chosen.items()) / sum(sizes.values())
    assert 3.0 * 0.999 < spent <= 3.0
    uniform = dict.fromkeys(sizes, 3)
    variance, uniform = (compression_variance(sensitivities, b) for b in (chosen, uniform))
    assert variance < uniform


def test_a_choice_may_be_to_keep():
    bits = allocate_bits({"a": 1e6, "b": 1.0}, {"a": 1, "b": 100}, 3.0, (2, 4, 32))
    assert bits == {"a": 32, "b": 2}


def test_bits_within_a_bound():
    sizes, choices = {"a": 1000, "b": 1000, "c": 10}, (2, 3, 4, 5, 6, 8, 32)
    at_4_bits = {"a": 1e-2, "b": 1e-6, "c": 1e-1}
    sensitivities = {name: v / error_of_bits(4) for name, v in at_4_bits.items()}
    bits = fewest_bits(sensitivities, sizes, 1e-3, choices)
    assert compression_variance(sensitivities, bits) <= 1e-3
    assert bits["c"] > bits["a"] > bits["b"] == 2
    assert fewest_bits(sensitivities, sizes, 1e-12, choices) == dict.fromkeys(sizes, 32)
    assert fewest_bits(sensitivities, sizes, 1e9, choices) == dict.fromkeys(sizes, 2)


def test_variances():
    assert compression_variance({"a": 3.0, "b": 9.0}, {"a": 1, "b": 2}) == pytest.approx(3 + 1)
    gradients = [{"w": normal(seed, 200, 50)} for seed in range(4)]
    values = np.stack([g["w"] for g in gradients]).astype(np.float64)
    # The variance of the mean of four.
    want = values.var(0, ddof=1).sum() / 4
    np.testing.assert_allclose(sampling_variance(gradients), want, rtol=1e-5)
