"""Tests of actjax/codecs/basis.py: coordinates in a given basis, in 16, 8 and 4 bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actjax.codecs import basis as in_basis

TOKENS, FEATURES, RANK = 24, 8, 5
SHAPES = [(24, 8), (2, 12, 8), (2, 3, 4, 8)]
DTYPES = ("bfloat16", "float32", "float64")

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
bits = pytest.mark.parametrize("bits", in_basis.BITS)


def normal(seed, *shape, dtype="float32"):
    """Returns values of 8 bits, which no device rounds before it multiplies them."""
    values = np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)
    return values.astype(jnp.dtype(dtype))


def directions(dtype="float32"):
    return normal(1, FEATURES, RANK, dtype=dtype)


@jax.jit
def _coded(x, basis):
    """Returns the code in all numbers of bits, and the decoded coordinates."""
    codes = {bits: in_basis.encode(x, basis, bits) for bits in in_basis.BITS}
    return {bits: (code, in_basis.decode(code)) for bits, code in codes.items()}


def both(x, basis, bits):
    """Returns the code and the decoded coordinates, as NumPy arrays."""
    return jax.tree.map(np.asarray, _coded(x, basis)[bits])


def encode(x, basis, bits):
    return both(x, basis, bits)[0]


def round_trip(x, basis, bits):
    return both(x, basis, bits)[1]


def f64(x):
    return np.asarray(x, np.float64)


def epsilon(dtype):
    return float(jnp.finfo(dtype).eps)


def product_rounding(x, basis):
    """Returns the error bound of `x basis`, summed at least in float32 and rounded to the dtype of
    `x`."""
    wide = jnp.promote_types(x.dtype, "float32")
    sums = abs(f64(x)) @ abs(f64(basis))
    return (x.shape[-1] * epsilon(wide) + epsilon(x.dtype) / 2) * sums


def test_sixteen_eight_or_four_bits():
    assert in_basis.BITS == (4, 8, 16)


@dtypes
@shapes
def test_sixteen_bits_are_the_coordinates(shape, dtype, x64):
    x, basis = normal(0, *shape, dtype=dtype), directions(dtype)
    code, got = both(x, basis, 16)
    assert code.scale is None
    assert (got.shape, got.dtype) == ((*shape[:-1], RANK), dtype)
    np.testing.assert_array_equal(got, code.values)
    assert np.all(abs(f64(got) - f64(x) @ f64(basis)) <= product_rounding(x, basis))


def in_few_bits(x, basis, bits=8):
    """Returns the error bound per token: half a unit, and the roundings of the dtype of `x`.

    The scale and the decoded value are each off by half an eps. A quotient of up to 127 is rounded
    before it becomes an integer, which adds up to an eps of the largest coordinate.
    """
    wide = epsilon(jnp.promote_types(x.dtype, "float32"))
    largest = abs(f64(x) @ f64(basis)).max(-1, keepdims=True)
    return largest * (1 / (2**bits - 2) + epsilon(x.dtype) + wide)


@pytest.mark.parametrize("bits", [8, 4])
@dtypes
@shapes
def test_a_few_bits_err_as_the_docstring_says(shape, dtype, bits, x64):
    x, basis = normal(0, *shape, dtype=dtype), directions(dtype)
    got = round_trip(x, basis, bits)
    assert (got.shape, got.dtype) == ((*shape[:-1], RANK), dtype)
    summed = (FEATURES + 1) * epsilon(jnp.promote_types(dtype, "float32"))
    bound = in_few_bits(x, basis, bits) + summed * (abs(f64(x)) @ abs(f64(basis)))
    assert np.all(abs(f64(got) - f64(x) @ f64(basis)) <= bound)


def test_the_error_comes_near_its_bound(x64):
    x, basis = normal(0, 2000, FEATURES, dtype="float64"), directions("float64")
    exact = f64(x) @ f64(basis)
    share = abs(round_trip(x, basis, 8) - exact) / abs(exact).max(-1, keepdims=True)
    assert 0.99 / 254 < share.max() <= 1.0001 / 254
    # Rounding to the nearest makes errors nearly uniform, with no measurable bias.
    signed = (round_trip(x, basis, 8) - exact) / abs(exact).max(-1, keepdims=True)
    assert abs(signed.mean()) <= 5 * signed.std() / signed.size**0.5


@dtypes
def test_integers_use_their_range_but_not_the_least_one(dtype, x64):
    x, basis = normal(0, 500, FEATURES, dtype=dtype), directions(dtype)
    code = encode(x, basis, 8)
    assert (code.values.dtype, code.scale.dtype) == (jnp.int8, dtype)
    assert (code.values.shape, code.scale.shape) == ((500, RANK), (500, 1))
    values = np.asarray(code.values, int)
    # `-x` has the negated code of `x`, and -128 has no counterpart.
    assert (values.min(), values.max()) == (-127, 127)
    # With a scale that is rounded up by half an eps of bfloat16, 127 becomes 126.5.
    least = 126 if dtype == "bfloat16" else 127
    assert np.all(abs(values).max(-1) >= least)
    negated = encode(-x, basis, 8)
    np.testing.assert_array_equal(negated.values, -values)
    np.testing.assert_array_equal(negated.scale, code.scale)


@dtypes
def test_integers_are_nearest_in_units_of_the_stored_scale(dtype, x64):
    x = normal(0, 500, RANK, dtype=dtype)
    code = encode(x, np.eye(RANK, dtype=jnp.dtype(dtype)), 8)
    error = abs(f64(code.values) * f64(code.scale) - f64(x))
    # Rounding of quotients up to 127, at least in float32.
    quotient = 128 * epsilon(jnp.promote_types(dtype, "float32"))
    assert np.all(error <= f64(code.scale) * (0.5 + quotient))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@shapes
def test_bytes_are_as_the_docstring_says(shape, dtype):
    x, basis = normal(0, *shape, dtype=dtype), directions()
    item = jnp.dtype(dtype).itemsize
    four = TOKENS * -(-RANK // 2) + TOKENS * item
    for bits, want in [(16, TOKENS * RANK * item), (8, TOKENS * RANK + TOKENS * item), (4, four)]:
        code = jax.eval_shape(functools.partial(in_basis.encode, bits=bits), x, basis)
        leaves = jax.tree.leaves(code)
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@bits
def test_zeros_come_back_as_zeros(bits, dtype):
    with jax.debug_nans(True):
        got = round_trip(np.zeros((TOKENS, FEATURES), jnp.dtype(dtype)), directions(), bits)
    np.testing.assert_array_equal(f64(got), np.zeros((TOKENS, RANK)))


def test_each_token_has_its_own_scale():
    x, basis = normal(0, TOKENS, FEATURES), directions()
    sizes = np.ones((TOKENS, 1), "float32")
    sizes[3:6, 0] = 2.0**60, 0, 2.0**-60
    # Powers of two change no rounding.
    got = round_trip(sizes * x, basis, 8)
    np.testing.assert_array_equal(got, sizes * round_trip(x, basis, 8))


@bits
def test_the_weight_gradient_of_the_code_is_that_of_the_input_projected(bits, x64):
    x, dz = normal(0, TOKENS, FEATURES, dtype="float64"), normal(2, TOKENS, 3, dtype="float64")
    basis = directions("float64")
    got = round_trip(x, basis, bits).T @ dz
    want = f64(basis).T @ (f64(x).T @ f64(dz))
    if bits == 16:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    else:
        bound = in_few_bits(x, basis, bits).T @ abs(f64(dz)) + 1e-12
        assert np.all(abs(got - want) <= bound)


@bits
def test_a_basis_is_cast_to_the_dtype_of_the_activation(bits):
    x = normal(0, TOKENS, FEATURES, dtype="bfloat16")
    basis = np.random.default_rng(1).normal(size=(FEATURES, RANK)).astype("float32")
    got, want = (encode(x, b, bits) for b in (basis, basis.astype(jnp.bfloat16)))
    values = jax.tree.leaves(got.values)[0]
    assert values.dtype == {4: jnp.uint8, 8: jnp.int8, 16: jnp.bfloat16}[bits]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@bits
def test_transformations_of_jax_change_nothing(bits, x64):
    xs, basis = normal(0, 3, TOKENS, FEATURES, dtype="float64"), directions("float64")
    want, whole = round_trip(xs, basis, bits), encode(xs, basis, bits)

    @jax.jit
    def transformed(xs):
        _, scanned = jax.lax.scan(lambda _, x: (None, in_basis.encode(x, basis, bits)), None, xs)
        codes = scanned, jax.vmap(lambda x: in_basis.encode(x, basis, bits))(xs)
        return [(code, in_basis.decode(code)) for code in codes]

    for code, decoded in transformed(xs):
        assert jax.tree.structure(code) == jax.tree.structure(whole)
        np.testing.assert_allclose(decoded, want, rtol=1e-12, atol=1e-13)


def test_a_basis_that_does_not_fit_is_refused():
    for shape in [(), (8,), (7, 5), (5, 8), (2, 8, 5)]:
        expected = re.escape(f"`basis` must be [8, k] for x(2, 12, 8), got {shape}.")
        for bits in in_basis.BITS:
            with pytest.raises(ValueError, match=f"^{expected}$"):
                in_basis.encode(np.ones((2, 12, 8)), np.ones(shape), bits)


def test_its_name_gives_the_rank_and_the_bits():
    assert in_basis.describe(np.ones((8, 5)), 16) == "Basis(rank=5)"
    assert in_basis.describe(np.ones((8, 5)), 8) == "Basis(rank=5, bits=8)"


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 1), (4, 3, 2), (3, 7, 7)]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from(DTYPES[:2]),
    seed=st.integers(0, 1000),
)
def test_any_activation_survives(shape, scale, dtype, seed):
    tokens, features, rank = shape
    x = (normal(seed, tokens, features) * scale).astype(jnp.bfloat16).astype(jnp.dtype(dtype))
    basis = normal(seed + 1, features, rank, dtype=dtype)
    got, exact = f64(round_trip(x, basis, 8)), f64(x) @ f64(basis)
    summed = (features + 1) * 2**-23 * (abs(f64(x)) @ abs(f64(basis)))
    assert np.all(abs(got - exact) <= in_few_bits(x, basis) + summed.max(-1, keepdims=True))


def test_unknown_bits_are_refused():
    with pytest.raises(ValueError, match=r"`bits` must be one of \(4, 8, 16\), got 5"):
        in_basis.encode(np.ones((3, 4)), np.ones((4, 2)), 5)
