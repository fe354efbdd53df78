"""Tests of actjax/_core/no_derivative.py: codes have no second derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import Coarse

import actjax
from actjax._core.no_derivative import no_derivative

H = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).standard_normal((2, 8, 8)).astype(np.float32) / 3


def layers(weights, codec, checkpoint):
    def layer(h, w):
        return actjax.swiglu(actjax.linear(h, w, codec=codec), h, codec=codec), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, H, weights)[0])


SECOND = {
    "reverse": lambda gradient: jax.grad(lambda w: jnp.sum(gradient(w) ** 2)),
    "forward": lambda gradient: lambda w: jax.jvp(gradient, (w,), (w,)),
}


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("mode", SECOND)
def test_second_derivatives_through_codes_are_refused(mode, checkpoint):
    loss = functools.partial(layers, codec=actjax.Quantized(8), checkpoint=checkpoint)
    with pytest.raises(NotImplementedError, match="has no derivative with respect to what is"):
        jax.eval_shape(SECOND[mode](jax.grad(loss)), WEIGHTS)


def test_a_weight_has_second_derivatives_where_the_code_does_not_depend_on_it(x64):
    h, w, codec = np.float64(H), np.float64(WEIGHTS[0]), Coarse()

    def loss(w):
        return jnp.sum(jnp.sin(actjax.linear(h, w, codec=codec)))

    run = jax.jit(lambda h, w: (jax.jacrev(jax.grad(loss))(w), codec.decode(codec.encode(h))))
    got, decoded = run(h, w)
    # dw = decodeᵀ dz, and only dz = cos(h w) depends on w.
    want = np.einsum("ti,to,tj->ioj", decoded, -np.sin(h @ w), h)
    np.testing.assert_allclose(np.einsum("iojo->ioj", got), want, rtol=1e-12, atol=1e-14)


def test_values_pass_unchanged_under_transforms():
    np.testing.assert_array_equal(jax.jit(jax.vmap(no_derivative, in_axes=1, out_axes=1))(H), H)
