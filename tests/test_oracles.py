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
LABELS = np.array([[3, 0, 4], [0, 1, 3]])
POSITIONS = np.array([1, 2, 9])
CONV = (2, 1), ((1, 2), (0, 2)), (1, 2), 2
"""Strides, padding, dilation and groups."""


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def assert_mean_is(samples, expected):
    """Checks that means over the first axis are within five standard errors of the expectation."""
    standard_error = samples.std(0) / math.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(0) - expected) <= 5 * standard_error)


# Gradients.


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
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-8, atol=1e-9)


def of_attention(causal, window, heads):
    """Returns the function, its gradient and shapes for one setting of attention."""
    shapes = [(2, 3, heads[0], 2), (2, 3, heads[1], 2), (2, 3, heads[1], 2)]
    return (
        lambda *qkv: oracles.attention(*qkv, causal, window),
        lambda *args: oracles.attention_vjp(*args, causal, window),
        shapes,
    )


VJPS = {
    "rms_norm": (
        lambda x, scale: oracles.rms_norm(x, scale, 0.1),
        lambda x, scale, dy: oracles.rms_norm_vjp(x, scale, 0.1, dy),
        [(2, 3, 4), (4,)],
    ),
    "layer_norm": (
        lambda x, scale, bias: oracles.layer_norm(x, scale, bias, 0.1),
        lambda x, scale, bias, dy: oracles.layer_norm_vjp(x, scale, 0.1, dy),
        [(2, 3, 4), (4,), (4,)],
    ),
    "swiglu": (oracles.swiglu, oracles.swiglu_vjp, [(3, 4), (3, 4)]),
    "gelu": (
        lambda x: oracles.gelu(x, False),
        lambda x, dy: [oracles.gelu_vjp(x, False, dy)],
        [(3, 4)],
    ),
    "gelu by tanh": (
        lambda x: oracles.gelu(x, True),
        lambda x, dy: [oracles.gelu_vjp(x, True, dy)],
        [(3, 4)],
    ),
    "conv": (
        lambda x, w: oracles.conv(x, w, *CONV),
        lambda x, w, dz: oracles.conv_vjp(x, w, dz, *CONV),
        [(1, 4, 3, 4), (2, 3, 2, 2)],
    ),
    "rope": (
        lambda x: oracles.rope(x, POSITIONS, 10.0),
        lambda x, dy: [oracles.rope(dy, -POSITIONS, 10.0)],
        [(1, 3, 1, 4)],
    ),
    "attention": of_attention(False, None, (4, 2)),
    "attention, causal": of_attention(True, None, (3, 3)),
    "attention, window": of_attention(True, 2, (2, 1)),
    "token_log_probs": (
        lambda hidden, head: oracles.token_log_probs(hidden, head, LABELS),
        lambda hidden, head, dy: oracles.token_log_probs_vjp(hidden, head, LABELS, dy),
        [(2, 3, 4), (4, 5)],
    ),
}


@pytest.mark.parametrize("name", VJPS)
def test_gradients_equal_finite_differences(rng, name):
    fun, vjp, shapes = VJPS[name]
    args = [rng.normal(size=shape) for shape in shapes]
    dy = rng.normal(size=fun(*args).shape)
    want = numeric_gradients(lambda *args: np.sum(dy * fun(*args)), *args)
    assert_gradients_close(vjp(*args, dy), want)


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
    assert_gradients_close(gradients, oracles.cross_entropy_vjp(hidden, head, valid, mask))


def test_cross_entropy_is_the_mean_of_negative_log_probabilities_of_tokens(rng):
    hidden, head = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 5))
    log_probs = oracles.token_log_probs(hidden, head, LABELS)
    want = oracles.cross_entropy(hidden.reshape(6, 4), head, LABELS.reshape(6))
    assert -log_probs.mean() == pytest.approx(want, rel=1e-13)


# Low rank.


