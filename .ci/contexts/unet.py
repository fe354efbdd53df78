"""What the code of `docs/examples/unet.md` takes for granted."""

import jax.numpy as jnp

image, noise = jnp.full((2, 1, 1, 1), 0.8), jnp.full((2, 1, 1, 1), 0.6)
amount = jnp.ones((2, 2))
batch = {"images": jnp.ones((2, 8, 8, 1)), "noise": jnp.ones((2, 8, 8, 1))}


def model(noisy: jnp.ndarray, amount: jnp.ndarray) -> jnp.ndarray:
    """Returns what a model predicts, here zero."""
    return 0 * noisy
