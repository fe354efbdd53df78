"""Oracles of the optimizers, compared with other ways to compute them, without the library."""

import jax
import numpy as np
import optax
import pytest
from optim.optim_oracles import (
    blockwise_round_trip,
    dynamic_levels,
    galore_adam,
    nearest_level,
    top_left_singular_vectors,
)
from optim.state_oracles import (
    AdamState,
    FactoredState,
    FiraState,
    adam_4bit_step,
    factored_adam_step,
    fira_step,
    limit_growth,
    quantize_blocks,
    quantize_rank_one,
    quantize_signed,
)

ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-3}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def adam_of_past(grads, b1, b2, eps):
    """Returns Adam's update after the last gradient, with moments as sums over all of them."""
    t = len(grads)
    m = sum((1 - b1) * b1 ** (t - 1 - i) * g for i, g in enumerate(grads)) / (1 - b1**t)
    v = sum((1 - b2) * b2 ** (t - 1 - i) * g * g for i, g in enumerate(grads)) / (1 - b2**t)
    return m / (np.sqrt(v) + eps)


def test_blocks_of_a_small_row():
    x = [[2, -0.44, 0.001, 0, 0, -8, 3.5, 0.4]]
    # Scales 2, 8 and 3.5; 0.22 rounds to 0.2, 0.0005 to 0, and 0.4 / 3.5 to 0.1.
    decoded, ties = quantize_blocks(x, 3)
    np.testing.assert_allclose(decoded, [[2, -0.4, 0, 0, 0, -8, 3.5, 0.35]], rtol=1e-12)
    assert not ties.any()
    for offset, tie in [(0, True), (5e-7, True), (-5e-7, True), (2e-6, False)]:
        _, ties = quantize_blocks([1, 0.5 + offset, 0, 0.05 + offset], 4)
        np.testing.assert_array_equal(ties, [False, tie, False, tie])


def test_scales_of_rows_and_columns_of_a_small_matrix():
    # Scales: rows 10, 1 and columns 10, 2; divided: [[1, -0.2], [0.45, 1]], of scales 1 and 1.
    decoded, ties = quantize_signed([[10, -0.42], [0.44, 2]])
    np.testing.assert_allclose(decoded, [[10, -0.4], [0.4, 2]], rtol=1e-12)
    assert not ties.any()
    # In blocks of one, every number is its own scale.
    m = [[10, -0.42, 0], [0.44, 2, 0]]
    np.testing.assert_allclose(quantize_signed(m, 1)[0], m, rtol=1e-12)
    _, ties = quantize_signed([[1, 0.35], [0, 1]])
    np.testing.assert_array_equal(ties, [[False, True], [False, False]])


def test_rank_one_of_a_small_matrix():
    v = [[16, 4, 0], [1, 0.3, 0], [0, 0, 0]]
    # Scales: rows 16, 1, 0 and columns 16, 4, 0.
    decoded, ties = quantize_rank_one(v)
    np.testing.assert_allclose(decoded, [[16, 4, 0], [1, 0.3125, 0], [0, 0, 0]], rtol=1e-12)
    assert not ties.any()
    # 5.5 of 16 levels is a tie; zero takes the lowest level where its row and column are not zero.
    decoded, ties = quantize_rank_one([[1, 5.5 / 16], [0, 1]])
    assert decoded[1, 0] == 1 / 16
    np.testing.assert_array_equal(ties, [[False, True], [False, False]])
    with pytest.raises(ValueError, match="negative"):
        quantize_rank_one([[-1.0]])


def test_rank_one_of_a_large_matrix(rng):
    v = rng.random((6, 9)) ** 4
    once, _ = quantize_rank_one(v)
    np.testing.assert_allclose(quantize_rank_one(v.T)[0], once.T)
    np.testing.assert_array_equal(once.max(axis=1), v.max(axis=1))
    np.testing.assert_array_equal(once.max(axis=0), v.max(axis=0))
    np.testing.assert_allclose(quantize_rank_one(once)[0], once, rtol=1e-14)
    for i, j in np.ndindex(v.shape):
        scale = min(v[i].max(), v[:, j].max())
        code = np.clip(np.round(16 * v[i, j] / scale), 1, 16)
        assert once[i, j] == pytest.approx(code / 16 * scale, rel=1e-14)


def test_adam_of_4_bits_rounds_its_state_and_not_its_update(rng):
    grads = rng.normal(size=(3, 6, 40))
    first, state = adam_4bit_step(grads[0], AdamState(), 1, **ADAM, block=16)
    np.testing.assert_allclose(first, adam_of_past(grads[:1], **ADAM), rtol=1e-12)
    m, v = 0.1 * grads[0], 0.01 * grads[0] ** 2
    np.testing.assert_allclose(state.m, quantize_signed(m, 16)[0], rtol=1e-12)
    np.testing.assert_allclose(state.v, quantize_rank_one(v)[0], rtol=1e-12)
    second, _ = adam_4bit_step(grads[1], state, 2, **ADAM, block=16)
    m, v = 0.9 * state.m + 0.1 * grads[1], 0.99 * state.v + 0.01 * grads[1] ** 2
    want = (m / 0.19) / (np.sqrt(v / 0.0199) + 1e-3)
    np.testing.assert_allclose(second, want, rtol=1e-12)
    assert np.abs(second - adam_of_past(grads[:2], **ADAM)).max() > 0.1


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_factored_adam_is_the_factored_rms_of_optax(rng, shape):
    b2, state, grads = 0.9, FactoredState(), rng.normal(size=(4, *shape))

    # A decay that grows in this way is a constant one with a bias correction.
    def decay(i, _):
        return b2 * (1 - b2**i) / (1 - b2 ** (i + 1.0))

    rms = optax.scale_by_factored_rms(min_dim_size_to_factor=1, decay_rate_fn=decay)

    @jax.jit
    def run(grads):
        step = lambda state, g: rms.update(g, state, g)[::-1]  # noqa: E731
        return jax.lax.scan(step, rms.init(grads[0]), grads)[1]

    for t, (g, want) in enumerate(zip(grads, run(np.float32(grads)), strict=True), start=1):
        update, state = factored_adam_step(g, state, t, 0.0, b2, 0.0)
        np.testing.assert_allclose(update, want, rtol=1e-5, atol=1e-5)
    assert state.m is None