def test_random_projection_is_unbiased_with_the_expected_error(rng):
    x, k, count = rng.normal(size=(3, 5)), 8, 10000
    decoded = np.stack(
        [oracles.random_projection(x, s) for s in rng.normal(size=(count, 5, k)) / math.sqrt(k)]
    )
    assert_mean_is(decoded, x)
    squared = np.sum((decoded - x) ** 2, axis=(1, 2))
    assert_mean_is(squared, oracles.expected_rp_squared_error(x, k))
    # The test can distinguish `d + 1` from `d`.
    assert 5 * squared.std() / math.sqrt(count) < np.sum(x**2) / k


@pytest.mark.parametrize("power_iterations", [0, 1, 2])
@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_randomized_svd_projects_on_the_range_of_the_powers(rng, shape, power_iterations):
    x, omega = rng.normal(size=shape), rng.normal(size=(shape[1], 3))
    y = np.linalg.matrix_power(x @ x.T, power_iterations) @ x @ omega
    want = y @ np.linalg.pinv(y) @ x
    got = oracles.randomized_svd(x, omega, power_iterations)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_best_rank_k_error_is_that_of_the_truncated_svd(rng):
    x = rng.normal(size=(6, 4))
    u, sigma, vt = np.linalg.svd(x, full_matrices=False)
    for k in range(5):
        error = np.linalg.norm(x - u[:, :k] * sigma[:k] @ vt[:k])
        assert oracles.best_rank_k_error(x, k) == pytest.approx(error, abs=1e-12)


def test_halko_factor_is_the_expected_pseudoinverse(rng):
    # In the proof `k / (p - 1)` is `E‖G†‖²_F` for Gaussian `G` [k, k + p].
    x, k, p = rng.normal(size=(20, 12)), 3, 7
    samples = np.sum(np.linalg.pinv(rng.normal(size=(20000, k, k + p))) ** 2, axis=(1, 2))
    ratio = (oracles.halko_expected_bound(x, k, p) / oracles.best_rank_k_error(x, k)) ** 2
    assert_mean_is(samples, ratio - 1)


# Generating points.


@pytest.mark.parametrize("tolerance", [math.inf, 0.8, 0.5])
def test_point_approximation_is_the_nearest_multiple_of_a_generator(rng, tolerance):
    x, dz, rows = rng.normal(size=(30, 3)), rng.normal(size=(30, 2)), np.array([4, 11, 0, 25])
    code = oracles.point_approximation(x, rows, tolerance)
    for i in range(30):
        fits = [np.linalg.lstsq(x[[r]].T, x[i], rcond=None) for r in rows]
        residuals = [
            np.linalg.norm(x[i] - fit[0] * x[r]) for fit, r in zip(fits, rows, strict=True)
        ]
        best = int(np.argmin(residuals))
        assert code.assignment[i] == best
        assert code.alpha[i] == pytest.approx(fits[best][0][0], rel=1e-12)
        assert code.dropped[i] == (residuals[best] > tolerance * np.linalg.norm(x[i]))
        # Pythagoras: the cosine and the relative residual are the two legs.
        legs = np.array(residuals) / np.linalg.norm(x[i])
        np.testing.assert_allclose(code.cosines[i] ** 2 + legs**2, 1, rtol=1e-12)
    dropped = int(code.dropped.sum())
    assert (dropped == 0) == (tolerance == math.inf)
    assert code.beta == pytest.approx(30 / (30 - dropped), rel=1e-15)
    want = code.beta * code.alpha[:, None] * x[rows][code.assignment]
    want[code.dropped] = 0
    np.testing.assert_allclose(code.decoded, want, rtol=1e-14)
    gradient = oracles.point_weight_gradient(x, rows, tolerance, dz)
    np.testing.assert_allclose(gradient, code.decoded.T @ dz, rtol=1e-12, atol=1e-12)


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
    # All tokens are dropped.
    nothing = oracles.point_approximation(x[1:3], np.array([0]), -1.0)
    assert nothing.beta == 1
    assert not nothing.decoded.any()


# Layers.


def norm_by_loops(x, scale, bias, eps, centered):
    y = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        row, n = x[index], x.shape[-1]
        mean = sum(row) / n if centered else 0
        root = math.sqrt(sum((a - mean) ** 2 for a in row) / n + eps)
        y[index] = [s * (a - mean) / root + b for s, b, a in zip(scale, bias, row, strict=True)]
    return y


