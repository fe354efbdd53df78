"""The decoder of Llama (Touvron et al., 2023), Mistral and Qwen, with stacked layers.

The weights of all layers are stacked along a leading axis, and `lax.scan` runs the layers. A scan
frees the floats of a layer after its forward pass; with layers unrolled in Python, XLA would keep
them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import actjax
from models.block import Block, Keys, Positions, normal
from models.config import ModelConfig
from models.embedding import embed
from models.layers import check_key, layer_function, layer_keys
from models.sharding import mean_over_devices
from models.storage import Storage, StorageChoice


class Decoder(nnx.Module):
    """A decoder-only language model. It holds weights; each call takes the storage as an argument.

    Attributes:
      config: dimensions. Static.
      embedding: [V, d].
      layers: a `Block` whose weights have a leading axis of `num_layers`.
      norm: scale of the last norm, [d].
      output: output projection, [d, V]; None if tied to the embedding.
    """

    def __init__(self, config: ModelConfig, key: jax.Array, *, dtype: str = "float32"):
        """Draws the weights.

        Args:
          config: dimensions.
          key: randomness of the initialization.
          dtype: dtype of the weights.
        """
        embedding_key, layers_key, output_key = jax.random.split(key, 3)
        weight_dtype = jnp.dtype(dtype)
        std, vocabulary, d = config.init_std, config.vocab_size, config.hidden_size
        self.config = config
        self.embedding = normal(embedding_key, (vocabulary, d), std, weight_dtype)
        # One at a time: drawing takes some times the memory of what is drawn.
        self.layers = jax.lax.map(
            lambda k: Block(config, weight_dtype, k),
            jax.random.split(layers_key, config.num_layers),
        )
        self.norm = nnx.Param(jnp.ones(d, weight_dtype))
        self.output = (
            None
            if config.tie_embeddings
            else normal(output_key, (d, vocabulary), std, weight_dtype)
        )

    @property
    def head(self) -> jax.Array:
        """The output projection, [d, V]."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def embed(self, tokens: jax.Array, compute_dtype: str = "bfloat16") -> jax.Array:
        """Returns the embeddings of `tokens` [B, S], [B, S, d] in the compute dtype.

        The embedding of a token outside the vocabulary, such as -1, is zero, and so are its
        activations in all layers without biases: padding that codes spend nothing on.
        """
        return embed(self.embedding[...], tokens).astype(compute_dtype)

    def run_layers(
        self,
        x: jax.Array,
        storage: StorageChoice = Storage(),
        key: Keys | None = None,
        *,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Runs all layers on a residual stream, [B, S, d] to [B, S, d].

        Args:
          x: residual stream.
          storage: what each layer stores.
          key: randomness of the codecs of this step, or a key for each site. Needed if a codec
            draws random numbers.
          segments: document numbers, [B, S] integers: a token attends to its own document only.
        """
        check_key(storage, key)
        positions = Positions.of(self.config, x.shape[1], segments)

        def body(x: jax.Array, layer: tuple[Block, Keys, StorageChoice]) -> tuple[jax.Array, None]:
            block, layer_key, layer_storage = layer
            return layer_function(self.config, layer_storage)(block, x, positions, layer_key), None

        return jax.lax.scan(body, x, (self.layers, layer_keys(self.config, key), storage))[0]

    def observe(
        self,
        tokens: jax.Array,
        statistic: Callable[[jax.Array, Any], Any],
        known: Mapping[str, Any],
        *,
        split_adapters: bool = False,
        segments: jax.Array | None = None,
        compute_dtype: str = "bfloat16",
    ) -> dict[str, Any]:
        """Returns a statistic of what some sites would store, with a leading axis of layers.

        Args:
          tokens: [B, S] integers.
          statistic: a function of an activation [B, S, n] and of the site's entry in `known`.
          known: by site, arrays with a leading axis of layers, or None. Only the sites in it are
            observed.
          split_adapters: as in `Storage`.
          segments: as for `run_layers`.
          compute_dtype: dtype of activations and products.
        """
        positions = Positions.of(self.config, tokens.shape[1], segments)
        storage = Storage(split_adapters=split_adapters)

        def body(x: jax.Array, layer: tuple[Block, Any]) -> tuple[jax.Array, dict[str, Any]]:
            block, known_of_layer = layer
            seen: dict[str, Any] = {}
            unused = jax.random.key(0)  # Nothing is encoded.

            def visit(site: str, x: Any) -> Any:
                if site in known_of_layer:
                    encoded = x.base if isinstance(x, actjax.LowRankSum) else x
                    seen[site] = statistic(encoded, known_of_layer[site])
                return x

            return block(x, positions, self.config, storage, unused, visit=visit), seen

        stack = (self.layers, dict(known))
        return jax.lax.scan(body, self.embed(tokens, compute_dtype), stack)[1]

    def hidden(
        self,
        tokens: jax.Array,
        storage: StorageChoice = Storage(),
        key: Keys | None = None,
        *,
        compute_dtype: str = "bfloat16",
    ) -> jax.Array:
        """Returns the hidden states that the output projection reads, [B, S, d]."""
        return self.last_norm(self.run_layers(self.embed(tokens, compute_dtype), storage, key))

    def last_norm(self, x: jax.Array) -> jax.Array:
        """Returns the hidden states from the residual stream after the last layer, [B, S, d]."""
        return actjax.rms_norm(x, self.norm[...], eps=self.config.norm_eps, name="last norm input")

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        storage: StorageChoice = Storage(),
        key: Keys | None = None,
        compute_dtype: str = "bfloat16",
        z_loss: float = 0.0,
    ) -> jax.Array:
        """Returns the mean cross-entropy of predicting `targets`, in nats; a float32 scalar.

        Args:
          tokens: [B, S] integers.
          targets: [B, S] integers.
          mask: weights of the targets, [B, S]; all one if None.
          segments: as for `run_layers`.
          storage: what each layer stores for the backward pass.
          key: randomness of the codecs of this step.
          compute_dtype: dtype of activations and products.
          z_loss: weight of the squared log-sum-exp.
        """
        x = self.embed(tokens, compute_dtype)
        x = self.run_layers(x, storage, key, segments=segments)
        return self.loss_after(x, targets, mask=mask, z_loss=z_loss)

    def loss_after(
        self,
        x: jax.Array,
        targets: jax.Array,
        *,
        mask: jax.Array | None = None,
        z_loss: float = 0.0,
    ) -> jax.Array:
        """Returns the loss from the residual stream after the last layer; as `loss` otherwise."""

        def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: Any) -> jax.Array:
            return actjax.cross_entropy(hidden, head, targets, mask=mask, z_loss=z_loss)

        mask = jnp.ones(targets.shape, jnp.float32) if mask is None else mask
        return mean_over_devices(loss, self.last_norm(x), self.head, targets, mask)

    def log_probs_after(
        self, x: jax.Array, targets: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the log-probability of each target times its mask, [B, S] float32, in nats.

        Args:
          x: residual stream after the last layer, [B, S, d].
          targets: [B, S] integers.
          mask: as for `actjax.token_log_probs`.
        """
        return actjax.token_log_probs(self.last_norm(x), self.head, targets, mask=mask)

    def __call__(self, tokens: jax.Array, *, compute_dtype: str = "bfloat16") -> jax.Array:
        """Returns the logits of `tokens` [B, S], [B, S, V] in float32."""
        hidden = self.hidden(tokens, compute_dtype=compute_dtype)
        return actjax.linear(hidden, self.head, name="head").astype(jnp.float32)
