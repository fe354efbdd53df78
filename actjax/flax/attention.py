"""Attention of Flax that stores codes of queries, keys and values instead of its weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from actjax.checkpoint import checkpoint
from actjax.codecs import Codec


@dataclasses.dataclass(frozen=True)
class CodedAttention:
    """An `attention_fn` of Flax that stores its heads, and computes its weights again.

    Attributes:
      attention_fn: the function that computes the attention, with the arguments of
        `nnx.dot_product_attention`.
      codec: stores q, k and v.
      key: randomness of the encoding, or None.
      name: the name of the heads in `actjax.explain`.
    """

    attention_fn: Callable[..., jax.Array]
    codec: Codec
    key: jax.Array | None
    name: str

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any
    ) -> jax.Array:
        """As `attention_fn`, which runs by itself where a module records its weights."""
        attend = self.attention_fn
        if options.get("module") is not None:
            return attend(query, key, value, *args, **options)
        run = checkpoint(
            lambda q, k, v: attend(q, k, v, *args, **options),
            self.codec,
            activations=(0, 1, 2),
            key=self.key,
            name=self.name,
        )
        return run(query, key, value)
