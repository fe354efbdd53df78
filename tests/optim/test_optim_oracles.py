"""Oracles of the optimizers, compared with other ways to compute them, without the library."""

import numpy as np
import pytest
from optim.optim_oracles import (
    blockwise_round_trip,
    dynamic_levels,
    galore_adam,
    nearest_level,
    top_left_singular_vectors,
)

HYPER = {"lr": 0.05, "scale": 0.25, "b1": 0.9, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.1}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def adamw(w, grads, *, lr, scale, b1, b2, eps, weight_decay):
    """Returns the weights of AdamW with a scaled update, with moments as sums over past steps."""
    history = []
    for t in range(1, len(grads) + 1):
        past = list(enumerate(grads[:t]))
        m = sum((1 - b1) * b1 ** (t - 1 - i) * g for i, g in past) / (1 - b1**t)
        v = sum((1 - b2) * b2 ** (t - 1 - i) * g * g for i, g in past) / (1 - b2**t)
        w = (1 - lr * weight_decay) * w - lr * scale * m / (np.sqrt(v) + eps)
        history.append(w)
    return history


def test_galore_in_the_whole_space_is_adamw_with_a_scaled_update(rng):
    w, grads = rng.normal(size=(6, 4)), rng.normal(size=(5, 6, 4))
    want = adamw(w, grads, **HYPER)
    np.testing.assert_allclose(galore_adam(w, grads, np.eye(6), **HYPER), want, rtol=1e-12)
    got = galore_adam(w, grads, np.eye(4), side="output", **HYPER)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_galore_on_one_side_is_the_transpose_of_the_other_and_stays_in_the_span(rng):
    w, grads, p = rng.normal(size=(6, 4)), rng.normal(size=(5, 6, 4)), orthonormal(rng, 6, 2)
    got = galore_adam(w, grads, p, **HYPER)
    turned = galore_adam(w.T, grads.swapaxes(1, 2), p, side="output", **HYPER)
    np.testing.assert_allclose(got, np.swapaxes(turned, 1, 2), rtol=1e-12)
    moved = galore_adam(w, grads, p, **{**HYPER, "weight_decay": 0.0})[-1] - w
    np.testing.assert_allclose(p @ (p.T @ moved), moved, atol=1e-14)
    assert np.linalg.norm(moved) > 0.01
    with pytest.raises(ValueError, match=r"basis \(6, 2\) does not fit .* on the output side"):
        galore_adam(w, grads, p, side="output", **HYPER)


def test_top_left_singular_vectors_are_eigenvectors_of_the_gram_matrix(rng):
    a = rng.normal(size=(6, 4))
    u = top_left_singular_vectors(a, 2)
    want = np.linalg.eigh(a @ a.T)[1][:, -2:]
    np.testing.assert_allclose(u @ u.T, want @ want.T, atol=1e-12)


@pytest.mark.parametrize(("unsigned", "count", "lowest"), [(False, 255, 1e-6), (True, 256, 1e-7)])
def test_levels_are_distinct_and_reach_from_the_lowest_decade_to_one(unsigned, count, lowest):
    levels = dynamic_levels(unsigned)
    assert len(np.unique(levels)) == len(levels) == count
    assert levels[-1] == 1
    assert levels[levels > 0][0] == pytest.approx(lowest, rel=1e-12)
    if not unsigned:
        np.testing.assert_array_equal(levels, -levels[::-1])
    for decade in range(7):
        inside = (levels > 10.0 ** -(decade + 1) * (1 + 1e-9)) & (levels <= 10.0**-decade)
        assert inside.sum() == 2 ** ((7 if unsigned else 6) - decade)


def test_the_nearest_level_is_found():
    np.testing.assert_array_equal(nearest_level([0.4, -2, 0.6], [-1, 0, 1]), [0, -1, 1])
    levels = dynamic_levels(False)
    np.testing.assert_array_equal(nearest_level(levels, levels), levels)


def test_blocks_are_rounded_independently(rng):
    x = rng.normal(size=(2, 3, 37))
    x[0, 1, :16] = 0
    once = blockwise_round_trip(x, False, 16)
    assert not once[0, 1, :16].any()
    np.testing.assert_allclose(blockwise_round_trip(once, False, 16), once, rtol=1e-14)
    np.testing.assert_array_equal(once[..., 32:], blockwise_round_trip(x[..., 32:], False, 16))
    assert np.max(np.abs(once - x)) <= 0.45 / 64 * np.max(np.abs(x)) * (1 + 1e-12)
    low = blockwise_round_trip([2, 1e-12, 0], True, 8)
    np.testing.assert_allclose(low, [2, 2e-7, 0], rtol=1e-12)
