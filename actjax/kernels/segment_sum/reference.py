"""The definition of `scaled_segment_sum`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax._math.precision import contract_tokens


def scaled_segment_sum(
    index: jax.Array, scale: jax.Array, values: jax.Array, *, segments: int
) -> jax.Array:
    """As `actjax.kernels.segment_sum.api.scaled_segment_sum`.

    It is a product with a sparse [T, k] matrix. Unlike a scatter, a product adds in a fixed order,
    so two runs give equal bits on every device, and it runs on the matrix units.
    """
    columns = jnp.arange(segments, dtype=jnp.int32)
    factor = scale[..., None].astype(values.dtype)
    selection = jnp.where(index[..., None].astype(jnp.int32) == columns, factor, 0)
    return contract_tokens(selection, values)
