"""What the code of `docs/examples/resnet.md` takes for granted."""

import jax.numpy as jnp
from flax import nnx

model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
batch = jnp.arange(8.0).reshape(2, 4)


def loss(model: nnx.BatchNorm, batch: jnp.ndarray) -> jnp.ndarray:
    """Returns a loss of what a batch norm makes of a batch."""
    return jnp.mean(model(batch) ** 3)
