"""Tests of actjax/_core/no_derivative.py: codes have no second derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from actjax._core.no_derivative import no_derivative

KEY = jax.random.key(0)
H = jax.random.normal(KEY, (2, 8))
WEIGHTS = jax.random.normal(KEY, (2, 8, 8)) / 3


def layers(weights, codec, checkpoint):
    def layer(h, w):
        return actjax.swiglu(actjax.linear(h, w, codec=codec), h, codec=codec), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, H, weights)[0])


SECOND = {
    "reverse": lambda gradient: jax.grad(lambda w: jnp.sum(gradient(w) ** 2))(WEIGHTS),
    "forward": lambda gradient: jax.jvp(gradient, (WEIGHTS,), (WEIGHTS,)),
}


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("mode", SECOND)
def test_second_derivatives_through_codes_are_refused(mode, checkpoint):
    loss = functools.partial(layers, codec=actjax.Quantized(8), checkpoint=checkpoint)
    with pytest.raises(NotImplementedError, match="has no derivative with respect to what is"):
        SECOND[mode](jax.grad(loss))


def test_a_weight_has_second_derivatives_where_the_code_does_not_depend_on_it(x64):
    h, w = (jnp.asarray(x, jnp.float64) for x in (H, WEIGHTS[0]))
    codec = actjax.Quantized(8)

    def loss(w):
        return jnp.sum(jnp.sin(actjax.linear(h, w, codec=codec)))

    # dw = decodeᵀ dz, and only dz = cos(h w) depends on w.
    decoded = codec.decode(codec.encode(h))
    want = np.einsum("ti,to,tj->ioj", decoded, -np.sin(h @ w), h)
    got = jax.jacrev(jax.grad(loss))(w)
    np.testing.assert_allclose(np.einsum("iojo->ioj", got), want, rtol=1e-12, atol=1e-14)


def test_values_pass_unchanged_under_transforms():
    np.testing.assert_array_equal(jax.vmap(jax.jit(no_derivative), in_axes=1, out_axes=1)(H), H)
