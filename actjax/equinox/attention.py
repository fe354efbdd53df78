"""Attention of Equinox that stores codes of queries, keys and values instead of its weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from actjax.checkpoint import checkpoint
from actjax.equinox.layers import Coded


class MultiheadAttention(Coded, eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` that stores its heads by a codec, and no weights [H, S, T].

    The backward pass computes the weights again from decoded queries and keys. The projections are
    separate layers.
    """

    def stacked(self) -> tuple[int, ...]:
        """As for all layers."""
        return self.query_proj.weight.shape[:-2]

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        process_heads: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Returns the attention of a sequence, as in Equinox.

        Args:
          query: [S, query_size].
          key_: [T, key_size].
          value: [T, value_size].
          mask: [S, T] or [num_heads, S, T], False where nothing is to be seen.
          key: for dropout.
          inference: as in Equinox.
          process_heads: as in Equinox.
          **options: further arguments of Equinox; with any, that is Equinox's layer.
        """
        dropout = self.dropout
        drops = dropout.p and not (dropout.inference if inference is None else inference)
        if options or drops or (mask is not None and mask.ndim not in (2, 3)):
            of_equinox: Any = super()
            settings = {"key": key, "inference": inference, "process_heads": process_heads}
            return of_equinox.__call__(query, key_, value, mask, **settings, **options)
        projections = ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        heads = tuple(
            jax.vmap(layer)(x).reshape(len(x), self.num_heads, -1) for layer, x in projections
        )
        if process_heads is not None:
            heads = process_heads(*heads)
        run = checkpoint(
            _attention,
            self.codec,
            activations=(0, 1, 2),
            key=self._key(None),
            name=self.code_name,
        )
        return jax.vmap(self.output_proj)(run(*heads, mask))


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the attention of heads [S, H, D] as [S, H D]."""
    scores = jnp.einsum("shd,thd->hst", q / q.shape[-1] ** 0.5, k)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))
    y = jnp.einsum("hst,thd->shd", weights.astype(scores.dtype), v)
    return y.reshape(len(q), -1)
