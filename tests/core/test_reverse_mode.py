"""Tests that forward mode is refused by name."""

import jax
import jax.numpy as jnp
import pytest

import actjax

X, W = jnp.ones((2, 64)), jnp.ones((64, 64))
CODEC = actjax.Quantized(4, group=64)
FUNCTIONS = {
    "linear": lambda x: actjax.linear(x, W, codec=CODEC),
    "rms_norm": lambda x: actjax.rms_norm(x, W[0], codec=CODEC),
    "gelu": lambda x: actjax.gelu(x, codec=CODEC),
    "cross_entropy": lambda x: actjax.cross_entropy(x, W, jnp.zeros(2, int)),
    "compress_residuals": actjax.compress_residuals(lambda x: jnp.tanh(x @ W), CODEC),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_refused_by_name(name):
    for differentiate in (lambda f: jax.jvp(f, (X,), (X,)), lambda f: jax.jacfwd(f)(X)):
        with pytest.raises(TypeError, match=r"actjax .* no forward-mode"):
            differentiate(FUNCTIONS[name])
