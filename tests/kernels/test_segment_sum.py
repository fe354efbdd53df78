"""Tests of actjax/kernels/segment_sum: sums of scaled rows by segment, in a fixed order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.kernel_cases import TINY, f64, normal

from actjax.kernels.segment_sum.api import scaled_segment_sum

# Shape of the values, segments, dtype, dtype of the index: fewer tokens than a tile, and more.
CASES = [
    ((300, 130), 7, "float32", "int32"),
    ((2, 3, 1), 1, "bfloat16", "uint8"),
    ((2, 333, 50), 40, "float16", "uint8"),
    ((9, 16), 300, "bfloat16", "uint8"),
]

every = pytest.mark.parametrize("case", CASES, ids=str)
both = pytest.mark.parametrize("implementation", ["reference", "interpreted"])


@functools.partial(jax.jit, static_argnums=(0, 1))
def summed(implementation, segments, index, scale, values):
    return scaled_segment_sum(
        index, scale, values, segments=segments, implementation=implementation
    )


def problem(shape, segments, dtype, index_dtype):
    """Returns arguments in which some segments have no token, such as those above the index
    dtype."""
    used = np.arange(0, min(segments, 256), 3 if segments > 1 else 1)
    used = np.union1d(used, min(segments, 256) - 1)
    index = np.random.default_rng(0).choice(used, shape[:-1]).astype(index_dtype)
    return index, normal(*shape[:-1], seed=1), normal(*shape, seed=2).astype(dtype)


def oracle(index, scale, values, segments):
    """Returns the sums, and the sums of absolute values, which bound the rounding of each
    addition."""
    scale = f64(scale.astype(values.dtype)).reshape(-1, 1)
    rows = scale * f64(values).reshape(scale.size, -1)
    sums = np.zeros((2, segments, rows.shape[-1]))
    np.add.at(sums[0], index.reshape(-1), rows)
    np.add.at(sums[1], index.reshape(-1), abs(rows))
    return sums


@every
@both
def test_each_segment_is_the_sum_of_its_scaled_rows(case, implementation):
    index, scale, values = problem(*case)
    got = summed(implementation, case[1], index, scale, values)
    want, bound = oracle(index, scale, values, case[1])
    assert got.dtype == "float32"
    assert got.shape == want.shape
    # A product and an addition for each token.
    assert np.all(abs(f64(got) - want) <= (index.size + 1) * TINY * bound)
    unused = np.setdiff1d(np.arange(case[1]), index)
    assert case[1] == 1 or unused.size > 0
    np.testing.assert_array_equal(f64(got)[unused], 0)
    # Equal bits in every run.
    again = summed(implementation, case[1], index, scale, values)
    np.testing.assert_array_equal(got, again)


def test_the_reference_in_float64(x64):
    index, scale, values = problem((2, 33, 5), 4, "float64", "int32")
    got = summed("reference", 4, index, f64(scale), values)
    assert got.dtype == "float64"
    np.testing.assert_allclose(got, oracle(index, scale, values, 4)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "shape", "segments", "reason"),
    [
        ("float64", (3, 8), 2, "values of 16 or 32 bits, got float64"),
        ("float32", (3, 8), 129, r"up to 128 segments of float32, got 129 of \(3, 8\)"),
        ("bfloat16", (3, 8), 513, r"up to 512 segments of bfloat16, got 513 of \(3, 8\)"),
        ("float32", (0, 8), 2, r"got 2 of \(0, 8\)"),
    ],
)
def test_arguments_that_the_program_refuses(dtype, shape, segments, reason, x64):
    index, scale = jnp.zeros(shape[:-1], jnp.int32), jnp.ones(shape[:-1])
    with pytest.raises(ValueError, match=f"'interpreted' of scaled_segment_sum takes .*{reason}"):
        summed("interpreted", segments, index, scale, jnp.ones(shape, dtype))
