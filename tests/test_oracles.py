"""Tests of tests/oracles.py: each oracle against brute force, without the library."""

import math

import numpy as np
import oracles
import pytest

LLAMA3 = {  # Llama 3.1 has heads of 128 features and a theta of 500,000.
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def numeric_gradients(f, *args, delta=1e-3):
    """Returns fourth-order finite differences of the scalar `f` for each entry of its arguments."""
    gradients = []
    for a in args:
        gradient = np.zeros_like(a)
        for index in np.ndindex(a.shape):
            value, at = a[index], {}
            for shift in (-2, -1, 1, 2):
                a[index] = value + shift * delta
                at[shift] = f(*args)
            a[index] = value
            gradient[index] = (at[-2] - 8 * at[-1] + 8 * at[1] - at[2]) / (12 * delta)
        gradients.append(gradient)
    return gradients


def assert_gradients_close(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-8, atol=1e-9)


def assert_mean_is(samples, expected):
    """Checks that means over the first axis are within five standard errors of the expectation."""
    standard_error = samples.std(0) / math.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(0) - expected) <= 5 * standard_error)


def decaying(rng, tokens, features, base=0.7):
    """Returns a matrix with singular values `base^j`."""
    u, _ = np.linalg.qr(rng.normal(size=(tokens, features)))
    v, _ = np.linalg.qr(rng.normal(size=(features, features)))
    return u * base ** np.arange(features) @ v.T


# Low rank.


