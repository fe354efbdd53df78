"""Tests of operators of actjax within layers of Flax, which convert weights to arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from residuals.residual_helpers import KEY, normal

import actjax
from actjax import RandomProjection
from actjax.factored.low_rank import is_low_rank

X = normal(0, 32, 16)


def low_rank(x, w, *_, **__):
    return actjax.linear(x, w, codec=RandomProjection(4), key=KEY)


def loss(layer, x):
    return jnp.mean(jnp.sin(layer(x)).astype(jnp.float32))


def of_nnx(**options):
    """Returns a loss of the state of a linear layer, and that state."""
    make = lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0), dot_general=low_rank, **options)  # noqa: E731
    graph, shapes = nnx.split(nnx.eval_shape(make))
    state = jax.tree.map(lambda x: normal(4, *x.shape), shapes)
    return lambda state: loss(nnx.merge(graph, state), X), state


def of_linen():
    layer = linen.Dense(8, dot_general=low_rank)
    params = {"kernel": normal(4, 16, 8), "bias": normal(5, 8)}
    return lambda p: loss(lambda x: layer.apply({"params": p}, x), X), params


def gradients(fun, params):
    """Returns the gradient by actjax and by JAX."""
    run = jax.jit(lambda p: (actjax.value_and_grad(fun)(p)[1], jax.grad(fun)(p)))
    return run(params)


@pytest.mark.parametrize("make", [of_nnx, of_linen], ids=["nnx", "linen"])
def test_a_linear_layer_gets_a_factored_gradient(make):
    kernel, dense = (jax.tree.leaves(g["kernel"], is_leaf=is_low_rank)[0]
                     for g in gradients(*make()))  # fmt: skip
    assert is_low_rank(kernel)
    np.testing.assert_allclose(kernel.dense(), dense, rtol=1e-5, atol=1e-7)


def test_a_weight_that_the_layer_casts_has_its_gradient_dense():
    got, dense = (g["kernel"][...] for g in gradients(*of_nnx(dtype=jnp.bfloat16)))
    assert np.any(dense)
    np.testing.assert_array_equal(got, dense)


def test_two_weights_that_are_one_array_have_dense_gradients_of_their_own():
    def fun(p):
        a, b = jnp.asarray(p["a"]), jnp.asarray(p["b"])  # Both before either is read.
        return loss(lambda x: low_rank(jnp.sin(low_rank(x, a)), b), X)

    @jax.jit
    def run(w):
        params = {"a": w, "b": w}
        return actjax.value_and_grad(fun)(params)[1], jax.grad(fun)(params)

    got, dense = run(normal(3, 16, 16) / 4)
    for name in dense:
        np.testing.assert_allclose(got[name], dense[name], rtol=1e-5, atol=1e-7)
