"""Norms and clipping of trees that contain low-rank matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from low_rank_cases import (
    SCALES,
    clip_by_global_norm,
    dense,
    dtypes,
    epsilon,
    f64,
    factored,
    global_norm,
    norm_rounding,
    norms,
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


@jax.jit
def functions(grads, limits):
    """Returns the global norm, the tree clipped to each limit with its norm, and half the tree."""
    clipped = [low_rank.clip_by_global_norm(grads, limit) for limit in limits]
    return low_rank.global_norm(grads), clipped, low_rank.scale_tree(grads, jnp.asarray(0.5))


@jax.jit
def clipped_by_optax(grads, limits):
    clips = [optax.clip_by_global_norm(limit) for limit in limits]
    return [clip.update(grads, clip.init(grads))[0] for clip in clips]


@dtypes
def test_norm_clipping_and_scaling_are_those_of_the_dense_tree(dtype, x64):
    grads = tree(dtype)
    size, dense_grads = dense_norm(grads), dense_tree(grads)
    limits = tuple(share * size for share in (0, 0.01, 0.5, 0.999, 1.001, 100))
    norm, clipped, half = functions(grads, limits)
    # The errors of the factors, and sums over 15 and 30 entries.
    factors = [grads["factored"], grads["stack"]]
    rounding = max(np.max(norm_rounding(a)) for a in factors) + 50 * epsilon(dtype)
    np.testing.assert_allclose(norm, size, rtol=rounding)
    # The root of a sum of squares, each rounded by half an eps.
    rounded = float(jnp.finfo(dtype).eps) + 200 * epsilon(dtype)
    for limit, (got, norm_of_clip) in zip(limits, clipped, strict=True):
        np.testing.assert_array_equal(norm_of_clip, norm)
        assert jax.tree.structure(got) == jax.tree.structure(grads)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
        np.testing.assert_allclose(dense_norm(got), min(limit, size), rtol=rounded)
        if limit > size:
            jax.tree.map(np.testing.assert_array_equal, got, grads)
    if dtype == "float64":
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
        wants = clipped_by_optax(dense_grads, limits)
        jax.tree.map(close, [dense_tree(got) for got, _ in clipped], wants)
    assert jax.tree.structure(half) == jax.tree.structure(grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(dtype)}
    # A power of two changes no rounding.
    halved = jax.tree.map(lambda x: x / 2, dense_grads)
    jax.tree.map(np.testing.assert_array_equal, dense_tree(half), halved)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32", "bfloat16"), "float32"),
        (("float32", "float64"), "float64"),
        ((), "float32"),
    ],
)
def test_the_global_norm_has_the_widest_dtype(dtypes, expected):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        tree = [jnp.full(3, 2, dtype) for dtype in dtypes]
        tree += [LowRank(x[:, None], x[None]) for x in tree]
        norm = global_norm(tree)
    assert norm.dtype == expected
    # Three numbers 2, and nine numbers 4.
    np.testing.assert_allclose(norm, (len(dtypes) * (3 * 4 + 9 * 16)) ** 0.5, rtol=1e-6)


def test_the_global_norm_of_narrow_arrays_is_summed_in_float32():
    # In bfloat16, a sum of ones stops at 256.
    ones = np.ones((64, 64), jnp.bfloat16)
    got = global_norm([ones, LowRank(ones, ones)])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, math.sqrt(4096 + 64.0**4), rtol=1e-6)


def test_the_norm_of_nothing_and_of_zeros_is_zero_and_clipping_zeros_gives_zeros():
    assert low_rank.global_norm({}) == low_rank.global_norm([None]) == 0
    norm, clipped, _ = functions(jax.tree.map(np.zeros_like, tree()), (0.0, 1.0))
    for got, _ in clipped:
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), dense_tree(got))
    assert norm == 0


def test_clipping_brings_any_size_to_the_limit():
    matrices = [factored(scale=scale) for scale in SCALES.values()]
    limits = [float(norms(dense(a)) / 2) for a in matrices]

    @jax.jit
    def clip(matrices, limits):
        # By the norm itself: squares of norms fit into float32 only between 1e-19 and 1e19.
        factors = [low_rank.clip_factor(a.norm(), x) for a, x in zip(matrices, limits, strict=True)]
        scaled = [low_rank.scale_tree([a], f) for a, f in zip(matrices, factors, strict=True)]
        norms = jnp.asarray([0, 1, 2, 4, jnp.inf])
        return scaled, jax.vmap(lambda norm: low_rank.clip_factor(norm, 2.0))(norms)

    scaled, factors = clip(matrices, limits)
    for a, got, limit in zip(matrices, scaled, limits, strict=True):
        np.testing.assert_allclose(dense_norm(got), limit, rtol=norm_rounding(a) + 4 * 2**-23)
    np.testing.assert_array_equal(factors, [1, 1, 1, 0.5, 0])


def test_a_tree_whose_squares_overflow_becomes_zero():
    grads = [factored(scale=(1e20, 1e17)), factored(1)]
    got, norm = clip_by_global_norm(grads, 1.0)
    assert norm == jnp.inf
    assert dense_norm(got) == 0


def test_any_tree_is_clipped_to_the_limit():
    limits = np.geomspace(1e-3, 1e3, 13)
    for seed in range(5):
        grads = [factored(seed), np.random.default_rng(seed).normal(size=4).astype("float32")]
        norm, clipped, _ = functions(grads, tuple(limits))
        rounding = norm_rounding(grads[0]) + 8 * 2**-23
        np.testing.assert_allclose(norm, dense_norm(grads), rtol=rounding)
        for limit, (got, _) in zip(limits, clipped, strict=True):
            want = min(limit, dense_norm(grads))
            np.testing.assert_allclose(dense_norm(got), want, rtol=2 * rounding)


def test_a_gradient_of_nan_is_not_taken_for_a_small_one():
    grads = {"a": np.float32([np.nan, 1]), "b": np.ones(2, np.float32)}
    clipped, norm = clip_by_global_norm(grads, 1.0)
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
