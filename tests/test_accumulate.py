"""Tests of `actjax.accumulate`: the mean gradient of micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    BOTH,
    SVD,
    assert_same,
    dense,
    factored,
    normal,
    project,
    run_stack,
    stack,
    tanh_layer,
    total,
)

import actjax
from actjax import Codec, Exact, accumulate


def batches(count=4, tokens=12, features=8):
    x = normal(10, count, tokens, features)
    return x, normal(11, count, tokens, features)


def regression(params, batch, codec: Codec = Exact()):
    """Returns a mean over tokens: the mean over micro-batches is that of the large batch."""
    x, y = batch
    h = jnp.tanh(project(x, params["a"], codec, bias=params["bias"]))
    return jnp.mean(jnp.square(project(h, params["b"], codec) - y))


def regression_params(dtype=None):
    return {
        "a": normal(1, 8, 8, dtype=dtype),
        "b": normal(2, 8, 8, dtype=dtype),
        "bias": normal(3, 8, dtype=dtype),
    }


def accumulated(loss_and_grad, **options):
    return jax.jit(lambda params, batches: accumulate(loss_and_grad, params, batches, **options))


def joined(batches):
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batches)


def micro_batches(fun, params, stack):
    """Returns value and gradient of each micro-batch."""
    count, fun = len(jax.tree.leaves(stack)[0]), jax.jit(fun)
    return [fun(params, jax.tree.map(lambda a, i=i: a[i], stack)) for i in range(count)]


@pytest.mark.parametrize("value_and_grad", BOTH, ids=["actjax", "jax"])
def test_micro_batches_have_the_gradient_of_the_large_batch(value_and_grad, x64):
    params, stack = regression_params(), batches()
    value, gradient = accumulated(value_and_grad(regression))(params, stack)
    want_value, want = jax.jit(jax.value_and_grad(regression))(params, joined(stack))
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, want)
    assert factored(gradient) == set()


def test_micro_batches_in_a_shared_basis_have_the_gradient_of_the_large_batch(x64):
    params, stack = regression_params(), batches()
    bases = {"a": normal(4, 8, 3), "b": normal(5, 8, 2)}
    run = actjax.value_and_grad(regression, bases=bases)
    # `max_rank` applies to factors without a basis only.
    value, gradient = accumulated(run, max_rank=1)(params, stack)
    want_value, want = jax.jit(run)(params, joined(stack))
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, dense(want))
    for name, basis in bases.items():
        assert gradient[name].basis_name == name
        np.testing.assert_array_equal(gradient[name].left, basis)


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]], ids=["equal", "given"])
def test_factors_without_a_basis_are_concatenated(weights, x64):
    params, stack = regression_params(), batches()
    run = actjax.value_and_grad(functools.partial(regression, codec=SVD))
    given = None if weights is None else jnp.asarray(weights)
    value, gradient = accumulated(run, weights=given)(params, stack)
    parts, shares = micro_batches(run, params, stack), weights or [1 / 4] * 4
    want_value, want = jax.tree.map(
        lambda *all_of: sum(s * np.asarray(g) for s, g in zip(shares, all_of, strict=True)),
        *dense(parts),
    )
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, want)
    assert factored(gradient) == {"a", "b"}
    for name in ("a", "b"):
        assert gradient[name].rank == 4 * SVD.rank
        lefts = [g[name].left for _, g in parts]
        np.testing.assert_allclose(gradient[name].left, np.concatenate(lefts, 1), rtol=1e-10)


def test_max_rank_truncates_with_the_smallest_possible_error(x64):
    params, stack = regression_params(), batches()
    run = actjax.value_and_grad(functools.partial(regression, codec=SVD))
    whole, truncated, same = (
        accumulated(run, max_rank=rank)(params, stack)[1] for rank in (None, 5, 12)
    )
    for name in ("a", "b"):
        assert (truncated[name].rank, same[name].rank) == (5, 12)
        np.testing.assert_array_equal(same[name].left, whole[name].left)
        np.testing.assert_array_equal(same[name].right, whole[name].right)
        matrix = dense(whole[name])
        values = np.linalg.svd(matrix, compute_uv=False)
        error = np.linalg.norm(matrix - dense(truncated[name]))
        np.testing.assert_allclose(error, np.linalg.norm(values[5:]), rtol=1e-10)
    np.testing.assert_array_equal(whole["bias"], truncated["bias"])


def test_stacked_factors_are_concatenated_per_layer(x64):
    params, xs = stack(), normal(0, 2, 12, 8)
    run = actjax.value_and_grad(lambda p, x: total(run_stack(p, x, tanh_layer)))
    _, gradient = accumulated(run)(params, xs)
    assert gradient["w"].left.shape == (3, 8, 2 * 3)
    assert gradient["w"].right.shape == (3, 2 * 3, 8)
    (_, one), (_, two) = micro_batches(run, params, xs)
    mean = jax.tree.map(lambda a, b: np.add(a, b) / 2, dense(one), dense(two))
    assert_same(gradient, mean)
    truncated = accumulated(run, max_rank=2)(params, xs)[1]["w"]
    matrices = np.asarray(dense(gradient["w"]))
    values = np.linalg.svd(matrices, compute_uv=False)
    error = np.linalg.norm(dense(truncated) - matrices, axis=(-2, -1))
    np.testing.assert_allclose(error, np.linalg.norm(values[:, 2:], axis=-1), rtol=1e-9)


def test_dense_gradients_and_gradients_in_a_basis_are_summed_in_float32():
    params, ones = {"w": np.ones((8, 1), jnp.bfloat16)}, np.ones((600, 1, 8), jnp.bfloat16)
    fun = lambda p, x: jnp.sum(project(x, p["w"], Exact()).astype(jnp.float32))  # noqa: E731
    weights = jnp.asarray(np.ones(600))
    for bases in (None, {"w": jnp.asarray(np.eye(8, 2))}):
        run = actjax.value_and_grad(fun, bases=bases)
        value, gradient = accumulated(run, weights=weights)(params, ones)
        summed = gradient["w"].right if bases else gradient["w"]
        assert summed.dtype == "float32"
        # A sum in bfloat16 would stop at 256.
        np.testing.assert_array_equal(summed, 600)
        assert value == 600 * 8


def test_factors_without_a_basis_keep_the_dtype_of_the_weight():
    params, xs = {"w": normal(1, 8, 5, dtype=jnp.bfloat16)}, normal(2, 2, 12, 8)
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"])))
    assert jax.eval_shape(accumulated(run), params, xs)[1]["w"].dtype == "bfloat16"


def test_weights_may_have_a_wider_dtype_than_the_gradient(x64):
    params, xs = {"w": normal(1, 8, 5, dtype="float32")}, normal(2, 2, 12, 8, dtype="float32")
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"], Exact())))
    loss, gradient = accumulated(run, weights=jnp.asarray([0.5, 0.5], "float64"))(params, xs)
    want_loss, want = accumulated(run)(params, xs)
    assert gradient["w"].dtype == "float32"
    # A weight of one half is exact in both dtypes, and so is the product with it.
    np.testing.assert_array_equal(loss, want_loss)
    np.testing.assert_array_equal(gradient["w"], want["w"])


def test_weights_may_be_a_list():
    loss_and_grad = actjax.value_and_grad(lambda w, b: b * jnp.sum(w))
    value, grad = actjax.accumulate(
        loss_and_grad, jnp.ones(2), jnp.asarray([1.0, 3.0]), weights=[0.25, 0.75]
    )
    assert value == 5
    np.testing.assert_allclose(grad, [2.5, 2.5])
