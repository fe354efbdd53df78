"""Tests of operators of actjax within layers of Flax, which convert weights to arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from residuals.residual_helpers import KEY, normal

import actjax
from actjax import LowRank, RandomProjection

X = normal(0, 32, 16)


def low_rank(x, w, *_, **__):
    return actjax.linear(x, w, codec=RandomProjection(4), key=KEY)


def layers(**options):
    return nnx.Linear(16, 8, rngs=nnx.Rngs(0), dot_general=low_rank, **options)


def loss(layer, x):
    return jnp.mean(jnp.sin(layer(x)).astype(jnp.float32))


@pytest.mark.parametrize("jit", [False, True])
def test_a_linear_layer_of_nnx_gets_a_factored_gradient(jit):
    graph, state = nnx.split(layers())
    run = actjax.value_and_grad(lambda state, x: loss(nnx.merge(graph, state), x))
    dense = jax.jit(jax.grad(lambda state, x: loss(nnx.merge(graph, state), x)))(state, X)
    _, got = (jax.jit(run) if jit else run)(state, X)
    kernel = got["kernel"].get_value()
    assert isinstance(kernel, LowRank)
    np.testing.assert_allclose(kernel.dense(), dense["kernel"][...], rtol=1e-5, atol=1e-7)


def test_a_weight_that_the_layer_casts_has_its_gradient_dense():
    graph, state = nnx.split(layers(dtype=jnp.bfloat16))
    run = lambda state, x: loss(nnx.merge(graph, state), x)  # noqa: E731
    _, got = jax.jit(actjax.value_and_grad(run))(state, X)
    dense = jax.jit(jax.grad(run))(state, X)
    assert np.any(dense["kernel"][...])
    np.testing.assert_array_equal(got["kernel"][...], dense["kernel"][...])


def test_two_weights_that_are_one_array_have_dense_gradients_of_their_own():
    w = normal(3, 16, 16) / 4

    def fun(p):
        a, b = jnp.asarray(p["a"]), jnp.asarray(p["b"])  # Both before either is read.
        return loss(lambda x: low_rank(jnp.sin(low_rank(x, a)), b), X)

    @jax.jit
    def run(w):
        params = {"a": w, "b": w}
        return actjax.value_and_grad(fun)(params)[1], jax.grad(fun)(params)

    got, dense = run(w)
    for name in dense:
        np.testing.assert_allclose(got[name], dense[name], rtol=1e-5, atol=1e-7)


def test_a_dense_layer_of_linen():
    layer = linen.Dense(8, dot_general=low_rank)
    params = jax.jit(layer.init)(KEY, X)
    fun = lambda p: loss(lambda x: layer.apply(p, x), X)  # noqa: E731
    (_, got), dense = jax.jit(lambda p: (actjax.value_and_grad(fun)(p), jax.grad(fun)(p)))(params)
    kernel = got["params"]["kernel"]
    assert isinstance(kernel, LowRank)
    np.testing.assert_allclose(kernel.dense(), dense["params"]["kernel"], rtol=1e-5, atol=1e-7)
