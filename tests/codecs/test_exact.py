import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

import actjax


def test_the_code_is_the_activation_itself():
    x = jnp.arange(6.0).reshape(2, 3)
    assert actjax.Exact().encode(x) is x
    assert actjax.Exact().decode(x) is x


def test_gradients_agree_with_finite_differences(x64):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(3, 4, 5))), jnp.asarray(rng.normal(size=(5, 2)))
    bias = jnp.asarray(rng.normal(size=2))
    # Quadratic in its arguments, so central differences are exact up to rounding.
    fun = jax.jit(lambda x, w, bias: actjax.linear(x, w, bias=bias))
    # With its defaults, `check_grads` passes an error of a tenth of a percent.
    check_grads(fun, (x, w, bias), order=1, modes=["rev"], rtol=1e-8, atol=1e-8)
