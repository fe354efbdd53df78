import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from actjax import Exact, PointApproximation

KEY = jax.random.key(11)
TOKENS, FEATURES = 30, 6


def tokens(seed=0, count=TOKENS, dtype="float64"):
    values = np.random.default_rng(seed).normal(size=(count, FEATURES))
    return values.astype(jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=0)
def compute(codec, x, key=KEY, dz=None):
    """Returns the code as NumPy arrays, what it decodes to, and the weight gradient."""
    code = codec.encode(x, key)
    gradient = None if dz is None else codec.weight_grad(code, dz)
    return code, codec.decode(code), gradient


def encode(codec, x, key=KEY):
    return jax.tree.map(np.asarray, compute(codec, x, key)[0])


def round_trip(codec, x, key=KEY):
    return np.asarray(compute(codec, x, key)[1])


def drawn_rows(count, total=TOKENS, key=KEY):
    """Returns the tokens that the codec draws as points, uniformly and without replacement."""
    return np.asarray(jax.random.choice(key, total, (count,), replace=False))


@pytest.mark.parametrize(
    ("count", "tolerance"),
    [(1, math.inf), (1, 0.5), (2, 0.9), (5, math.inf), (5, 0.9), (5, 0.5), (TOKENS, 0.5)],
)
def test_it_is_the_oracle_on_the_same_points(count, tolerance, x64):
    x, dz = tokens(), tokens(1)
    codec = PointApproximation(points=count, tolerance=tolerance)
    code, decoded, got_gradient = compute(codec, x, KEY, dz)
    rows = drawn_rows(count)
    want = oracles.point_approximation(x, rows, tolerance)
    np.testing.assert_array_equal(code.points, x[rows])
    np.testing.assert_array_equal(code.index, want.assignment)
    np.testing.assert_array_equal(np.asarray(code.scale) == 0, want.dropped)
    kept = np.where(want.dropped, 0, want.beta * want.alpha)
    np.testing.assert_allclose(code.scale, kept, rtol=1e-12)
    np.testing.assert_allclose(decoded, want.decoded, rtol=1e-12)
    gradient = oracles.point_weight_gradient(x, rows, tolerance, dz)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_rounding_the_chosen_point_is_as_near_as_the_nearest(dtype):
    x = tokens(count=200, dtype=dtype)
    code = encode(PointApproximation(points=20), x)
    want = oracles.point_approximation(x, drawn_rows(20, 200), math.inf)
    index = np.asarray(code.index, int)[:, None]
    chosen = np.take_along_axis(want.cosines, index, axis=1)[:, 0]
    # Products of 6 terms and a norm, summed in float32 for any `x`: a bound for each cosine.
    error = 2 * FEATURES * 2**-23
    assert np.all(chosen >= want.cosines.max(axis=1) - error)
    same = index[:, 0] == want.assignment
    # The coefficient is then rounded once, by half a unit in the last place.
    half = float(jnp.finfo(dtype).eps) / 2
    scale = np.asarray(code.scale, np.float64)
    np.testing.assert_allclose(scale[same], want.alpha[same], rtol=half + error / chosen.min())


def test_the_weight_gradient_of_bfloat16_points_is_summed_in_float32():
    dz = tokens(1, dtype="bfloat16")
    code, _, gradient = compute(PointApproximation(points=5), tokens(dtype="bfloat16"), KEY, dz)
    points, scale, wide = (np.asarray(a, np.float64) for a in (code.points, code.scale, dz))
    decoded = scale[:, None] * points[np.asarray(code.index)]
    # Two products in float32, of 30 and of 5 terms: far from the 2^-9 that bfloat16 rounds by.
    bound = (TOKENS + 5) * 2**-23 * np.abs(decoded).T @ np.abs(wide)
    assert np.all(np.abs(gradient - decoded.T @ wide) <= bound)


