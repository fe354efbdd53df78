"""What the code of `docs/examples/bert.md` takes for granted."""

import jax.numpy as jnp
from flax import nnx

import actjax


class Trained(nnx.Param):
    """What is trained: the example marks its adapters with this kind of variable."""


kernel, bias = jnp.ones((128, 256)), jnp.zeros(256)
codec = actjax.Quantized(2, balance=True, rotate=True, outlier_fraction=0.01)
model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
