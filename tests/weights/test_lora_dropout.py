"""Tests of the dropout of adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.helpers import KEY, assert_close, normal, ones
from ops.operator_cases import DRAWN, OPERATORS, WIDTH, decoded
from weights.lora_cases import problem, run_oracle, with_adapters, with_masks

from actjax import LoRA, PointApproximation, linear


def recovered(operator, xs, key, rate):
    """Returns the factor by which the dropout multiplies each number of the linear input.

    It is the output for a weight of zero and adapters that are identities, divided by the input.
    """
    one, scale = jnp.eye(WIDTH), operator.scale()
    out = operator.call(xs, scale, LoRA(0 * one, one, one, key, 1.0, rate))
    return out / operator.call(xs, scale, one)


@pytest.mark.parametrize(
    ("name", "codec"), [("linear", PointApproximation(points=4)), ("norm", DRAWN)], ids=str
)
def test_dropout_is_the_same_in_both_passes_and_spares_the_weight(name, codec, x64):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, scale, rate = operator.activations(), operator.scale(), 0.25

    @jax.jit
    def run(xs, plain, adapters, keys):
        def fun(xs, plain, adapters):
            adapted = with_adapters(ws[0], plain, ws[2], adapters, keys, rate)
            return operator.call(xs, scale, adapted, bias=biases, codec=codec, key=KEY)

        zs, pullback = jax.vjp(fun, xs, plain, adapters)
        masks = [recovered(operator, xs, key, rate) for key in keys]
        return zs, pullback(dzs), masks, decoded(name, xs, codec)

    zs, (dxs, dplain, dadapters), masks, hats = run(xs, ws[1], adapters, jax.random.split(KEY))
    kept = [np.round(np.asarray(mask) * (1 - rate)) for mask in masks]
    for mask, one in zip(masks, kept, strict=True):
        # Kept numbers are divided by the share that is kept.
        np.testing.assert_allclose(mask, one / (1 - rate), rtol=1e-12, atol=1e-12)
        assert set(np.unique(one)) == {0, 1}
    assert not np.array_equal(*kept)
    weights = with_masks(ws, adapters, [one / (1 - rate) for one in kept])
    want_zs, want_dxs, grads, _ = run_oracle(name, xs, hats, weights, biases, dzs)
    # Float64: sums of up to 40 terms of size 1 to 10, some 1e-16 each.
    got = zs, dxs, (dadapters[0], dplain, dadapters[1])
    assert_close(got, (want_zs, want_dxs, grads), 1e-11, 1e-12)


def test_dropout_sets_each_number_to_zero_at_its_rate():
    rates = 0.1, 0.6

    @jax.jit
    def masks(x, one):
        return [linear(x, LoRA(0 * one, one, one, KEY, 1.0, rate)) == 0 for rate in rates]

    for rate, mask in zip(rates, masks(ones(4000, 8), np.eye(8, dtype=np.float32)), strict=True):
        # Independent coins, by features and by tokens: five standard errors.
        for axis, count in ((0, 4000), (1, 8), (None, 32000)):
            error = np.abs(np.asarray(mask).mean(axis) - rate)
            assert np.all(error <= 5 * np.sqrt(rate * (1 - rate) / count))


def test_dropout_is_unbiased_over_keys(x64):
    x, w, a, b, dz = (normal(i, *s) for i, s in enumerate(((4, 6), (6, 5), (6, 2), (2, 5), (4, 5))))

    @jax.jit
    def samples():
        def sample(key):
            z, pullback = jax.vjp(lambda x, a, b: linear(x, LoRA(w, a, b, key, 2.0, 0.4)), x, a, b)
            return z, *pullback(dz)

        return jax.vmap(sample)(jax.random.split(KEY, 2000))

    results = jax.tree.map(np.asarray, samples())
    x, w, a, b, dz = map(np.asarray, (x, w, a, b, dz))
    low, dlow = 2 * x @ a, 2 * dz @ b.T
    exact = x @ w + low @ b, dz @ w.T + dlow @ a.T, x.T @ dlow, low.T @ dz
    for sample, want in zip(results, exact, strict=True):
        standard_error = np.std(sample, 0) / np.sqrt(2000)
        assert standard_error.min() > 0
        assert np.all(np.abs(np.mean(sample, 0) - want) <= 5 * standard_error)


def test_without_a_key_or_a_rate_nothing_is_dropped():
    x, parts = normal(0, 6, 8), (normal(1, 8, 5), normal(2, 8, 2), normal(3, 2, 5))

    @jax.jit
    def run(x, parts):
        adapters = (
            LoRA(*parts),
            LoRA(*parts, dropout=0.5),
            LoRA(*parts, KEY),
            LoRA(*parts, KEY, dropout=0.5),
        )
        return [linear(x, lora) for lora in adapters]

    want, no_key, no_rate, dropped = run(x, parts)
    np.testing.assert_array_equal(no_key, want)
    np.testing.assert_array_equal(no_rate, want)
    assert not np.allclose(dropped, want)