def test_norms_equal_loops(rng):
    x, scale, bias = rng.normal(size=(2, 3, 5)), *rng.normal(size=(2, 5))
    want = norm_by_loops(x, scale, np.zeros(5), 0.1, centered=False)
    np.testing.assert_allclose(oracles.rms_norm(x, scale, 0.1), want, rtol=1e-14)
    want = norm_by_loops(x, scale, bias, 0.1, centered=True)
    np.testing.assert_allclose(oracles.layer_norm(x, scale, bias, 0.1), want, rtol=1e-13)


ROOT = math.sqrt(2 / math.pi)
ACTIVATIONS = {
    "swiglu": (
        lambda x: oracles.swiglu(x, np.ones_like(x)),
        lambda x: oracles.swiglu_vjp(x, np.ones_like(x), np.ones_like(x))[0],
        lambda a: a / (1 + math.exp(-a)),
    ),
    "gelu": (
        lambda x: oracles.gelu(x, False),
        lambda x: oracles.gelu_vjp(x, False, np.ones_like(x)),
        lambda a: a / 2 * (1 + math.erf(a / math.sqrt(2))),
    ),
    "gelu by tanh": (
        lambda x: oracles.gelu(x, True),
        lambda x: oracles.gelu_vjp(x, True, np.ones_like(x)),
        lambda a: a / 2 * (1 + math.tanh(ROOT * (a + 0.044715 * a**3))),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_their_definition_and_do_not_overflow(name):
    fun, slope, definition = ACTIVATIONS[name]
    x, far = np.array([-2.0, 0.0, 0.5, 3.0]), np.array([-1e30, 1e30])
    np.testing.assert_allclose(fun(x), [definition(a) for a in x], rtol=1e-13)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_array_equal(fun(far), [0, 1e30])
        np.testing.assert_array_equal(slope(far), [0, 1])


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
        inputs, window = x[..., 2 * g : 2 * g + 2], spread[..., 3 * g : 3 * g + 3]
        dense = oracles.conv(inputs, window, (1, 1), padding, (1, 1))[:, ::2, ::3]
        np.testing.assert_allclose(got[..., 3 * g : 3 * g + 3], dense, rtol=1e-13, atol=1e-14)


def test_rope_is_a_product_of_complex_numbers(rng):
    x, positions, theta = rng.normal(size=(2, 3, 2, 6)), rng.integers(0, 50, (2, 3)), 100.0
    z = x[..., :3] + 1j * x[..., 3:]
    z = z * np.exp(1j * positions[:, :, None, None] * theta ** (-np.arange(3) / 3))
    got = oracles.rope(x, positions, theta)
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), rtol=1e-12, atol=1e-13)
    # One row of positions applies to the whole batch.
    shared = oracles.rope(x, positions[0], theta)
    np.testing.assert_array_equal(shared, oracles.rope(x, positions[[0, 0]], theta))


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


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2)])
def test_attention_equals_a_loop(rng, causal, window):
    q = rng.normal(size=(2, 4, 6, 3))
    k, v = rng.normal(size=(2, 2, 4, 2, 3))
    got = oracles.attention(q, k, v, causal, window)
    for b, i, h in np.ndindex(2, 4, 6):
        keys = range(max(0, i + 1 - (window or 4)), i + 1) if causal else range(4)
        g = 0 if h < 3 else 1
        weights = [math.exp(np.dot(q[b, i, h], k[b, j, g]) / math.sqrt(3)) for j in keys]
        want = sum(w * v[b, j, g] for w, j in zip(weights, keys, strict=True)) / sum(weights)
        np.testing.assert_allclose(got[b, i, h], want, rtol=1e-12)


def test_every_result_is_float64(rng):
    x = rng.normal(size=(6, 4)).astype(np.float32)
    assert oracles.random_projection(x, x[:4]).dtype == np.float64
    assert oracles.point_approximation(x, np.array([0]), math.inf).decoded.dtype == np.float64
    assert oracles.rms_norm(x, x[0], 1e-6).dtype == np.float64
    assert oracles.rope(x[:, None, None], np.arange(1), 10.0).dtype == np.float64
