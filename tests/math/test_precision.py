"""Tests of actjax/_math/precision.py: accumulation at least in float32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from actjax._math.precision import (
    accumulation_dtype,
    contract_tokens,
    matmul,
    matmul_transposed,
    product_dtype,
)

NARROW = ("float16", "bfloat16", "float32")


def test_narrow_floats_accumulate_in_float32_and_float64_in_float64(x64):
    for a, b in itertools.product(NARROW, repeat=2):
        assert accumulation_dtype(a) == accumulation_dtype(a, b) == jnp.float32
    for other in (*NARROW, "float64"):
        assert accumulation_dtype("float64", other) == jnp.float64
        assert accumulation_dtype(other, "float64") == jnp.float64


def test_products_are_written_in_16_bits_by_one_accelerator(monkeypatch):
    x = jnp.ones((2, 2), "bfloat16")
    assert product_dtype(x) == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert product_dtype(x, "bfloat16") == jnp.bfloat16
    assert product_dtype(x, "float32") == jnp.float32
    # Several devices exchange sums.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",), (AxisType.Auto,))):
        assert product_dtype(x, "bfloat16") == jnp.float32


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def test_products_over_features_and_over_all_leading_axes(x64):
    leads, w = [(), (4,), (2, 3), (2, 1, 3)], normal(1, 5, 2)
    arrays = [(normal(0, *lead, 5), normal(2, *lead, 2)) for lead in leads]

    @jax.jit
    def run(arrays):
        return [(matmul(a, w), matmul_transposed(a, w.T), contract_tokens(a, b)) for a, b in arrays]

    for (a, b), (*products, contracted) in zip(arrays, run(arrays), strict=True):
        for product in products:
            np.testing.assert_allclose(product, a @ w, rtol=1e-14, atol=1e-15)
        want = a.reshape(-1, 5).T @ b.reshape(-1, 2)
        np.testing.assert_allclose(contracted, want, rtol=1e-14, atol=1e-15)


def test_results_have_the_dtype_of_accumulation():
    # 4097 ones: float16 rounds the sum to 4096, and sums in bfloat16 stop at 256.
    arrays = [np.ones((4097, 2), jnp.dtype(dtype)) for dtype in NARROW]

    @jax.jit
    def run(arrays):
        return [
            (matmul(a.T, a), matmul_transposed(a.T, a.T), contract_tokens(a, a)) for a in arrays
        ]

    for got in jax.tree.leaves(run(arrays)):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, 4097)


def test_contract_tokens_flattens_no_axes():
    # Merging sharded axes would gather them.
    text = str(jax.make_jaxpr(contract_tokens)(np.ones((2, 3, 5)), np.ones((2, 3, 4))))
    assert "dot_general" in text
    assert "reshape" not in text