def test_random_projection_is_the_sum_over_columns(rng):
    x, s = rng.normal(size=(5, 4)), rng.normal(size=(4, 3))
    want = sum(np.outer(x @ s[:, c], s[:, c]) for c in range(3))
    np.testing.assert_allclose(oracles.random_projection(x, s), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_random_projection_is_unbiased_with_the_expected_error(rng, k):
    x = rng.normal(size=(3, 5))
    decoded = np.stack(
        [oracles.random_projection(x, rng.normal(size=(5, k)) / math.sqrt(k)) for _ in range(40000)]
    )
    assert_mean_is(decoded, x)
    squared = np.sum((decoded - x) ** 2, axis=(1, 2))
    assert_mean_is(squared, oracles.expected_rp_squared_error(x, k))
    # The test can distinguish `d + 1` from `d`.
    assert 5 * squared.std() / 200 < np.sum(x**2) / k


@pytest.mark.parametrize("power_iterations", [0, 1, 2])
@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_randomized_svd_projects_on_the_range_of_the_powers(rng, shape, power_iterations):
    x, omega = rng.normal(size=shape), rng.normal(size=(shape[1], 3))
    y = np.linalg.matrix_power(x @ x.T, power_iterations) @ x @ omega
    want = y @ np.linalg.pinv(y) @ x
    got = oracles.randomized_svd(x, omega, power_iterations)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_randomized_svd_is_exact_at_the_rank_of_its_input(rng):
    x = rng.normal(size=(8, 3)) @ rng.normal(size=(3, 6))
    np.testing.assert_allclose(oracles.randomized_svd(x, rng.normal(size=(6, 3)), 1), x, atol=1e-12)
    np.testing.assert_allclose(oracles.randomized_svd(x, rng.normal(size=(6, 5)), 1), x, atol=1e-12)
    assert not oracles.randomized_svd(0 * x, rng.normal(size=(6, 2)), 1).any()


def test_randomized_svd_approaches_the_best_error_with_power_iterations(rng):
    x, omega = decaying(rng, 12, 8), rng.normal(size=(8, 3))
    errors = [np.linalg.norm(x - oracles.randomized_svd(x, omega, p)) for p in (0, 1, 40)]
    best = oracles.best_rank_k_error(x, 3)
    assert errors[0] > errors[1] > best * (1 - 1e-12)
    assert errors[2] == pytest.approx(best, rel=1e-9)


def test_best_rank_k_error_is_that_of_the_truncated_svd(rng):
    x = rng.normal(size=(6, 4))
    u, sigma, vt = np.linalg.svd(x, full_matrices=False)
    for k in range(5):
        truncated = u[:, :k] * sigma[:k] @ vt[:k]
        assert oracles.best_rank_k_error(x, k) == pytest.approx(
            np.linalg.norm(x - truncated), abs=1e-12
        )


def test_halko_bound_holds_and_is_tight(rng):
    x, k, p = decaying(rng, 20, 12), 3, 2
    errors = [
        np.linalg.norm(x - oracles.randomized_svd(x, rng.normal(size=(12, k + p)), 0))
        for _ in range(500)
    ]
    best = oracles.best_rank_k_error(x, k + p)
    bound = oracles.halko_expected_bound(x, k, p)
    assert best <= np.mean(errors) <= np.sqrt(np.mean(np.square(errors))) <= bound
    assert bound < 3 * np.mean(errors)


def test_halko_factor_is_the_expected_pseudoinverse(rng):
    # In the proof `k / (p - 1)` is `E‖G†‖²_F` for Gaussian `G` [k, k + p].
    x, k, p = decaying(rng, 20, 12), 3, 7
    samples = np.array(
        [np.sum(np.linalg.pinv(rng.normal(size=(k, k + p))) ** 2) for _ in range(20000)]
    )
    ratio = (oracles.halko_expected_bound(x, k, p) / oracles.best_rank_k_error(x, k)) ** 2
    assert_mean_is(samples, ratio - 1)


@pytest.mark.parametrize(("k", "p"), [(1, 4), (4, 1), (4, 5)])
def test_halko_bound_refuses_ranks_outside_the_theorem(k, p):
    with pytest.raises(ValueError, match=r"Theorem 10\.5"):
        oracles.halko_expected_bound(np.ones((10, 8)), k, p)


# Generating points.


@pytest.mark.parametrize("tolerance", [math.inf, 0.8, 0.5])
def test_point_approximation_is_the_nearest_multiple_of_a_generator(rng, tolerance):
    x, rows = rng.normal(size=(30, 3)), np.array([4, 11, 0, 25])
    code = oracles.point_approximation(x, rows, tolerance)
    dropped = 0
    for i in range(30):
        fits = [np.linalg.lstsq(x[[r]].T, x[i], rcond=None) for r in rows]
        residuals = [
            np.linalg.norm(x[i] - fit[0] * x[r]) for fit, r in zip(fits, rows, strict=True)
        ]
        best = int(np.argmin(residuals))
        assert code.assignment[i] == best
        assert code.alpha[i] == pytest.approx(fits[best][0][0], rel=1e-12)
        assert code.dropped[i] == (residuals[best] > tolerance * np.linalg.norm(x[i]))
        dropped += int(code.dropped[i])
        # Pythagoras: the cosine and the relative residual are the two legs.
        legs = np.array(residuals) / np.linalg.norm(x[i])
        np.testing.assert_allclose(code.cosines[i] ** 2 + legs**2, 1, rtol=1e-12)
    assert (dropped == 0) == (tolerance == math.inf)
    assert code.beta == pytest.approx(30 / (30 - dropped), rel=1e-15)
    want = code.beta * code.alpha[:, None] * x[rows][code.assignment]
    want[code.dropped] = 0
    np.testing.assert_allclose(code.decoded, want, rtol=1e-14)


def test_point_approximation_of_multiples_of_generators_is_exact(rng):
    points = rng.normal(size=(3, 4))
    x = np.concatenate([points, -2 * points, 1e-100 * points, 1e100 * points])
    code = oracles.point_approximation(x, np.arange(3), 1e-6)
    assert not code.dropped.any()
    np.testing.assert_array_equal(code.assignment, [0, 1, 2] * 4)
    np.testing.assert_allclose(code.alpha, np.repeat([1, -2, 1e-100, 1e100], 3), rtol=1e-12)
    np.testing.assert_allclose(code.decoded, x, rtol=1e-12)


def test_point_approximation_of_zero_tokens_and_zero_generators(rng):
    x = rng.normal(size=(5, 3))
    x[[0, 3]] = 0
    code = oracles.point_approximation(x, np.array([0, 1, 2]), 1e-9)
    assert set(code.assignment) <= {1, 2}
    assert code.alpha[0] == code.alpha[3] == 0
    assert not code.dropped[:4].any()
    assert code.dropped[4]
    assert code.beta == 5 / 4
    np.testing.assert_array_equal(code.cosines[:, 0], -1)
    np.testing.assert_array_equal(code.cosines[[0, 3], 1:], 0)
    zero = oracles.point_approximation(x, np.array([0, 3]), math.inf)
    assert zero.beta == 1
    assert not zero.alpha.any()
    assert not zero.decoded.any()


def test_point_approximation_drops_everything_with_beta_one():
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    code = oracles.point_approximation(x[1:], np.array([0]), -1.0)
    assert code.dropped.all()
    assert code.beta == 1
    assert not code.decoded.any()
    assert not oracles.point_weight_gradient(x[1:], np.array([0]), -1.0, np.ones((2, 2))).any()


@pytest.mark.parametrize("tolerance", [math.inf, 0.7])
def test_point_weight_gradient_is_the_product_with_the_decoded_input(rng, tolerance):
    x, dz, rows = rng.normal(size=(20, 4)), rng.normal(size=(20, 3)), np.array([3, 17, 8])
    decoded = oracles.point_approximation(x, rows, tolerance).decoded
    got = oracles.point_weight_gradient(x, rows, tolerance, dz)
    np.testing.assert_allclose(got, decoded.T @ dz, rtol=1e-12, atol=1e-12)
    whole = oracles.point_weight_gradient(x, np.arange(20), tolerance, dz)
    np.testing.assert_allclose(whole, x.T @ dz, rtol=1e-12, atol=1e-12)


# Layers.


def test_rms_norm_equals_a_loop(rng):
    x, scale, eps = rng.normal(size=(2, 3, 5)), rng.normal(size=5), 0.1
    got = oracles.rms_norm(x, scale, eps)
    for b, t in np.ndindex(2, 3):
        root = math.sqrt(sum(a * a for a in x[b, t]) / 5 + eps)
        want = [s * a / root for s, a in zip(scale, x[b, t], strict=True)]
        np.testing.assert_allclose(got[b, t], want, rtol=1e-14)


def test_rms_norm_vjp_equals_finite_differences(rng):
    x, scale, dy = rng.normal(size=(2, 3, 4)), rng.normal(size=4), rng.normal(size=(2, 3, 4))
    want = numeric_gradients(lambda x, s: np.sum(dy * oracles.rms_norm(x, s, 0.1)), x, scale)
    assert_gradients_close(oracles.rms_norm_vjp(x, scale, 0.1, dy), want)


def test_swiglu_equals_a_loop_and_does_not_overflow():
    gate = np.array([-2.0, 0.0, 0.5, 3.0])
    want = [7 * a / (1 + math.exp(-a)) for a in gate]
    np.testing.assert_allclose(oracles.swiglu(gate, np.full(4, 7.0)), want, rtol=1e-14)
    far = np.array([-1000.0, 1000.0])
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_array_equal(oracles.swiglu(far, np.ones(2)), [0, 1000])
        np.testing.assert_array_equal(oracles.swiglu_vjp(far, np.ones(2), np.ones(2))[0], [0, 1])


def test_swiglu_vjp_equals_finite_differences(rng):
    gate, up, dy = rng.normal(size=(3, 3, 4))
    want = numeric_gradients(lambda g, u: np.sum(dy * oracles.swiglu(g, u)), gate, up)
    assert_gradients_close(oracles.swiglu_vjp(gate, up, dy), want)


def test_layer_norm_equals_a_loop(rng):
    x, scale, bias, eps = rng.normal(size=(2, 3, 5)), *rng.normal(size=(2, 5)), 0.1
    got = oracles.layer_norm(x, scale, bias, eps)
    for b, t in np.ndindex(2, 3):
        mean = sum(x[b, t]) / 5
        root = math.sqrt(sum((a - mean) ** 2 for a in x[b, t]) / 5 + eps)
        want = [s * (a - mean) / root + c for s, c, a in zip(scale, bias, x[b, t], strict=True)]
        np.testing.assert_allclose(got[b, t], want, rtol=1e-13)


def test_layer_norm_vjp_equals_finite_differences(rng):
    x, scale, bias, dy = rng.normal(size=(2, 3, 4)), *rng.normal(size=(2, 4)), rng.normal(size=4)
    want = numeric_gradients(
        lambda x, s, b: np.sum(dy * oracles.layer_norm(x, s, b, 0.1)), x, scale, bias
    )
    dy = np.broadcast_to(dy, x.shape)
    assert_gradients_close(oracles.layer_norm_vjp(x, scale, 0.1, dy), want)


def test_gelu_equals_its_definition_and_does_not_overflow():
    x = np.array([-2.0, 0.0, 0.5, 3.0])
    erf = [a / 2 * (1 + math.erf(a / math.sqrt(2))) for a in x]
    np.testing.assert_allclose(oracles.gelu(x, approximate=False), erf, rtol=1e-14)
    root = math.sqrt(2 / math.pi)
    tanh = [a / 2 * (1 + math.tanh(root * (a + 0.044715 * a**3))) for a in x]
    np.testing.assert_allclose(oracles.gelu(x, approximate=True), tanh, rtol=1e-13)
    far = np.array([-1e30, 1e30])
    with np.errstate(over="raise", invalid="raise"):
        for approximate in (False, True):
            np.testing.assert_array_equal(oracles.gelu(far, approximate), [0, 1e30])
            np.testing.assert_array_equal(oracles.gelu_vjp(far, approximate, np.ones(2)), [0, 1])


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_vjp_equals_finite_differences(rng, approximate):
    x, dy = rng.normal(size=(2, 3, 4))
    want = numeric_gradients(lambda x: np.sum(dy * oracles.gelu(x, approximate)), x)
    assert_gradients_close([oracles.gelu_vjp(x, approximate, dy)], want)


def test_conv_without_a_window_is_a_product(rng):
    x, w = rng.normal(size=(3, 4)), rng.normal(size=(4, 5))
    np.testing.assert_allclose(oracles.conv(x, w, (), (), ()), x @ w, rtol=1e-13)


def test_conv_on_one_axis_is_that_of_numpy(rng):
    x, w = rng.normal(size=9), rng.normal(size=4)
    for padding, mode in (((0, 0), "valid"), ((3, 3), "full")):
        got = oracles.conv(x[None, :, None], w[:, None, None], (1,), (padding,), (1,))
        # NumPy's correlation does not reverse the window either.
        np.testing.assert_allclose(got[0, :, 0], np.correlate(x, w, mode), rtol=1e-13)


def test_conv_with_groups_strides_and_dilation_is_made_of_plain_convolutions(rng):
    x, w, padding = rng.normal(size=(2, 9, 8, 4)), rng.normal(size=(3, 2, 2, 6)), ((2, 1), (0, 3))
    got = oracles.conv(x, w, (2, 3), padding, (2, 1), groups=2)
    spread = np.zeros((5, 2, 2, 6))
    spread[::2] = w
    for g in range(2):
        given = x[..., 2 * g : 2 * g + 2], spread[..., 3 * g : 3 * g + 3]
        dense = oracles.conv(*given, (1, 1), padding, (1, 1))[:, ::2, ::3]
        np.testing.assert_allclose(got[..., 3 * g : 3 * g + 3], dense, rtol=1e-13, atol=1e-14)


def test_conv_vjp_equals_finite_differences(rng):
    x, w = rng.normal(size=(2, 5, 4, 4)), rng.normal(size=(2, 3, 2, 2))
    settings = (2, 1), ((1, 2), (0, 2)), (1, 2), 2
    dz = rng.normal(size=oracles.conv(x, w, *settings).shape)
    want = numeric_gradients(lambda x, w: np.sum(dz * oracles.conv(x, w, *settings)), x, w)
    assert_gradients_close(oracles.conv_vjp(x, w, dz, *settings), want)


def test_rope_is_a_product_of_complex_numbers(rng):
    x, positions, theta = rng.normal(size=(2, 3, 2, 6)), rng.integers(0, 50, (2, 3)), 100.0
    got = oracles.rope(x, positions, theta)
    for b, s, h in np.ndindex(2, 3, 2):
        for i in range(3):
            turn = np.exp(1j * positions[b, s] / theta ** (i / 3))
            z = complex(x[b, s, h, i], x[b, s, h, i + 3]) * turn
            assert got[b, s, h, i] == pytest.approx(z.real, rel=1e-12)
            assert got[b, s, h, i + 3] == pytest.approx(z.imag, rel=1e-12)
    # One row of positions applies to the whole batch.
    shared = oracles.rope(x, positions[0], theta)
    np.testing.assert_array_equal(shared, oracles.rope(x, positions[[0, 0]], theta))


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rope_depends_on_relative_positions_and_its_vjp_is_its_inverse(rng, scaling):
    q, k = rng.normal(size=(2, 1, 4, 1, 8))
    positions = np.array([0, 3, 10, 700])

    def scores(shift):
        turned = [oracles.rope(a, positions + shift, 1e4, scaling)[0, :, 0] for a in (q, k)]
        return turned[0] @ turned[1].T

    np.testing.assert_allclose(scores(0), scores(1234), rtol=1e-9, atol=1e-9)
    turned = oracles.rope(q, positions, 1e4, scaling)
    np.testing.assert_allclose(oracles.rope(turned, -positions, 1e4, scaling), q, atol=1e-13)


def test_rope_vjp_equals_finite_differences(rng):
    x, dy = rng.normal(size=(2, 1, 3, 1, 4))
    positions = np.array([1, 2, 9])
    want = numeric_gradients(lambda x: np.sum(dy * oracles.rope(x, positions, 10.0)), x)
    assert_gradients_close([oracles.rope(dy, -positions, 10.0)], want)


def test_llama3_scaling_equals_that_of_hugging_face():
    # With cycles instead of wavelengths, and one clipped ramp instead of three cases.
    features, theta, length = 128, 500_000.0, LLAMA3["original_max_position_embeddings"]
    frequency = theta ** (-np.arange(0, features, 2) / features)
    cycles = length * frequency / (2 * np.pi)  # Cycles within the original context.
    smooth = np.clip((cycles - 1) / (4 - 1), 0, 1)
    want = smooth * frequency + (1 - smooth) * frequency / 8
    assert all(((smooth == 0).any(), (smooth == 1).any(), ((smooth > 0) & (smooth < 1)).any()))
    x = np.zeros((1, 1, 1, features))
    x[..., : features // 2] = 1
    got = oracles.rope(x, np.ones(1), theta, LLAMA3)[0, 0, 0]
    angles = np.arctan2(got[features // 2 :], got[: features // 2])
    np.testing.assert_allclose(angles, want, rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_a_loop(rng, causal):
    q = rng.normal(size=(2, 4, 6, 3))
    k, v = rng.normal(size=(2, 2, 4, 2, 3))
    got = oracles.attention(q, k, v, causal)
    for b, i, h in np.ndindex(2, 4, 6):
        keys = range(i + 1) if causal else range(4)
        g = 0 if h < 3 else 1
        weights = [math.exp(np.dot(q[b, i, h], k[b, j, g]) / math.sqrt(3)) for j in keys]
        want = sum(w * v[b, j, g] for w, j in zip(weights, keys, strict=True)) / sum(weights)
        np.testing.assert_allclose(got[b, i, h], want, rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
def test_attention_vjp_equals_finite_differences(rng, heads, causal):
    q, do = rng.normal(size=(2, 2, 3, heads[0], 2))
    k, v = rng.normal(size=(2, 2, 3, heads[1], 2))
    want = numeric_gradients(
        lambda q, k, v: np.sum(do * oracles.attention(q, k, v, causal)), q, k, v
    )
    assert_gradients_close(oracles.attention_vjp(q, k, v, do, causal), want)


# Loss.

MASKS = (None, np.array([1, 0, 1, 1, 0]), np.array([False, False, True, False, False]), np.zeros(5))


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS, ids=["none", "some", "one", "nothing"])
def test_cross_entropy_equals_a_loop_and_finite_differences(rng, mask, z_loss):
    hidden, head = rng.normal(size=(5, 3)), rng.normal(size=(3, 4))
    labels = np.array([2, 0, 3, 3, 1])
    losses = []
    for t in range(5):
        exponentials = [math.exp(np.dot(hidden[t], head[:, w])) for w in range(4)]
        total = sum(exponentials)
        loss = -math.log(exponentials[labels[t]] / total) + z_loss * math.log(total) ** 2
        if mask is None or mask[t]:
            losses.append(loss)
    want = sum(losses) / len(losses) if losses else 0
    got = oracles.cross_entropy(hidden, head, labels, mask, z_loss)
    assert got == pytest.approx(want, rel=1e-13)
    gradients = numeric_gradients(
        lambda h, w: oracles.cross_entropy(h, w, labels, mask, z_loss), hidden, head
    )
    assert_gradients_close(oracles.cross_entropy_vjp(hidden, head, labels, mask, z_loss), gradients)


def test_cross_entropy_ignores_masked_labels_and_does_not_overflow(rng):
    hidden, head = 1e4 * rng.normal(size=(3, 2)), rng.normal(size=(2, 4))
    mask, valid = np.array([1, 0, 1]), np.array([0, 1, 2])
    ignored = np.array([0, -100, 2])
    with np.errstate(over="raise", invalid="raise"):
        got = oracles.cross_entropy(hidden, head, ignored, mask)
        gradients = oracles.cross_entropy_vjp(hidden, head, ignored, mask)
    assert got == oracles.cross_entropy(hidden, head, valid, mask)
    assert np.isfinite(got)
    assert_gradients_close(gradients, oracles.cross_entropy_vjp(hidden, head, valid, mask))
    assert not gradients[0][1].any()


def test_every_result_is_float64(rng):
    x = rng.normal(size=(6, 4)).astype(np.float32)
    assert oracles.random_projection(x, x[:4]).dtype == np.float64
    assert oracles.point_approximation(x, np.array([0]), math.inf).decoded.dtype == np.float64
    assert oracles.rms_norm(x, x[0], 1e-6).dtype == np.float64
    assert oracles.rope(x[:, None, None], np.arange(1), 10.0).dtype == np.float64