def test_tolerance_zero_keeps_only_multiples_of_a_point(x64):
    # Powers of two along the axes, so nothing is rounded and a residual of zero is exact.
    sizes = 2.0 ** np.arange(-6, 6) * np.tile([1, -1, -1], 4)
    x = sizes[:, None] * np.eye(FEATURES)[np.arange(12) % FEATURES]
    x[5] = 0
    for seed in range(4):
        key = jax.random.key(seed)
        want = oracles.point_approximation(x, drawn_rows(3, 12, key), 0.0)
        assert 0 < want.dropped.sum() < 11
        got = round_trip(PointApproximation(points=3, tolerance=0.0), x, key)
        np.testing.assert_allclose(got, want.decoded, rtol=1e-14)


def test_dropping_every_token_leaves_zeros():
    # With a tolerance of zero, even a single token is dropped if rounding leaves a residual.
    x = tokens(count=64, dtype="float32")[:, None]
    codec = PointApproximation(points=1, tolerance=0.0)
    got = np.asarray(jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x, KEY))))(x))
    dropped = ~got.any(axis=(1, 2))
    np.testing.assert_allclose(got[~dropped], x[~dropped], rtol=1e-5)


def test_a_tolerance_drops_some_and_scales_the_rest_up(x64):
    x = tokens()
    code = encode(PointApproximation(points=5, tolerance=0.7), x)
    whole = encode(PointApproximation(points=5), x)
    dropped = int(np.sum(code.scale == 0))
    assert 0 < dropped < TOKENS - 5
    kept = code.scale != 0
    ratio = code.scale[kept] / whole.scale[kept]
    np.testing.assert_allclose(ratio, TOKENS / (TOKENS - dropped), rtol=1e-12)


def test_the_error_of_a_token_is_its_sine_to_its_point(x64):
    x = tokens()
    error = np.linalg.norm(round_trip(PointApproximation(points=5), x) - x, axis=1)
    cosines = oracles.point_approximation(x, drawn_rows(5), math.inf).cosines.max(axis=1)
    sines = np.sqrt(1 - cosines**2) * np.linalg.norm(x, axis=1)
    # For the points themselves, the root of a difference near zero loses half of the digits.
    np.testing.assert_allclose(error, sines, rtol=1e-9, atol=1e-7)


def test_as_many_points_as_tokens_give_the_activation_back(x64):
    x = tokens()
    np.testing.assert_allclose(round_trip(PointApproximation(1.0), x), x, rtol=1e-13)


def test_multiples_of_a_point_are_exact_and_may_be_negative(x64):
    x = np.outer([1.0, -2.0, 0.5, 0.0, -1e-3], np.arange(1.0, 7.0))
    for seed in range(5):
        points = round_trip(PointApproximation(points=1), x, jax.random.key(seed))
        if drawn_rows(1, 5, jax.random.key(seed)) != 3:
            np.testing.assert_allclose(points, x, rtol=1e-14)


def test_a_single_zero_point_decodes_to_zeros():
    x = np.zeros((4, FEATURES), "float32")
    x[2] = 1
    seeds = [s for s in range(20) if drawn_rows(1, 4, jax.random.key(s)) != 2]
    for tolerance in (math.inf, 0.5):
        codec = PointApproximation(points=1, tolerance=tolerance)
        assert not np.any(round_trip(codec, x, jax.random.key(seeds[0])))


def test_zero_points_are_never_chosen_over_others(x64):
    x = tokens()
    x[::2] = 0
    code = encode(PointApproximation(points=20), x)
    norms = np.linalg.norm(code.points, axis=1)
    assert np.any(norms == 0)
    nonzero = np.linalg.norm(x, axis=1) > 0
    assert np.all(norms[code.index[nonzero]] > 0)
    assert not np.any(code.scale[~nonzero])


