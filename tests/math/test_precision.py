"""Tests of actjax/_math/precision.py: accumulation at least in float32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax._math.precision import (
    accumulation_dtype,
    contract_tokens,
    matmul,
    matmul_transposed,
)

NARROW = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize(("a", "b"), [*itertools.product(NARROW, repeat=2)])
def test_narrow_floats_accumulate_in_float32(a, b):
    assert accumulation_dtype(a) == jnp.float32
    assert accumulation_dtype(a, b) == jnp.float32


@pytest.mark.parametrize("other", ["float16", "bfloat16", "float32", "float64"])
def test_float64_accumulates_in_float64(other, x64):
    assert accumulation_dtype("float64", other) == jnp.float64
    assert accumulation_dtype(other, "float64") == jnp.float64


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_matmul_is_the_product(lead, x64):
    a, b = normal(0, *lead, 5), normal(1, 5, 2)
    np.testing.assert_allclose(matmul(a, b), np.asarray(a) @ np.asarray(b), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_matmul_transposed_is_the_product_with_the_transpose(lead, x64):
    a, b = normal(0, *lead, 5), normal(1, 2, 5)
    want = np.asarray(a) @ np.asarray(b).T
    np.testing.assert_allclose(matmul_transposed(a, b), want, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 1, 3)], ids=str)
def test_contract_tokens_sums_over_all_leading_axes(lead, x64):
    a, b = normal(0, *lead, 5), normal(1, *lead, 2)
    want = np.asarray(a).reshape(-1, 5).T @ np.asarray(b).reshape(-1, 2)
    np.testing.assert_allclose(contract_tokens(a, b), want, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("product", [matmul, matmul_transposed, contract_tokens])
def test_results_have_the_dtype_of_accumulation(product, dtype):
    # 4097 ones: float16 rounds the sum to 4096, and sums in bfloat16 stop at 256.
    a, b = jnp.ones((4097, 2), dtype), jnp.ones((4097, 2), dtype)
    a, b = {matmul: (a.T, b), matmul_transposed: (a.T, b.T), contract_tokens: (a, b)}[product]
    got = product(a, b)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 4097)


def test_contract_tokens_flattens_no_axes():
    # Merging sharded axes would gather them.
    text = str(jax.make_jaxpr(contract_tokens)(jnp.ones((2, 3, 5)), jnp.ones((2, 3, 4))))
    assert "dot_general" in text
    assert "reshape" not in text
