"""Tests of actjax/_math/squares.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from actjax._math.squares import PARTS, in_parts, sum_of_squares

SHAPES = [(), (0,), (5,), (3, 4), (2, 3, 7), (PARTS + 3, 2), (17 * PARTS, 1)]


def test_it_is_the_sum_of_all_arrays():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in SHAPES]
    arrays += [(1 + 2j) * arrays[3], arrays[3].astype("float16"), np.arange(3)]
    expected = sum(np.sum(np.abs(np.asarray(x, "complex128")) ** 2) for x in arrays)
    got = jax.jit(sum_of_squares)(list(map(jnp.asarray, arrays)))
    assert got.dtype == jnp.float32
    # Sums of at most 17 squares, of 17 of them, of eleven arrays, and of 4,096 parts.
    np.testing.assert_allclose(got, expected.real, rtol=(17 + 17 + 11 + 12) * 2.0**-24)


def test_it_accumulates_in_float64(x64):
    arrays = [jnp.ones(3, "float64"), jnp.full(2, 1e-9, "float64")]
    np.testing.assert_allclose(sum_of_squares(arrays), 3 + 2e-18, rtol=2.0**-52)


@pytest.mark.parametrize("size", [0, 1, PARTS, PARTS + 1, 16 * PARTS, 16 * PARTS + 1])
def test_parts_have_the_same_sum(size):
    parts = jax.jit(in_parts)(jnp.arange(size) % 5)
    assert parts.shape == (PARTS,)
    assert np.sum(parts) == np.sum(np.arange(size) % 5)


def test_all_arrays_are_added_up_by_one_reduction():
    program = jax.make_jaxpr(sum_of_squares)([jnp.ones((8, 4))] * 5)
    reductions = [eqn for eqn in equations(program) if eqn.primitive.name == "reduce_sum"]
    assert len(reductions) == 5 + 1
