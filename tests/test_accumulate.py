"""Tests of `actjax.accumulate`: the mean gradient of micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    SVD,
    assert_same,
    dense,
    factored,
    project,
    run_stack,
    stack,
    tanh_layer,
    total,
)
from residuals.residual_helpers import normal

import actjax
from actjax import Codec, Exact, accumulate


def batches():
    return normal(10, 4, 12, 8), normal(11, 4, 12, 8)


def regression(params, batch, codec: Codec = Exact()):
    """Returns a mean over tokens: the mean over micro-batches is that of the large batch."""
    x, y = batch
    h = jnp.tanh(project(x, params["a"], codec, bias=params["bias"]))
    return jnp.mean(jnp.square(project(h, params["b"], codec) - y))


def regression_params():
    return {"a": normal(1, 8, 8), "b": normal(2, 8, 8), "bias": normal(3, 8)}


def accumulated(loss_and_grad, **options):
    return lambda params, batches: accumulate(loss_and_grad, params, batches, **options)


def in_one_program(params, batches, *functions):
    return jax.jit(lambda *args: [f(*args) for f in functions])(params, batches)


def truncation_errors(matrices, truncated, rank):
    """Returns the norms of the differences, and the least that a matrix of this rank can have."""
    matrices = np.asarray(dense(matrices))
    values = np.linalg.svd(matrices, compute_uv=False)
    errors = np.linalg.norm(matrices - dense(truncated), axis=(-2, -1))
    return errors, np.linalg.norm(values[..., rank:], axis=-1)


def test_micro_batches_have_the_gradient_of_the_large_batch(x64):
    params, stack = regression_params(), batches()
    bases = {"a": normal(4, 8, 3), "b": normal(5, 8, 2)}
    in_basis = actjax.value_and_grad(regression, bases=bases)
    exact = actjax.value_and_grad(regression), jax.value_and_grad(regression)

    def large(fun):
        return lambda params, stack: fun(
            params, jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), stack)
        )

    want, want_in_basis, *results = in_one_program(
        params, stack, large(exact[1]), large(in_basis), *map(accumulated, exact),
        # `max_rank` applies to factors without a basis only.
        accumulated(in_basis, max_rank=1),
    )  # fmt: skip
    for value, gradient in results[:2]:
        np.testing.assert_allclose(value, want[0], rtol=1e-13)
        assert_same(gradient, want[1])
        assert factored(gradient) == set()
    value, gradient = results[2]
    np.testing.assert_allclose(value, want[0], rtol=1e-13)
    assert_same(gradient, dense(want_in_basis[1]))
    for name, basis in bases.items():
        assert gradient[name].basis_name == name
        np.testing.assert_array_equal(gradient[name].left, basis)


SHARES = [0.1, 0.2, 0.3, 0.4]


def test_factors_without_a_basis_are_concatenated_and_truncated(x64):
    run = actjax.value_and_grad(functools.partial(regression, codec=SVD))

    def each(params, stack):
        return [run(params, jax.tree.map(lambda a, i=i: a[i], stack)) for i in range(4)]

    parts, equal, weighted, truncated, untruncated = in_one_program(
        regression_params(), batches(), each, accumulated(run), accumulated(run, weights=SHARES),
        accumulated(run, max_rank=5), accumulated(run, max_rank=12),
    )  # fmt: skip
    for (value, gradient), shares in ((equal, [1 / 4] * 4), (weighted, SHARES)):
        want_value, want = jax.tree.map(
            lambda *all_of, shares=shares: sum(
                s * np.asarray(g) for s, g in zip(shares, all_of, strict=True)
            ),
            *dense(parts),
        )
        np.testing.assert_allclose(value, want_value, rtol=1e-13)
        assert_same(gradient, want)
        assert factored(gradient) == {"a", "b"}
    gradient, truncated, untruncated = equal[1], truncated[1], untruncated[1]
    np.testing.assert_array_equal(gradient["bias"], truncated["bias"])
    for name in ("a", "b"):
        lefts = [g[name].left for _, g in parts]
        np.testing.assert_allclose(gradient[name].left, np.concatenate(lefts, 1), rtol=1e-10)
        ranks = [g[name].rank for g in (gradient, truncated, untruncated)]
        assert ranks == [4 * SVD.rank, 5, 12]
        np.testing.assert_array_equal(untruncated[name].left, gradient[name].left)
        np.testing.assert_array_equal(untruncated[name].right, gradient[name].right)
        error, least = truncation_errors(gradient[name], truncated[name], 5)
        np.testing.assert_allclose(error, least, rtol=1e-10)


def test_stacked_factors_are_concatenated_per_layer(x64):
    run = actjax.value_and_grad(lambda p, x: total(run_stack(p, x, tanh_layer)))
    (_, first), (_, second), (_, gradient), (_, truncated) = in_one_program(
        stack(), normal(0, 2, 12, 8), lambda p, xs: run(p, xs[0]), lambda p, xs: run(p, xs[1]),
        accumulated(run), accumulated(run, max_rank=2),
    )  # fmt: skip
    assert gradient["w"].left.shape == (3, 8, 2 * 3)
    assert gradient["w"].right.shape == (3, 2 * 3, 8)
    mean = jax.tree.map(lambda a, b: np.add(a, b) / 2, dense(first), dense(second))
    assert_same(gradient, mean)
    errors, least = truncation_errors(gradient["w"], truncated["w"], 2)
    np.testing.assert_allclose(errors, least, rtol=1e-9)


@pytest.mark.parametrize("in_basis", [False, True])
def test_dense_gradients_and_gradients_in_a_basis_are_summed_in_float32(in_basis):
    params, ones = {"w": np.ones((8, 1), jnp.bfloat16)}, np.ones((600, 1, 8), jnp.bfloat16)
    fun = lambda p, x: jnp.sum(project(x, p["w"], Exact()).astype(jnp.float32))  # noqa: E731
    bases = {"w": np.eye(8, 2, dtype=np.float32)} if in_basis else None
    run = actjax.value_and_grad(fun, bases=bases)
    weights = np.ones(600, np.float32)
    ((value, gradient),) = in_one_program(params, ones, accumulated(run, weights=weights))
    summed = gradient["w"].right if in_basis else gradient["w"]
    assert summed.dtype == "float32"
    # A sum in bfloat16 would stop at 256.
    np.testing.assert_array_equal(summed, 600)
    assert value == 600 * 8


def test_factors_without_a_basis_keep_the_dtype_of_the_weight():
    params, xs = {"w": normal(1, 8, 5, dtype="bfloat16")}, normal(2, 2, 12, 8)
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"])))
    assert jax.eval_shape(accumulated(run), params, xs)[1]["w"].dtype == "bfloat16"


def test_weights_may_have_a_wider_dtype_than_the_gradient(x64):
    params, xs = {"w": normal(1, 8, 5, dtype="float32")}, normal(2, 2, 12, 8, dtype="float32")
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"], Exact())))
    (loss, gradient), (want_loss, want) = in_one_program(
        params, xs, accumulated(run, weights=np.full(2, 0.5)), accumulated(run)
    )
    assert gradient["w"].dtype == "float32"
    # A weight of one half is exact in both dtypes, and so is the product with it.
    np.testing.assert_array_equal(loss, want_loss)
    np.testing.assert_array_equal(gradient["w"], want["w"])
