"""Tests of sensitivities of the gradient, and of the allocation of bits."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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

KEY = jax.random.key(5)
TOKENS, FEATURES = 48, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, W, DZ = normal(0, TOKENS, FEATURES), normal(1, FEATURES, 5), normal(2, TOKENS, 5)


def of_linear(codecs, keys, w):
    """Returns the gradient of a linear operator whose input is stored with the codec `x`."""
    return jax.grad(lambda w: jnp.sum(DZ * actjax.linear(X, w, codec=codecs["x"], key=keys["x"])))(
        w
    )


def variance_of_linear(bits):
    """Returns the variance of `dw = x_hatᵀ dz` with independent errors `t (1 - t) Δ²`."""
    x, dz = np.float64(X), np.float64(DZ)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    share = (x - low) / scale % 1
    return np.sum(share * (1 - share) * scale**2 * np.sum(dz**2, 1, keepdims=True))


def test_the_sensitivity_of_a_linear_operator_agrees_with_theory():
    codecs = {"x": Quantized(4, group=FEATURES, rounding="stochastic", scale_dtype="float32")}
    found = sensitivity(of_linear, codecs, KEY, W, samples=60)
    want = variance_of_linear(4) / error_of_bits(4)
    # A squared norm of 80 roughly normal numbers has a relative deviation of sqrt(2 / 80) = 0.16
    # and the mean of 60 has 0.02; this allows five of them.
    np.testing.assert_allclose(found["x"], want, rtol=0.12)


def test_an_unread_tensor_has_no_sensitivity():
    codecs = {"x": Quantized(4, group=8), "nothing": Quantized(4, group=8)}
    found = sensitivity(of_linear, codecs, KEY, W, samples=1)
    assert found["x"] > found["nothing"] == 0


def test_the_estimate_depends_on_the_key_only():
    codecs = {"x": Quantized(4, group=8)}
    first, again, other = (
        sensitivity(of_linear, codecs, key, W, samples=1) for key in (KEY, KEY, jax.random.key(6))
    )
    assert first == again != other


def test_invalid_arguments_are_refused():
    codecs = {"x": Quantized(4)}
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
    names = ("a", "b", "c")
    assert allocate_bits(dict.fromkeys(names, 2.0), dict.fromkeys(names, 7), 4) == dict.fromkeys(
        names, 4
    )


costs = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 50)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(costs, st.floats(1, 8))
@example([(0.0, 1), (5e-324, 2), (5e-324, 2)], 2.0)
def test_the_allocation_is_the_best_one(pairs, average):
    sensitivities = {str(i): c for i, (c, _) in enumerate(pairs)}
    sizes = {str(i): n for i, (_, n) in enumerate(pairs)}
    budget = average * sum(sizes.values())
    chosen = allocate_bits(sensitivities, sizes, average)
    spent = sum(sizes[name] * n for name, n in chosen.items())
    assert spent <= budget * (1 + 1e-12)
    # Quotients of the smallest floats would be rounded to nothing.
    largest = max(sensitivities.values()) or 1.0
    sensitivities = {name: c / largest for name, c in sensitivities.items()}
    best = min(
        compression_variance(sensitivities, dict(zip(sizes, bits, strict=True)))
        for bits in itertools.product((1, 2, 3, 4, 5, 6, 8), repeat=len(sizes))
        if sum(n * b for n, b in zip(sizes.values(), bits, strict=True)) <= budget
    )
    assert compression_variance(sensitivities, chosen) <= best * (1 + 1e-9)


def test_many_tensors_spend_their_budget():
    generator = np.random.default_rng(0)
    sensitivities = {str(i): 10.0 ** generator.uniform(-6, 2) for i in range(300)}
    sizes = {name: int(10 ** generator.uniform(2, 6)) for name in sensitivities}
    chosen = allocate_bits(sensitivities, sizes, 3.0)
    spent = sum(sizes[name] * n for name, n in chosen.items()) / sum(sizes.values())
    assert 3.0 * 0.999 < spent <= 3.0
    uniform = dict.fromkeys(sizes, 3)
    assert compression_variance(sensitivities, chosen) < compression_variance(
        sensitivities, uniform
    )


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
