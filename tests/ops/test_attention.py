"""Tests of actjax/ops/attention.py: exact values and gradients.

The forms in plain JAX run here. test_gpu.py compares cuDNN's form with the same oracle.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cheap_codecs import Coarse
from ops.attention_cases import oracle, problem, run_each, value_and_gradients
from ops.helpers import BF16, assert_close, composed, of_all_sizes, tables

from actjax import attention


@functools.partial(jax.jit, static_argnames="causal")
def run(q, k, v, dout, causal=True):
    return value_and_gradients(q, k, v, dout, causal=causal, implementation="blockwise")


@jax.jit
def causal_and_full(*arguments):
    return [run(*arguments, causal=causal) for causal in (True, False)]


# Blocks have 256 positions: one query, a ragged second block, two whole blocks. Three blocks, the
# last ragged, are in test_attention_masks.py.
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(1, 2, 1), (257, 6, 2), (512, 3, 1)])
def test_value_and_gradients_agree_with_the_oracle(length, heads, kv_heads, x64):
    arguments = problem(2 if length < 512 else 1, length, heads, kv_heads, 4)
    for got, causal in zip(causal_and_full(*arguments), (True, False), strict=True):
        assert all(x.dtype == jnp.float64 for x in got)
        # Sums of up to 512 terms of size 1, in another order.
        assert_close(got, oracle(*arguments, causal), 1e-11, 1e-13)


def test_recomputation_and_merged_heads_change_no_gradient():
    arguments = problem(2, 6, 4, 2, 8)
    cases = {}, {"recompute": True}, {"merge_heads": True}
    stored, again, merged = run_each(arguments, [{"rope": tables(6, 8)} | case for case in cases])
    # The same operations on the same numbers.
    assert_close(again, stored, 1e-6, 1e-6)
    assert merged[0].shape == (2, 6, 32)
    assert_close(merged[0], np.reshape(stored[0], (2, 6, 32)), 1e-6, 1e-6)
    assert_close(merged[1:], stored[1:], 1e-6, 1e-6)


def test_causal_attention_is_the_default_and_sees_no_future():
    q, k, v, _ = problem(1, 300, 1, 1, 4)
    run = jax.jit(attention)
    out = np.asarray(run(q, k, v))
    for position in (0, 255, 256, 299):
        changed = [np.array(x) for x in (q, k, v)]
        for x in changed:
            x[:, position + 1 :] = 1e3
        # Later positions do not even change the rounding.
        np.testing.assert_array_equal(run(*changed)[:, position], out[:, position])


# Precision.


def test_bfloat16_accumulates_in_float32():
    q, k, v, dout = problem(1, 300, 4, 2, 16, jnp.bfloat16)
    got, want = run(q, k, v, dout), oracle(q, k, v, dout)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    out, *grads = (np.float64(x) for x in got)
    # Weights and output are rounded once each; float32 inside errs by 1e-5 at most.
    terms = oracles.attention(q, k, np.abs(np.float64(v)), True)
    assert np.all(np.abs(out - want[0]) <= BF16 * terms + BF16 * np.abs(want[0]) + 1e-5)
    for grad, exact in zip(grads, want[1:], strict=True):
        # The output, weights or scores' gradients, and the result: three roundings, each of which
        # is at most BF16 of what it rounds, and on average half of that.
        assert np.linalg.norm(grad - exact) <= 1.5 * BF16 * np.linalg.norm(exact)


def test_with_a_codec_bfloat16_accumulates_in_float32():
    *inputs, dout = problem(1, 64, 4, 2, 16, jnp.bfloat16)
    codec = Coarse()

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(functools.partial(attention, codec=codec), q, k, v)
        return (
            out,
            attention(q, k, v),
            pull(dout),
            [codec.decode(codec.encode(x)) for x in (q, k, v)],
        )

    out, exact, got, hats = run(*inputs)
    np.testing.assert_array_equal(out, exact)
    for grad, want in zip(got, oracle(*hats, dout)[1:], strict=True):
        assert grad.dtype == jnp.bfloat16
        # Three roundings, as above.
        assert np.linalg.norm(np.float64(grad) - want) <= 1.5 * BF16 * np.linalg.norm(want)


def test_equal_scores_give_the_mean_of_all_values():
    # The weights are 1 / 2048: sums of them in bfloat16 would stop at 256 / 2048.
    zeros, threes, ones = (np.full((1, 2048, 1, 1), x, jnp.bfloat16) for x in (0, 3, 1))
    out, _, _, dv = run(zeros, zeros, threes, ones, causal=False)
    np.testing.assert_array_equal(np.float32(out), 3)
    np.testing.assert_array_equal(np.float32(dv), 1)


def test_equal_values_give_queries_and_keys_no_gradient():
    # The output is exactly 3, and `dweights - Σ out dout` is zero up to float32 rounding.
    q, k, _, dout = problem(1, 32, 2, 2, 16, jnp.bfloat16)
    _, dq, dk, _ = run(q, k, np.full(k.shape, 3, jnp.bfloat16), dout, causal=False)
    # Two sums of 16 products; then a mean over 32 keys, or a sum over 32 queries.
    error = 2 * 16 * 2.0**-24 * 3 * np.abs(np.float32(dout)).sum(-1).max()
    assert np.abs(np.float32(dq)).max() <= error * np.abs(np.float32(k)).max()
    assert np.abs(np.float32(dk)).max() <= 32 * error * np.abs(np.float32(q)).max()


def test_output_lies_between_the_values_and_all_is_finite():
    # Scores stay below 2e7, where float32 still tells 1 apart.
    scale = np.repeat(np.float32([0, 1e-30, 1, 4]), 50).reshape(-1, 1, 1, 1)
    q, k, v = (scale * of_all_sizes(i, 200, 3, 1, 2, largest=10) for i in range(3))
    size = np.abs(v).max((1, 2, 3), keepdims=True) * 1e-6
    for causal, results in zip(
        (True, False), causal_and_full(q, k, v, np.ones_like(q)), strict=True
    ):
        out, *grads = map(np.float64, results)
        assert np.all(out >= v.min(1, keepdims=True) - size)
        assert np.all(out <= v.max(1, keepdims=True) + size)
        if causal:
            # The first position sees itself alone. Subnormal numbers may be flushed to zero.
            np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6, atol=2e-38)
        assert all(np.isfinite(grad).all() for grad in grads)


def test_padding_does_not_win_over_scores_far_below_zero(x64):
    # Real scores are about -1e4, those of the padding 0.
    q, k, v, dout = problem(2, 257, 6, 2, 4)
    q, k = np.abs(q) + 50, -np.abs(k) - 50
    for got, causal in zip(causal_and_full(q, k, v, dout), (True, False), strict=True):
        # A score of 1e4 is rounded by 1e-12, and so is the exponential of it, relatively.
        assert_close(got, oracle(q, k, v, dout, causal), 1e-9, 1e-9)


def test_gradients_are_the_same_under_scan_vmap_and_checkpoint():
    inputs = [np.asarray(x) for x in problem(4, 7, 4, 2, 4)[:3]]
    total = lambda *xs: jnp.sum(jnp.sin(composed(attention)(*xs)))  # noqa: E731
    run = jax.jit(jax.grad(total, (0, 1, 2)))
    got = run(*(x.reshape(2, 2, 1, *x.shape[1:]) for x in inputs))
    want = oracles.attention_vjp(*inputs, np.cos(oracles.attention(*inputs, True)), True)
    for grad, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(np.reshape(grad, exact.shape), exact, rtol=1e-5, atol=1e-6)


# All scores at once.


def test_the_dense_form_agrees_with_the_oracle():
    arguments = problem(2, 7, 4, 2, 4)
    cases = [{"implementation": "dense", "causal": causal} for causal in (True, False)]
    for got, case in zip(run_each(arguments, cases), cases, strict=True):
        assert all(x.dtype == jnp.float32 for x in got)
        assert_close(got, oracle(*arguments, case["causal"]), 1e-5, 1e-5)  # Float32.


def test_the_dense_form_has_second_derivatives():
    q, k, v, direction = problem(1, 5, 2, 2, 4)

    def by_definition(q, k, v):
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / 2
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bhst,bthd->bshd", weights, v)

    def curvature(fun, *inputs):
        loss = lambda *args: jnp.sum(jnp.sin(fun(*args)))  # noqa: E731
        along = lambda *args: jnp.vdot(jax.grad(loss)(*args), direction)  # noqa: E731
        return jax.grad(along, (0, 1, 2))(*inputs)

    dense = functools.partial(attention, implementation="dense")
    run = jax.jit(lambda *args: [curvature(f, *args) for f in (dense, by_definition)])
    assert_close(*run(q, k, v), 1e-4, 1e-4)  # Float32, sums of at most 40 terms.


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has cuDNN")
def test_an_implementation_that_the_device_lacks_raises():
    q = np.ones((2, 5, 4, 8), jnp.bfloat16)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        attention(q, q, q, implementation="cudnn")
