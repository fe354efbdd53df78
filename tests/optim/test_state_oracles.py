"""Oracles of optimizers with small states, compared with other ways to compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optim.optim_oracles import galore_adam
from optim.state_oracles import (
    NEWTON_SCHULZ,
    FactoredState,
    FourBitState,
    GrowthState,
    InnerAdam,
    adam_4bit_step,
    factored_adam_step,
    fira_step,
    limit_growth,
    lion_step,
    momentum_step,
    muon_step,
    newton_schulz,
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


def assert_like_optax(transform, step, grads, rtol):
    """Compares `step(g, t)` with the updates of an optax transformation in float32."""
    params = jnp.zeros(grads[0].shape)
    state, update = transform.init(params), jax.jit(transform.update)
    for t, g in enumerate(grads, start=1):
        want, state = update(np.float32(g), state, params)
        np.testing.assert_allclose(step(g, t), want, rtol=rtol, atol=rtol)


def test_blocks_of_a_small_row():
    x = [[2, -0.44, 0.001, 0, 0, -8, 3.5, 0.4]]
    # Scales 2, 8 and 3.5; 0.22 rounds to 0.2, 0.0005 to 0, and 0.4 / 3.5 to 0.1.
    decoded, ties = quantize_blocks(x, 3)
    np.testing.assert_allclose(decoded, [[2, -0.4, 0, 0, 0, -8, 3.5, 0.35]], rtol=1e-12)
    assert not ties.any()
    for offset, tie in [(0, True), (5e-7, True), (-5e-7, True), (2e-6, False)]:
        _, ties = quantize_blocks([1, 0.5 + offset, 0, 0.05 + offset], 4)
        np.testing.assert_array_equal(ties, [False, tie, False, tie])


def test_blocks_begin_anew_in_each_row_and_are_kept_by_a_second_rounding(rng):
    x = rng.normal(size=(3, 5, 37))
    x[0, 1, :16] = 0
    once, _ = quantize_blocks(x, 16)
    assert not once[0, 1, :16].any()
    np.testing.assert_allclose(quantize_blocks(once, 16)[0], once, rtol=1e-14)
    np.testing.assert_array_equal(once[2, 3, 16:32], quantize_blocks(x[2, 3, 16:32], 99)[0])
    np.testing.assert_allclose(quantize_blocks(-4 * x, 16)[0], -4 * once, rtol=1e-14)
    # Levels are at most 0.2 apart.
    bound = 0.1 * np.max(np.abs(x), axis=-1, keepdims=True)
    assert np.all(np.abs(once - x) <= bound * (1 + 1e-12))


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
    first, state = adam_4bit_step(grads[0], FourBitState(), 1, **ADAM, block=16)
    np.testing.assert_allclose(first, adam_of_past(grads[:1], **ADAM), rtol=1e-12)
    m, v = 0.1 * grads[0], 0.01 * grads[0] ** 2
    np.testing.assert_allclose(state.m, quantize_signed(m, 16)[0], rtol=1e-12)
    np.testing.assert_allclose(state.v, quantize_rank_one(v)[0], rtol=1e-12)
    second, later = adam_4bit_step(grads[1], state, 2, **ADAM, block=16)
    m, v = 0.9 * state.m + 0.1 * grads[1], 0.99 * state.v + 0.01 * grads[1] ** 2
    want = (m / 0.19) / (np.sqrt(v / 0.0199) + 1e-3)
    np.testing.assert_allclose(second, want, rtol=1e-12)
    assert not later.ties.any()
    doubtful = FourBitState(state.m, state.v, np.arange(240).reshape(6, 40) == 7)
    _, later = adam_4bit_step(grads[1], doubtful, 2, **ADAM, block=16)
    np.testing.assert_array_equal(later.ties, doubtful.ties)
    assert np.abs(second - adam_of_past(grads[:2], **ADAM)).max() > 0.1


def test_adam_of_4_bits_is_adam_where_nothing_is_lost():
    # A constant gradient whose moments are on levels stays there.
    g, state = np.array([[1, -1, 1], [1, 1, -1.0]]), FourBitState()
    for t in range(1, 5):
        update, state = adam_4bit_step(g, state, t, **ADAM)
        np.testing.assert_allclose(update, g / 1.001, rtol=1e-12)


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_factored_adam_is_the_factored_rms_of_optax(rng, shape):
    b2, state = 0.9, FactoredState()

    def step(g, t):
        nonlocal state
        update, state = factored_adam_step(g, state, t, 0.0, b2, 0.0)
        return update

    # A decay that grows in this way is a constant one with a bias correction.
    def decay(i, _):
        return b2 * (1 - b2**i) / (1 - b2 ** (i + 1.0))

    rms = optax.scale_by_factored_rms(min_dim_size_to_factor=1, decay_rate_fn=decay)
    assert_like_optax(rms, step, rng.normal(size=(4, *shape)), 1e-5)
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
    assert limit_growth([3, 4], 0.0, 1.5, norm_eps=1e-2)[1] == pytest.approx(0.015)
    assert not limit_growth([3, 4], 0.0, 1.5)[0].any()


def test_fira_on_a_small_matrix():
    g, p = np.array([[3, 0], [4, 5.0]]), [[1], [0]]
    halve = lambda r: r / 2  # noqa: E731
    update, state = fira_step(g, p, GrowthState(), halve, 0.25)
    # Columns have factors 1/2 and 0 / 0; the remainder is the second row.
    np.testing.assert_allclose(update, [[0.375, 0], [0.5, 0]])
    assert state.norm == 2
    update, state = fira_step(2 * g, p, state, halve, 0.25)
    np.testing.assert_allclose(update, [[0.75, 0], [0.505, 0]])
    assert state.norm == 2.02
    update, state = fira_step(g, p, GrowthState(), halve, 0.25, form="code")
    # What leaves the subspace has a quarter: 3 - 3 / 4 of the gradient remains, and 4.
    np.testing.assert_allclose(update, [[0.375 + 1.125, 0], [2, 0]])
    assert state.norm == pytest.approx(np.hypot(1.125, 2))


def test_fira_is_galore_in_the_subspace(rng):
    w, grads, p = rng.normal(size=(6, 4)), rng.normal(size=(3, 6, 4)), orthonormal(rng, 6, 2)
    want = np.diff([w, *galore_adam(w, grads, p, lr=1, scale=0.25, **ADAM)], axis=0)
    inner, state, norms = InnerAdam(**ADAM), GrowthState(), []
    for g, moved in zip(grads, want, strict=True):
        update, state = fira_step(g, p, state, inner, 0.25)
        np.testing.assert_allclose(p.T @ update, -(p.T @ moved), rtol=1e-12)
        rest = update - p @ (p.T @ update)
        assert np.linalg.norm(rest) == pytest.approx(0.25 * state.norm)
        # Without the limit, columns of the rest are multiples of those of the remainder.
        remainder = g - p @ (p.T @ g)
        cosine = np.sum(rest * remainder, 0)
        np.testing.assert_allclose(
            cosine, np.linalg.norm(rest, axis=0) * np.linalg.norm(remainder, axis=0)
        )
        norms.append(state.norm)
    assert norms[1] <= 1.01 * norms[0] * (1 + 1e-12)
    assert norms[2] <= 1.01 * norms[1] * (1 + 1e-12)


def test_forms_of_fira_agree_without_a_scale(rng):
    p, states = orthonormal(rng, 6, 2), {"paper": GrowthState(), "code": GrowthState()}
    inners = {form: InnerAdam(**ADAM) for form in states}
    for g in rng.normal(size=(3, 6, 4)):
        updates = []
        for form, inner in inners.items():
            update, states[form] = fira_step(g, p, states[form], inner, 1.0, form=form)
            updates.append(update)
        np.testing.assert_allclose(updates[0], updates[1], rtol=1e-12)


def test_lion_and_momentum_are_those_of_optax(rng):
    grads = rng.normal(size=(4, 3, 5))
    m = np.zeros((3, 5))

    def lion(g, _):
        nonlocal m
        update, m = lion_step(g, m, 0.9, 0.99)
        return update

    assert_like_optax(optax.scale_by_lion(0.9, 0.99), lion, grads, 1e-6)
    for nesterov in (False, True):
        m = np.zeros((3, 5))

        def trace(g, _, nesterov=nesterov):
            nonlocal m
            update, m = momentum_step(g, m, 0.9, nesterov)
            return update

        assert_like_optax(optax.trace(0.9, nesterov), trace, grads, 1e-5)
    np.testing.assert_array_equal(lion_step([1.0, -3, 0], [-1, 1, 0], 0.5, 0.5)[0], [0, -1, 0])
    assert momentum_step(1.0, 2.0, 0.5) == (2, 2)
    assert momentum_step(1.0, 2.0, 0.5, nesterov=True) == (2, 2)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_optax(rng, shape, nesterov):
    m = np.zeros(shape)

    def step(g, t):
        nonlocal m
        update, m = muon_step(g, m, t, nesterov=nesterov)
        return update

    muon = contrib.scale_by_muon(nesterov=nesterov)
    assert_like_optax(muon, step, rng.normal(size=(3, *shape)), 1e-4)


def test_newton_schulz_with_products_of_matrices(rng):
    x = rng.normal(size=(4, 6))
    a, b, c = NEWTON_SCHULZ
    want = x / np.linalg.norm(x)
    for _ in range(5):
        gram = want @ want.T
        want = a * want + (b * gram + c * gram @ gram) @ want
    got = newton_schulz(x, eps=0.0)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    values = np.linalg.svd(got, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert not newton_schulz(np.zeros((3, 2))).any()