def test_factored_adam_is_adam_if_squares_have_rank_one(rng):
    scales, signs = np.outer(rng.random(5), rng.random(7)), rng.choice([-1.0, 1.0], (4, 5, 7))
    state = FactoredState()
    for t in range(1, 5):
        update, state = factored_adam_step(scales * signs[t - 1], state, t, **ADAM)
    np.testing.assert_allclose(update, adam_of_past(scales * signs, **ADAM), rtol=1e-10)
    zero, _ = factored_adam_step(np.zeros((2, 3)), FactoredState(), 1, **ADAM)
    assert not zero.any()


def test_growth_is_limited_by_the_norm_that_was_returned():
    x, norm = limit_growth([3, 4], None, 1.5)
    np.testing.assert_array_equal(x, [3, 4])
    assert norm == 5
    x, norm = limit_growth([6, 8], norm, 1.5)
    np.testing.assert_allclose(x, [4.5, 6])
    assert norm == 7.5
    assert limit_growth([60, 80], norm, 1.5)[1] == 11.25
    assert limit_growth([0.3, 0.4], norm, 1.5)[1] == 0.5
    assert not limit_growth([3, 4], 0.0, 1.5)[0].any()


def test_fira_is_galore_in_the_subspace(rng):
    w, grads, p = rng.normal(size=(6, 4)), rng.normal(size=(3, 6, 4)), orthonormal(rng, 6, 2)
    want = np.diff([w, *galore_adam(w, grads, p, lr=1, scale=0.25, **ADAM)], axis=0)
    state, norms = FiraState(), []
    for t, (g, moved) in enumerate(zip(grads, want, strict=True)):
        update, state = fira_step(g, p, state, 0.25, **ADAM)
        np.testing.assert_allclose(p.T @ update, -(p.T @ moved), rtol=1e-12)
        outside = update - p @ (p.T @ update)
        assert np.linalg.norm(outside) == pytest.approx(0.25 * state.norm)
        # Columns outside the subspace are those of the remainder, times one factor of the limit.
        remainder = g - p @ (p.T @ g)
        sizes = np.linalg.norm(p.T @ moved, axis=0) / np.linalg.norm(p.T @ g, axis=0)
        factor = np.linalg.norm(outside) / np.linalg.norm(sizes * remainder)
        np.testing.assert_allclose(outside, factor * sizes * remainder, atol=1e-12)
        assert t or factor == pytest.approx(1)
        norms.append(state.norm)
    assert norms[1] <= 1.01 * norms[0] * (1 + 1e-12)
    assert norms[2] <= 1.01 * norms[1] * (1 + 1e-12)


# Subspaces and 8 bits.

GALORE = {"lr": 0.05, "scale": 0.25, "weight_decay": 0.1, **ADAM}


def test_galore_in_the_whole_space_is_adamw_with_a_scaled_update(rng):
    w, grads = rng.normal(size=(6, 4)), rng.normal(size=(5, 6, 4))
    want = [w]
    for t in range(5):
        update = 0.25 * adam_of_past(grads[: t + 1], **ADAM)
        want.append((1 - 0.05 * 0.1) * want[-1] - 0.05 * update)
    for basis, side in ((np.eye(6), "input"), (np.eye(4), "output")):
        got = galore_adam(w, grads, basis, side=side, **GALORE)
        np.testing.assert_allclose(got, want[1:], rtol=1e-12)


def test_galore_on_one_side_is_the_transpose_of_the_other_and_stays_in_the_span(rng):
    w, grads, p = rng.normal(size=(6, 4)), rng.normal(size=(5, 6, 4)), orthonormal(rng, 6, 2)
    got = galore_adam(w, grads, p, **GALORE)
    turned = galore_adam(w.T, grads.swapaxes(1, 2), p, side="output", **GALORE)
    np.testing.assert_allclose(got, np.swapaxes(turned, 1, 2), rtol=1e-12)
    moved = galore_adam(w, grads, p, **{**GALORE, "weight_decay": 0.0})[-1] - w
    np.testing.assert_allclose(p @ (p.T @ moved), moved, atol=1e-14)
    assert np.linalg.norm(moved) > 0.01
    with pytest.raises(ValueError, match=r"basis \(6, 2\) does not fit .* on the output side"):
        galore_adam(w, grads, p, side="output", **GALORE)


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
