"""Tests of actjax/codecs/point.py: a few tokens stand for all."""

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
def coded(codecs, x, dz, key=KEY):
    """Returns the code of each codec, what it decodes to, and the weight gradient."""
    codes = [codec.encode(x, key) for codec in codecs]
    return [
        (code, codec.decode(code), codec.weight_grad(code, dz))
        for codec, code in zip(codecs, codes, strict=True)
    ]


def drawn_rows(count, total=TOKENS, key=KEY):
    """Returns the tokens that the codec draws as points, uniformly and without replacement."""
    return np.asarray(jax.random.choice(key, total, (count,), replace=False))


CODECS = (
    *(PointApproximation(points=n, tolerance=t) for n, t in [(1, math.inf), (1, 0.5), (2, 0.9)]),
    *(PointApproximation(points=5, tolerance=tolerance) for tolerance in (math.inf, 0.9, 0.5)),
    PointApproximation(points=20),
    PointApproximation(points=TOKENS, tolerance=0.5),
    PointApproximation(1.0),
)
INPUTS = {
    "normal": tokens(),
    "multiples of a point, negative ones too": np.outer(
        np.tile([1.0, -2.0, 0.5, 0.0, -1e-3], 6), np.arange(1.0, 7.0)
    ),
    "zeros among others": tokens() * (np.arange(TOKENS) % 2)[:, None],
    "zeros but one": np.eye(TOKENS, FEATURES) * (np.arange(TOKENS) == 2)[:, None],
    "duplicates": np.tile(tokens(count=3), (10, 1)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_it_is_the_oracle_on_the_same_points(name, x64):
    x, dz = INPUTS[name], tokens(1)
    for codec, (code, decoded, gradient) in zip(CODECS, coded(CODECS, x, dz), strict=True):
        rows = drawn_rows(codec.count(x.shape))
        want = oracles.point_approximation(x, rows, codec.tolerance)
        np.testing.assert_array_equal(code.points, x[rows])
        np.testing.assert_allclose(decoded, want.decoded, rtol=1e-12, atol=1e-13)
        want_gradient = oracles.point_weight_gradient(x, rows, codec.tolerance, dz)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-11, atol=1e-12)
        if name == "normal":  # Otherwise several points are as near.
            np.testing.assert_array_equal(code.index, want.assignment)
            np.testing.assert_array_equal(np.asarray(code.scale) == 0, want.dropped)
            scale = np.where(want.dropped, 0, want.beta * want.alpha)
            np.testing.assert_allclose(code.scale, scale, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_rounding_the_chosen_point_is_as_near_as_the_nearest(dtype):
    x, dz = tokens(count=200, dtype=dtype), tokens(1, count=200, dtype=dtype)
    ((code, _, gradient),) = coded((PointApproximation(points=20),), x, dz)
    want = oracles.point_approximation(x, drawn_rows(20, 200), math.inf)
    index = np.asarray(code.index, int)
    chosen = want.cosines[np.arange(200), index]
    # Products of 6 terms and a norm, summed in float32 for any `x`: a bound for each cosine.
    error = 2 * FEATURES * 2**-23
    assert np.all(chosen >= want.cosines.max(axis=1) - error)
    same = index == want.assignment
    # The coefficient is then rounded once, by half a unit in the last place.
    half = float(jnp.finfo(dtype).eps) / 2
    points, scale, dz = (np.asarray(a, np.float64) for a in (code.points, code.scale, dz))
    np.testing.assert_allclose(scale[same], want.alpha[same], rtol=half + error / chosen.min())
    # Two products in float32, of 200 and of 20 terms: far from the 2^-9 that bfloat16 rounds by.
    decoded = scale[:, None] * points[index]
    bound = (200 + 20) * 2**-23 * np.abs(decoded).T @ np.abs(dz)
    assert np.all(np.abs(gradient - decoded.T @ dz) <= bound)


def test_tolerance_zero_keeps_only_multiples_of_a_point(x64):
    # Powers of two along the axes, so nothing is rounded and a residual of zero is exact.
    sizes = 2.0 ** np.arange(-6, 6) * np.tile([1, -1, -1], 4)
    x = sizes[:, None] * np.eye(FEATURES)[np.arange(12) % FEATURES]
    x[5] = 0
    codecs = (PointApproximation(points=3, tolerance=0.0),)
    for seed in range(4):
        key = jax.random.key(seed)
        want = oracles.point_approximation(x, drawn_rows(3, 12, key), 0.0)
        assert 0 < want.dropped.sum() < 11
        ((_, got, _),) = coded(codecs, x, x, key)
        np.testing.assert_allclose(got, want.decoded, rtol=1e-14)


def test_dropping_every_token_leaves_zeros():
    # With a tolerance of zero, even a single token is dropped if rounding leaves a residual.
    x = tokens(count=64, dtype="float32")[:, None]
    codec = PointApproximation(points=1, tolerance=0.0)
    got = np.asarray(jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x, KEY))))(x))
    dropped = ~got.any(axis=(1, 2))
    np.testing.assert_allclose(got[~dropped], x[~dropped], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_the_activation_does_not_matter(dtype):
    x, codecs = tokens(dtype=dtype), (PointApproximation(points=5), PointApproximation(1.0))
    ((plain, *_), _) = coded(codecs, x, x)
    for size in (-116, -66, 66, 123):
        # Exact in binary, so that the bits must agree.
        ((code, *_), _) = coded(codecs, x * x.dtype.type(2.0**size), x)
        np.testing.assert_array_equal(plain.index, code.index)
        np.testing.assert_array_equal(plain.scale, code.scale)
    if dtype == "float32":
        # Tokens may differ in size by more than squares can hold.
        x = (10.0 ** np.linspace(-18, 18, TOKENS)).astype("float32")[:, None] * x
        np.testing.assert_allclose(coded(codecs, x, x)[1][1], x, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_indices_take_the_narrowest_type_that_fits(count, dtype):
    codec = PointApproximation(points=count)
    x = jax.ShapeDtypeStruct((70_000, 2), "bfloat16")
    code = jax.eval_shape(codec.encode, x, KEY)
    assert code.index.dtype == dtype
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))
    assert total == codec.stored_bytes(x.shape, x.dtype)


