"""Arguments that are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms.residual_helpers import normal

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
@pytest.mark.parametrize("train", [True, False])
def test_what_is_no_array_is_static(wrap, train):
    w, x = normal(0, 8, 8), normal(1, 4, 8)

    def run(fun):
        return lambda w, x: fun(
            {"activation": jnp.tanh, "w": w, "scale": 2}, x, train, 3, "sum", None
        )

    want = jax.grad(run(layer), (0, 1))(w, x)
    got = jax.jit(jax.grad(run(wrap(layer)), (0, 1)))(w, x)
    # Another program of the same operations in float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
