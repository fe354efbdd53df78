"""Tests of actjax/codecs/basis.py: coordinates in a given basis, in 16, 8 and 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.codecs import basis as in_basis

TOKENS, FEATURES, RANK = 24, 8, 5
DTYPES = ("bfloat16", "float32", "float64")
CASES = [
    ("float64", (24, 8), 5),
    ("bfloat16", (2, 12, 8), 5),
    ("float32", (2, 3, 4, 8), 5),
    ("bfloat16", (1, 1), 1),
    ("float32", (3, 7), 7),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def normal(seed, *shape, dtype="float32"):
    """Returns values of 8 bits, which no device rounds before it multiplies them."""
    values = np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)
    return values.astype(jnp.dtype(dtype))


@jax.jit
def _coded(x, basis):
    codes = {bits: in_basis.encode(x, basis, bits) for bits in in_basis.BITS}
    return {bits: (code, in_basis.decode(code)) for bits, code in codes.items()}


def coded(x, basis):
    """Returns the code and the decoded coordinates in all numbers of bits, as NumPy arrays."""
    return jax.tree.map(np.asarray, _coded(x, basis))


def f64(x):
    return np.asarray(x, np.float64)


def epsilon(dtype):
    return float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_coordinates_err_as_the_docstring_says(case, x64):
    dtype, shape, rank = case
    x, basis = normal(0, *shape, dtype=dtype), normal(1, shape[-1], rank, dtype=dtype)
    wide = epsilon(jnp.promote_types(dtype, "float32"))
    for scale in (1e-30, 1.0, 1e30):
        x_scaled = (f64(x) * scale).astype(x.dtype)
        exact, sums = f64(x_scaled) @ f64(basis), abs(f64(x_scaled)) @ abs(f64(basis))
        largest = abs(exact).max(-1, keepdims=True)
        for bits, (code, got) in coded(x_scaled, basis).items():
            assert (got.shape, got.dtype) == ((*shape[:-1], rank), dtype)
            if bits == 16:
                assert code.scale is None
                np.testing.assert_array_equal(got, code.values)
                # Sums at least in float32, rounded to the dtype of `x`.
                bound = (shape[-1] * wide + epsilon(dtype) / 2) * sums
            else:
                # Half a unit. The scale and the decoded value are each off by half an eps; a
                # quotient of up to 127 is rounded before it becomes an integer, which adds up to an
                # eps of the largest coordinate; and the sums are rounded.
                unit = largest * (1 / (2**bits - 2) + epsilon(dtype) + wide)
                bound = unit + (shape[-1] + 1) * wide * sums.max(-1, keepdims=True)
            assert np.all(abs(f64(got) - exact) <= bound)


@dtypes
def test_integers_are_nearest_and_use_their_range_but_not_the_least_one(dtype, x64):
    # The coordinates are the numbers themselves.
    x, basis = normal(0, 500, RANK, dtype=dtype), np.eye(RANK, dtype=jnp.dtype(dtype))
    code, decoded = coded(x, basis)[8]
    assert (code.values.dtype, code.scale.dtype) == (jnp.int8, dtype)
    assert (code.values.shape, code.scale.shape) == ((500, RANK), (500, 1))
    values, scale = code.values.astype(int), f64(code.scale)
    # `-x` has the negated code of `x`, and -128 has no counterpart.
    assert (values.min(), values.max()) == (-127, 127)
    # With a scale that is rounded up by half an eps of bfloat16, 127 becomes 126.5.
    assert np.all(abs(values).max(-1) >= (126 if dtype == "bfloat16" else 127))
    negated = coded(-x, basis)[8][0]
    np.testing.assert_array_equal(negated.values, -values)
    np.testing.assert_array_equal(negated.scale, code.scale)
    # Quotients of up to 127 are rounded, at least in float32.
    quotient = 128 * epsilon(jnp.promote_types(dtype, "float32"))
    assert np.all(abs(values * scale - f64(x)) <= scale * (0.5 + quotient))
    if dtype == "float64":
        signed = (decoded - x) / abs(x).max(-1, keepdims=True)
        assert 0.99 / 254 < abs(signed).max() <= 1.0001 / 254
        # Rounding to the nearest makes errors nearly uniform, with no measurable bias.
        assert abs(signed.mean()) <= 5 * signed.std() / signed.size**0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_as_the_docstring_says(dtype):
    item, basis = jnp.dtype(dtype).itemsize, normal(1, FEATURES, RANK)
    halves = TOKENS * -(-RANK // 2)
    want = {16: TOKENS * RANK * item, 8: TOKENS * (RANK + item), 4: halves + TOKENS * item}
    for shape in [(24, 8), (2, 12, 8)]:
        codes = jax.eval_shape(_coded, jax.ShapeDtypeStruct(shape, dtype), basis)
        for bits, (code, _) in codes.items():
            leaves = jax.tree.leaves(code)
            assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == want[bits]


def test_each_token_has_its_own_scale_and_zeros_come_back():
    x, basis = normal(0, TOKENS, FEATURES), normal(1, FEATURES, RANK)
    sizes = np.ones((TOKENS, 1), "float32")
    sizes[3:6, 0] = 2.0**60, 0, 2.0**-60
    plain = coded(x, basis)
    with jax.debug_nans(True):
        scaled, zeros = coded(sizes * x, basis), coded(0 * x, basis)
    for bits in in_basis.BITS:
        # Powers of two change no rounding.
        np.testing.assert_array_equal(scaled[bits][1], sizes * plain[bits][1])
        assert not np.any(zeros[bits][1])


def test_a_basis_is_cast_to_the_dtype_of_the_activation():
    x = normal(0, TOKENS, FEATURES, dtype="bfloat16")
    basis = np.random.default_rng(1).normal(size=(FEATURES, RANK)).astype("float32")
    got, want = (coded(x, b) for b in (basis, basis.astype(jnp.bfloat16)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    dtypes = {bits: jax.tree.leaves(code.values)[0].dtype for bits, (code, _) in got.items()}
    assert dtypes == {4: jnp.uint8, 8: jnp.int8, 16: jnp.bfloat16}


def test_transformations_of_jax_change_nothing(x64):
    xs = normal(0, 3, TOKENS, FEATURES, dtype="float64")
    basis = normal(1, FEATURES, RANK, dtype="float64")

    @jax.jit
    def transformed(xs):
        run = lambda x: _coded(x, basis)  # noqa: E731
        return run(xs), jax.lax.map(run, xs), jax.vmap(run)(xs)

    want, *others = transformed(xs)
    for got in others:
        for bits, (code, decoded) in got.items():
            assert jax.tree.structure(code) == jax.tree.structure(want[bits][0])
            np.testing.assert_allclose(decoded, want[bits][1], rtol=1e-12, atol=1e-13)


def test_its_name_gives_the_rank_and_the_bits():
    assert in_basis.describe(np.ones((8, 5)), 16) == "Basis(rank=5)"
    assert in_basis.describe(np.ones((8, 5)), 8) == "Basis(rank=5, bits=8)"
