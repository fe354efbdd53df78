"""Arguments that are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals.residual_helpers import normal

import actjax
from actjax import Exact

TRANSFORMS = {
    "compress_residuals": lambda fun: actjax.compress_residuals(fun, Exact()),
    "checkpoint": lambda fun: actjax.checkpoint(fun, Exact(), activations=1),
}


def layer(module, x, train, power, mode, absent):
    """Reads settings as a module of Equinox does: an activation function among the weights."""
    y = module["activation"](x @ module["w"]) ** power
    assert mode == "sum"
    assert absent is None
    return jnp.sum(y if train else -y)


@pytest.mark.parametrize("wrap", TRANSFORMS.values(), ids=TRANSFORMS)
def test_what_is_no_array_is_static(wrap):
    w, x = normal(0, 8, 8), normal(1, 4, 8)

    def run(fun, train):
        return lambda w, x: fun(
            {"activation": jnp.tanh, "w": w, "scale": 2}, x, train, 3, "sum", None
        )

    @jax.jit
    def gradients(w, x):
        cases = [(fun, train) for train in (True, False) for fun in (wrap(layer), layer)]
        return [jax.grad(run(*case), (0, 1))(w, x) for case in cases]

    results = gradients(w, x)
    for got, want in (results[:2], results[2:]):
        # Other operations in float32.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
