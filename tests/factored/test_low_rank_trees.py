"""Norms and clipping of trees that contain low-rank matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_cases import (
    clip_by_global_norm,
    clip_factor,
    dense,
    dtypes,
    epsilon,
    f64,
    factored,
    global_norm,
    norm,
    norm_rounding,
    norms,
    scale_tree,
    scales,
)

from actjax.factored import low_rank
from actjax.factored.low_rank import LowRank, is_low_rank


def tree(dtype="float32", lead=(2,)):
    array = np.random.default_rng(3).normal(size=(3, 4)).astype(jnp.dtype(dtype))
    return {
        "factored": factored(0, dtype=dtype, basis_name="p"),
        "stack": factored(1, lead=lead, dtype=dtype),
        "others": [array, None, array[0]],
    }


def dense_tree(tree):
    return jax.tree.map(lambda x: dense(x) if is_low_rank(x) else f64(x), tree, is_leaf=is_low_rank)


def dense_norm(tree):
    return math.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(dense_tree(tree))))


@dtypes
def test_the_global_norm_is_that_of_the_dense_tree(dtype, x64):
    grads = tree(dtype)
    # The errors of the factors, and sums over 15 and 30 entries.
    factors = [grads["factored"], grads["stack"]]
    rounding = max(norm_rounding(a) for a in factors) + 50 * epsilon(dtype)
    np.testing.assert_allclose(global_norm(grads), dense_norm(grads), rtol=rounding)


def test_the_global_norm_of_narrow_arrays_is_summed_in_float32():
    # In bfloat16, a sum of ones stops at 256.
    ones = np.ones((64, 64), jnp.bfloat16)
    got = global_norm([ones, LowRank(ones, ones)])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, math.sqrt(4096 + 64.0**4), rtol=1e-6)


def test_the_global_norm_of_nothing_is_zero():
    assert global_norm({}) == global_norm([None]) == 0
    assert global_norm([0 * factored(), np.zeros(3, np.float32)]) == 0


def test_clipping_equals_optax_on_the_dense_tree(x64):
    @jax.jit
    def by_optax(grads, limit):
        clip = optax.clip_by_global_norm(limit)
        return clip.update(grads, clip.init(grads))[0]

    grads = tree("float64")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    for share in (0.01, 0.5, 0.999, 1.001, 100):
        limit = share * dense_norm(grads)
        got, norm = clip_by_global_norm(grads, limit)
        np.testing.assert_allclose(norm, dense_norm(grads), rtol=1e-13)
        jax.tree.map(close, dense_tree(got), by_optax(dense_tree(grads), limit))
        np.testing.assert_allclose(dense_norm(got), min(limit, norm), rtol=1e-13)


@dtypes
def test_clipping_keeps_structure_and_dtypes(dtype, x64):
    grads = tree(dtype)
    got, _ = jax.jit(clip_by_global_norm)(grads, 0.25)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    # The root of a sum of squares, each rounded by half an eps.
    rounded = float(jnp.finfo(dtype).eps) + 200 * epsilon(dtype)
    np.testing.assert_allclose(dense_norm(got), 0.25, rtol=rounded)


def test_a_tree_below_the_limit_is_unchanged():
    grads = tree()
    got, norm = clip_by_global_norm(grads, 2 * dense_norm(grads))
    jax.tree.map(np.testing.assert_array_equal, got, grads)
    np.testing.assert_array_equal(norm, global_norm(grads))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_clipping_zeros_gives_zeros(limit):
    got, norm = clip_by_global_norm(jax.tree.map(np.zeros_like, tree()), limit)
    assert norm == 0
    for leaf in jax.tree.leaves(dense_tree(got)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_a_limit_of_zero_gives_zeros():
    got, _ = clip_by_global_norm(tree(), 0.0)
    assert dense_norm(got) == 0


@scales
def test_clipping_brings_any_size_to_the_limit(scale):
    a = factored(scale=scale)
    limit = norms(dense(a)) / 2
    # By the norm itself: squares of norms fit into float32 only between 1e-19 and 1e19.
    got = scale_tree([a], clip_factor(norm(a), limit))
    np.testing.assert_allclose(dense_norm(got), limit, rtol=norm_rounding(a) + 4 * 2**-23)


def test_a_tree_whose_squares_overflow_becomes_zero():
    grads = [factored(scale=(1e20, 1e17)), factored(1)]
    got, norm = clip_by_global_norm(grads, 1.0)
    assert norm == jnp.inf
    assert dense_norm(got) == 0


def test_a_factor_of_a_norm_is_one_up_to_the_limit():
    found = [clip_factor(jnp.float32(norm), 2.0) for norm in (0, 1, 2, 4, jnp.inf)]
    np.testing.assert_array_equal(found, [1, 1, 1, 0.5, 0])


@dtypes
def test_scaling_a_tree_scales_every_leaf(dtype, x64):
    grads = tree(dtype)
    got = scale_tree(grads, jnp.asarray(0.5))
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    # A power of two changes no rounding.
    halved = jax.tree.map(lambda x: x / 2, dense_tree(grads))
    jax.tree.map(np.testing.assert_array_equal, dense_tree(got), halved)


@settings(max_examples=15, deadline=None)
@given(limit=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_any_tree_is_clipped_to_the_limit(limit, seed):
    grads = [factored(seed), np.random.default_rng(seed).normal(size=4).astype("float32")]
    got, norm = clip_by_global_norm(grads, limit)
    rounding = norm_rounding(grads[0]) + 8 * 2**-23
    np.testing.assert_allclose(norm, dense_norm(grads), rtol=rounding)
    np.testing.assert_allclose(dense_norm(got), min(limit, dense_norm(grads)), rtol=2 * rounding)


def test_a_gradient_of_nan_is_not_taken_for_a_small_one():
    clipped, norm = clip_by_global_norm({"a": jnp.array([jnp.nan, 1]), "b": jnp.ones(2)}, 1.0)
    assert np.isnan(norm)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(clipped))


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), -3])
def test_a_negative_largest_norm_is_refused(max_norm):
    with pytest.raises(ValueError, match="`max_norm` of clip_by_global_norm must be at least 0"):
        low_rank.clip_by_global_norm({"w": np.ones(3)}, max_norm)


def test_numbers_of_python_are_clipped_too():
    clip = jax.jit(lambda b: low_rank.clip_by_global_norm({"a": 3.0, "b": b}, 1.0))
    clipped, norm = clip(np.asarray([4.0]))
    assert norm == 5
    np.testing.assert_allclose(clipped["a"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.8], rtol=1e-6)