def test_pamm_at_one_in_512_stores_a_371th():
    # 32 points of 2,048 bf16 numbers, and for each token an index of one byte and a bf16 number.
    shape, codec = (16_384, 2048), PointApproximation(1 / 512)
    want = 32 * 2048 * 2 + 16_384 * (1 + 2)
    assert codec.stored_bytes(shape, "bfloat16") == want == 180_224
    assert Exact().stored_bytes(shape, "bfloat16") == 64 * 2**20


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 30), (0.5, 15), (0.05, 2), (1e-9, 1)])
def test_a_ratio_is_rounded_and_at_least_one_point(ratio, count):
    assert PointApproximation(ratio).count((5, 6, FEATURES)) == count


def test_the_block_of_tokens_changes_nothing(monkeypatch, x64):
    codec = PointApproximation(points=4)
    want = jax.jit(lambda x: codec.encode(x, KEY))(tokens())
    for block in (1, 7):
        monkeypatch.setattr("actjax.codecs.point._MAX_SCORES", 4 * block)
        # Another function, so that it is traced again.
        got = jax.jit(lambda x: codec.encode(x, KEY))(tokens())
        np.testing.assert_array_equal(got.index, want.index)
        np.testing.assert_allclose(got.scale, want.scale, rtol=1e-14)


def test_a_token_without_further_axes_is_its_own_point():
    x = tokens(count=1, dtype="float32")[0]
    codecs = PointApproximation(points=1), PointApproximation(0.5, tolerance=0.1)
    run = jax.jit(lambda x: [codec.decode(codec.encode(x, KEY)) for codec in codecs])
    for decoded in run(x):
        assert decoded.shape == (FEATURES,)
        np.testing.assert_allclose(decoded, x, rtol=1e-6)
