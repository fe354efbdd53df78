"""The loss of Direct Preference Optimization, compared with its paper in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import assert_messages

from train.run.preference import dpo_loss, segment_sums

MARGINS = np.array([-1e4, -50.0, -1.0, 0.0, 0.3, 50.0, 1e4])
"""Logarithms of the ratio of the policy's odds to those of the reference."""


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def oracle(chosen, rejected, reference_chosen, reference_rejected, beta, smoothing):
    """Returns loss, rewards, and gradients of chosen and rejected log-probabilities of a pair.

    Rafailov et al., 2023, equation 7, and its gradient (the equation after it, section 4): the
    weight of a pair is `β σ(r_rejected - r_chosen)`. With smoothing, labels are exchanged with that
    probability (Mitchell, 2023).
    """
    rewards = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
    z = rewards[0] - rewards[1]
    loss = -(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z)
    right, wrong = math.exp(log_sigmoid(-z)), math.exp(log_sigmoid(z))
    slope = beta * (smoothing * wrong - (1 - smoothing) * right)
    return loss, *rewards, slope, -slope


def pairs(dtype):
    """Returns log-probabilities of the policy and the reference, [7] each."""
    rejected, reference_chosen, reference_rejected = np.random.default_rng(0).uniform(
        -90, 0, (3, 7)
    )
    chosen = MARGINS + rejected + reference_chosen - reference_rejected
    arrays = chosen, rejected, reference_chosen, reference_rejected
    return [x.astype(dtype) for x in arrays]


@functools.partial(jax.jit, static_argnames=("beta", "label_smoothing"))
def run(*arrays, **options):
    """Returns the result, and the gradients of the sum of losses of all four arguments."""

    def total(*arrays):
        result = dpo_loss(*arrays, **options)
        return jnp.sum(result.loss), result

    return jax.grad(total, (0, 1, 2, 3), has_aux=True)(*arrays)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_rewards_and_gradients_are_those_of_the_paper(smoothing, x64):
    arrays = pairs(np.float64)
    gradients, result = run(*arrays, beta=0.2, label_smoothing=smoothing)
    got = result.loss, result.chosen_reward, result.rejected_reward, *gradients[:2]
    want = zip(*(oracle(*pair, 0.2, smoothing) for pair in zip(*arrays, strict=True)), strict=True)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float64
        # The margin, a difference of numbers up to 1e4, errs by some 1e-12.
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-300)
    # Equal rewards, in the middle, may differ by a rounding.
    np.testing.assert_array_equal(np.delete(result.is_correct, 3), np.delete(MARGINS > 0, 3))
    np.testing.assert_array_equal(gradients[2:], 0)  # The reference is a constant.


def test_float32_is_as_accurate_and_finite():
    arrays = pairs(np.float32)
    arrays[0][0], arrays[0][-1] = -1e30, 1e30
    gradients, result = run(*arrays, beta=0.2, label_smoothing=0.1)
    wide = zip(*map(np.float64, arrays), strict=True)
    want = zip(*(oracle(*pair, 0.2, 0.1) for pair in wide), strict=True)
    got = result.loss, result.chosen_reward, result.rejected_reward, *gradients[:2]
    for a, b in zip(got, want, strict=True):
        # Differences of numbers up to 100 are rounded by 1e-5, and so is the exponent.
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=1e-5)


def test_equal_rewards_cost_log_two_and_are_not_correct():
    zeros = np.zeros(1, np.float32)
    _, result = run(zeros - 3, zeros - 7, zeros - 3, zeros - 7, beta=0.5, label_smoothing=0.1)
    np.testing.assert_allclose(result.loss, math.log(2), rtol=1e-6)
    assert not result.is_correct[0]


# Rows with 1, 2 and 3 responses, gaps and padding.
SEGMENTS = np.array([[1, 1, 1, 0, 0, 0], [1, 0, 2, 2, 0, 0], [1, 1, 2, 3, 3, 3]], np.int32)
sums_of = jax.jit(segment_sums, static_argnums=2)


def test_sums_of_segments_leave_out_padding():
    log_probs = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    want = [[sum(log_probs[b, SEGMENTS[b] == n]) for n in (1, 2, 3)] for b in range(3)]
    np.testing.assert_allclose(sums_of(log_probs, SEGMENTS, 3), want, rtol=1e-5, atol=1e-6)
    weights = np.arange(9, dtype=np.float32).reshape(3, 3)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(weights * segment_sums(x, SEGMENTS, 3))))
    of_tokens = np.take_along_axis(weights, np.maximum(SEGMENTS - 1, 0), 1)
    np.testing.assert_array_equal(gradient(log_probs), np.where(SEGMENTS > 0, of_tokens, 0))


def test_a_nan_stays_in_its_segment_and_a_number_outside_makes_its_row_nan():
    log_probs = np.zeros((3, 6), np.float32)
    log_probs[2, 2] = log_probs[1, 1] = np.nan  # The latter is padding.
    nan = np.zeros((3, 3), bool)
    nan[2, 1] = True
    np.testing.assert_array_equal(np.isnan(sums_of(log_probs, SEGMENTS, 3)), nan)
    for number in (-1, 4):
        segments = SEGMENTS.copy()
        segments[0, 5] = number
        outside = np.isnan(sums_of(log_probs, segments, 3))
        np.testing.assert_array_equal(outside, nan | np.array([[True], [False], [False]]))


def test_messages():
    x, y = np.zeros(4, np.float32), np.zeros((4, 1), np.float32)
    assert_messages(ValueError, [
        *((lambda beta=beta: dpo_loss(x, x, x, x, beta=beta),
           f"`beta` must be above 0, got {beta}.")
          for beta in (0.0, -1.0, math.nan)),
        *((lambda e=e: dpo_loss(x, x, x, x, beta=0.1, label_smoothing=e),
           f"`label_smoothing` must be in [0, 0.5), got {e}") for e in (0.5, -0.1, math.nan)),
        (lambda: dpo_loss(x, x, x, y, beta=0.1), "four arrays [B], got (4,), (4,), (4,), (4, 1)."),
        (lambda: dpo_loss(y, y, y, y, beta=0.1), "four arrays [B], got (4, 1)"),
        (lambda: segment_sums(x, np.zeros(4, int), 1), "must both be [B, S], got (4,) and (4,)."),
        (lambda: segment_sums(y, np.zeros((4, 2), int), 1), "got (4, 1) and (4, 2)."),
    ])  # fmt: skip