def test_duplicate_tokens_are_decoded_exactly(x64):
    x = np.tile(tokens(count=3), (10, 1))
    np.testing.assert_allclose(round_trip(PointApproximation(points=29), x), x, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_the_activation_does_not_matter(dtype):
    x = tokens(dtype=dtype)
    plain = encode(PointApproximation(points=5), x)
    for size in (1e-35, 1e-20, 1e20, 1e37):
        # Exact in binary, so that the bits must agree.
        scaled = encode(
            PointApproximation(points=5), x * x.dtype.type(2.0 ** round(math.log2(size)))
        )
        np.testing.assert_array_equal(plain.index, scaled.index)
        np.testing.assert_array_equal(plain.scale, scaled.scale)


def test_tokens_may_differ_in_size_by_more_than_squares_can_hold():
    x = tokens(dtype="float32")
    sizes = (10.0 ** np.linspace(-18, 18, TOKENS)).astype("float32")[:, None]
    codec = PointApproximation(points=TOKENS)
    np.testing.assert_allclose(round_trip(codec, sizes * x), sizes * x, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_indices_take_the_narrowest_type_that_fits(count, dtype):
    codec = PointApproximation(points=count)
    x = jax.ShapeDtypeStruct((70_000, 2), "bfloat16")
    code = jax.eval_shape(codec.encode, x, jax.eval_shape(lambda: KEY))
    assert code.index.dtype == dtype
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    assert total == codec.stored_bytes(x.shape, x.dtype)


def test_pamm_at_one_in_512_stores_a_371th():
    # 32 points of 2,048 bf16 numbers, and for each token an index of one byte and a bf16 number.
    shape, codec = (16_384, 2048), PointApproximation(1 / 512)
    want = 32 * 2048 * 2 + 16_384 * (1 + 2)
    assert codec.stored_bytes(shape, "bfloat16") == want == 180_224
    assert Exact().stored_bytes(shape, "bfloat16") == 64 * 2**20
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    code = jax.eval_shape(codec.encode, x, jax.eval_shape(lambda: KEY))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code)) == want


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 30), (0.5, 15), (0.05, 2), (1e-9, 1)])
def test_a_ratio_is_rounded_and_at_least_one_point(ratio, count):
    assert PointApproximation(ratio).count((5, 6, FEATURES)) == count


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_the_block_of_tokens_changes_nothing(block, monkeypatch, x64):
    codec = PointApproximation(points=4)
    want = encode(codec, tokens())
    monkeypatch.setattr("actjax.codecs.point._MAX_SCORES", 4 * block)
    # Another function, so that it is traced again.
    got = jax.jit(lambda x: codec.encode(x, KEY))(tokens())
    np.testing.assert_array_equal(got.index, want.index)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "takes either `ratio` or `points`"),
        ({"ratio": 0.5, "points": 2}, "takes either `ratio` or `points`"),
        ({"ratio": 0.0}, r"`ratio` of PointApproximation must be in \(0, 1\], got 0.0"),
        ({"ratio": 1.5}, r"`ratio` of PointApproximation must be in \(0, 1\], got 1.5"),
        ({"ratio": math.nan}, "`ratio`"),
        ({"points": 0}, "`points` of PointApproximation must be an integer >= 1, got 0"),
        ({"points": 2.0}, "`points` of PointApproximation must be an integer >= 1, got 2.0"),
        ({"points": 2, "tolerance": -1.0}, "`tolerance` of PointApproximation must be >= 0"),
        ({"points": 2, "tolerance": math.nan}, "`tolerance` of PointApproximation must be >= 0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PointApproximation(**arguments)


def test_more_points_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"`points` 31 of .* is above the 30 tokens"):
        PointApproximation(points=31).encode(tokens(), KEY)


def test_a_token_without_further_axes_is_its_own_point():
    x = tokens(count=1, dtype="float32")
    for codec in (PointApproximation(points=1), PointApproximation(0.5, tolerance=0.1)):
        decoded = round_trip(codec, x[0])
        assert decoded.shape == (FEATURES,)
        np.testing.assert_allclose(decoded, x[0], rtol=1e-6)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match=r"must have features, got shape \(6, 0\)"):
        PointApproximation(points=1).encode(jnp.ones((6, 0)), jax.random.key(0))
    with pytest.raises(ValueError, match=r"needs at least one token, got shape \(0, 6\)"):
        PointApproximation(0.5).encode(jnp.ones((0, FEATURES)), KEY)
