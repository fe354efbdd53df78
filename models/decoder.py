"""The decoder of Llama (Touvron et al., 2023), Mistral and Qwen, its layers stacked and scanned.

A block is a short list of actjax operators, each of which owns what it keeps for the backward
pass. Layers are stacked along a leading axis and run by `lax.scan`: that is what makes the floats
die after a layer's forward pass, where Python-unrolled layers would let XLA keep them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import actjax
from models.config import LinearRopeScaling, ModelConfig, RopeScaling
from models.storage import (
    BLOCK_INPUT,
    SITES,
    CompressedResiduals,
    Remat,
    Storage,
    StorageChoice,
)

Keys = jax.Array | Mapping[str, jax.Array]
"""A key to fold for each site, or a key for each of `models.storage.SITES` and, for `Remat`,
`models.storage.BLOCK_INPUT`."""

Visit = Callable[[str, Any], Any]
"""From the name of a site and the activation that it stores, [B, S, n], to the activation."""


class Attention(nnx.Module):
    """Weights of causal grouped-query attention, [in, out] each.

    Biases of q, k and v, and scales of the heads' norms, are None where a model has none.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, key: jax.Array):
        queries = config.num_heads * config.head_size
        keys = config.num_kv_heads * config.head_size
        d = config.hidden_size
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q = _normal(q_key, (d, queries), config.init_std, dtype)
        self.k = _normal(k_key, (d, keys), config.init_std, dtype)
        self.v = _normal(v_key, (d, keys), config.init_std, dtype)
        self.o = _normal(o_key, (queries, d), config.init_std, dtype)
        biased, normed, size = config.attention_bias, config.qk_norm, config.head_size
        self.q_bias = nnx.Param(jnp.zeros(queries, dtype)) if biased else None
        self.k_bias = nnx.Param(jnp.zeros(keys, dtype)) if biased else None
        self.v_bias = nnx.Param(jnp.zeros(keys, dtype)) if biased else None
        self.q_norm = nnx.Param(jnp.ones(size, dtype)) if normed else None
        self.k_norm = nnx.Param(jnp.ones(size, dtype)) if normed else None

    @property
    def biases(self) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Biases of q, k and v, if there are any."""
        if self.q_bias is None or self.k_bias is None or self.v_bias is None:
            return None
        return self.q_bias[...], self.k_bias[...], self.v_bias[...]

    def head_norm(self, eps: float) -> actjax.HeadNorm | None:
        """The norms of heads, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return actjax.HeadNorm(self.q_norm[...], self.k_norm[...], eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """What attention knows of positions, the same in all layers.

    Attributes:
      rope: cosines and sines of RoPE, [S, D / 2] each.
      segments: numbers of documents, [B, S] integers; None if a sequence is one.
    """

    rope: tuple[jax.Array, jax.Array]
    segments: jax.Array | None = None

    @classmethod
    def of(cls, config: ModelConfig, length: int, segments: jax.Array | None = None) -> "Positions":
        """Returns those of sequences of a length."""
        return cls(rope_tables(config, length), segments)


class MLP(nnx.Module):
    """Weights of the gated feed-forward network, [in, out] each."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, key: jax.Array):
        d, f = config.hidden_size, config.ffn_size
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = _normal(gate_key, (d, f), config.init_std, dtype)
        self.up = _normal(up_key, (d, f), config.init_std, dtype)
        self.down = _normal(down_key, (f, d), config.init_std, dtype)


class Block(nnx.Module):
    """One layer: attention and feed-forward network, each behind a norm and beside a skip."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.attention = Attention(config, dtype, attention_key)
        self.mlp_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.mlp = MLP(config, dtype, mlp_key)

    def __call__(
        self,
        x: jax.Array,
        positions: Positions,
        config: ModelConfig,
        storage: Storage,
        key: Keys,
        *,
        visit: Visit = lambda site, x: x,
        recompute_scores: bool = False,
    ) -> jax.Array:
        """Runs the layer.

        Args:
          x: residual stream, [B, S, d].
          positions: what attention knows of them.
          config: dimensions.
          storage: what each site stores.
          key: randomness of the codecs of this layer and step; or a key for each site.
          visit: called with what each site stores; its result takes the place of the activation.
          recompute_scores: whether attention stores no log-sum-exp, even where its output is exact.

        Returns:
          The residual stream after the layer, [B, S, d].
        """
        if not isinstance(key, Mapping):
            key = {site: jax.random.fold_in(key, i) for i, site in enumerate(SITES)}
        x = x + self._attend(x, positions, config, storage, key, visit, recompute_scores)
        return _over_batch(x + self._feed_forward(x, config, storage, key, visit))

    def _attend(
        self, x, positions, config, storage, keys, site, recompute_scores: bool
    ) -> jax.Array:
        weights, x = self.attention, site("attention_norm", x)
        q, k, v = _norm_linear(
            x,
            self.attention_norm[...],
            (weights.q[...], weights.k[...], weights.v[...]),
            config,
            (storage.attention_norm, storage.attention_in),
            (keys["attention_norm"], keys["attention_in"]),
            ("attention norm input", "attention_in"),
            functools.partial(site, "attention_in"),
            split=storage.split_adapters,
            biases=weights.biases,
        )
        q, k, v = (site(name, _over_batch(y)) for name, y in (("q", q), ("k", k), ("v", v)))
        q, k, v = (_split_heads(y, config.head_size) for y in (q, k, v))
        given: dict[str, Any] = {
            "rope": positions.rope,
            "segments": positions.segments,
            "window": config.sliding_window,
            "norm": weights.head_norm(config.norm_eps),
            "codec": (storage.q, storage.k, storage.v),
            "key": (keys["q"], keys["k"], keys["v"]),
            "implementation": config.attention,
        }
        if storage.attention_out is None:
            return actjax.attention_linear(q, k, v, weights.o[...], **given, name="attention")
        # An output that its projection stores in full costs attention nothing to keep as well. But
        # a log-sum-exp beside it is that of exact scores: made of residuals in few bits, scores
        # must be normalised anew, or the largest weights of a trained model come out as exp(50).
        kept = isinstance(storage.attention_out, actjax.Exact) and not recompute_scores
        out = actjax.attention(q, k, v, recompute=not kept, merge_heads=True, **given)
        out = site("attention_out", out)
        return actjax.linear(
            out,
            weights.o[...],
            codec=storage.attention_out,
            key=keys["attention_out"],
            name="attention_out",
        )

    def _feed_forward(self, x, config, storage, keys, site) -> jax.Array:
        weights, x = self.mlp, site("mlp_norm", x)
        gate, up = _norm_linear(
            x,
            self.mlp_norm[...],
            (weights.gate[...], weights.up[...]),
            config,
            (storage.mlp_norm, storage.mlp_in),
            (keys["mlp_norm"], keys["mlp_in"]),
            ("mlp norm input", "mlp_in"),
            functools.partial(site, "mlp_in"),
            split=storage.split_adapters,
        )
        gate, up = site("gate", _over_batch(gate)), site("up", _over_batch(up))
        given: dict[str, Any] = {
            "codec": (storage.gate, storage.up),
            "key": (keys["gate"], keys["up"]),
        }
        if storage.mlp_out is None:
            return actjax.swiglu_linear(gate, up, weights.down[...], **given, name="mlp")
        return actjax.linear(
            site("mlp_out", actjax.swiglu(gate, up, **given)),
            weights.down[...],
            codec=storage.mlp_out,
            key=keys["mlp_out"],
            name="mlp_out",
        )


def _norm_linear(
    x, scale, weights, config, codecs, keys, names, site, *, split, biases=None
) -> tuple[Any, ...]:
    """Returns linear maps of the normalised `x`, whose input is rebuilt if its codec is None."""
    (norm_codec, codec), (norm_key, key), (norm_name, name) = codecs, keys, names
    norm: dict[str, Any] = {
        "eps": config.norm_eps,
        "codec": norm_codec,
        "key": norm_key,
        "name": norm_name,
    }
    if codec is None:
        return actjax.norm_linear(x, scale, weights, bias=biases, split=split, **norm)
    h = site(actjax.rms_norm(x, scale, **norm))
    return actjax.linear(h, weights, bias=biases, codec=codec, key=key, split=split, name=name)


class Decoder(nnx.Module):
    """A decoder-only language model. Holds weights alone; what is stored is said at each call.

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
          key: randomness of the initialisation.
          dtype: dtype of the weights.
        """
        embedding_key, layers_key, output_key = jax.random.split(key, 3)
        weight_dtype = jnp.dtype(dtype)
        std, vocabulary, d = config.init_std, config.vocab_size, config.hidden_size
        self.config = config
        self.embedding = _normal(embedding_key, (vocabulary, d), std, weight_dtype)
        self.layers = jax.vmap(lambda k: Block(config, weight_dtype, k))(
            jax.random.split(layers_key, config.num_layers)
        )
        self.norm = nnx.Param(jnp.ones(d, weight_dtype))
        self.output = (
            None
            if config.tie_embeddings
            else _normal(output_key, (d, vocabulary), std, weight_dtype)
        )

    @property
    def head(self) -> jax.Array:
        """The output projection, [d, V]."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def embed(self, tokens: jax.Array, compute_dtype: str = "bfloat16") -> jax.Array:
        """Returns the embeddings of `tokens` [B, S], [B, S, d] in the compute dtype."""
        return _over_batch(self.embedding[...][tokens].astype(compute_dtype))

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
          storage: what each site stores.
          key: randomness of the codecs of this step, or a key for each site; needed if one draws.
          segments: numbers of documents that share a sequence, [B, S] integers: none sees another.
        """
        _check_key(storage, key)
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
        """Returns a statistic of what sites would store, with a leading axis of layers.

        Args:
          tokens: [B, S] integers.
          statistic: a function of an activation [B, S, n] and what is known of its site to arrays.
          known: by site, arrays with a leading axis of layers, or None. Others are passed over.
          split_adapters: as in `Storage`.
          segments: as for `run_layers`.
          compute_dtype: dtype of activations and products.
        """
        positions = Positions.of(self.config, tokens.shape[1], segments)
        storage = Storage(split_adapters=split_adapters)

        def body(x: jax.Array, layer: tuple[Block, Any]) -> tuple[jax.Array, dict[str, Any]]:
            block, own = layer
            seen: dict[str, Any] = {}
            key = jax.random.key(0)  # Nothing is encoded.

            def visit(site: str, x: Any) -> Any:
                if site in own:
                    encoded = x.base if isinstance(x, actjax.LowRankSum) else x
                    seen[site] = statistic(encoded, own[site])
                return x

            return block(x, positions, self.config, storage, key, visit=visit), seen

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
          storage: what each site stores for the backward pass.
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
        hidden = self.last_norm(x)
        return actjax.cross_entropy(hidden, self.head, targets, mask=mask, z_loss=z_loss)

    def __call__(self, tokens: jax.Array, *, compute_dtype: str = "bfloat16") -> jax.Array:
        """Returns the logits of `tokens` [B, S], [B, S, V] in float32."""
        hidden = self.hidden(tokens, compute_dtype=compute_dtype)
        return actjax.linear(hidden, self.head, name="head").astype(jnp.float32)


def rope_tables(config: ModelConfig, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the rotary angles, [length, head_size / 2] in float32."""
    exponents = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _scale_frequencies(
    frequencies: jax.Array, scaling: RopeScaling | LinearRopeScaling
) -> jax.Array:
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param((std * jax.random.normal(key, shape, jnp.float32)).astype(dtype))


def _over_batch(x: Any) -> Any:
    """Keeps an activation, [B, ...], cut over sequences under a mesh with an axis `fsdp`.

    Weights are cut over the same axis, and XLA could as well gather activations and leave weights
    where they are. Under this constraint it gathers one layer's weights at a time.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or "fsdp" not in mesh.axis_names:
        return x
    cut = functools.partial(jax.lax.with_sharding_constraint, shardings=PartitionSpec("fsdp"))
    if isinstance(x, actjax.LowRankSum):
        return dataclasses.replace(x, base=cut(x.base), left=cut(x.left))
    return cut(x)


def _split_heads(x: Any, head_size: int) -> Any:
    return x.reshape(*x.shape[:2], -1, head_size)


LayerFunction = Callable[[Block, jax.Array, Positions, Keys], jax.Array]
"""From a layer's weights, the residual stream, positions and a key to the residual stream."""


def layer_function(config: ModelConfig, storage: StorageChoice) -> LayerFunction:
    """Returns the function of one layer.

    Args:
      config: dimensions.
      storage: what a layer stores; its arrays are those of one layer.
    """
    match storage:
        case Storage():
            return _plain(config, storage)
        case Remat():
            return _rematerialized(config, storage)
        case CompressedResiduals():
            return _compressed_residuals(config, storage)


def _plain(config: ModelConfig, storage: Storage) -> LayerFunction:
    def run(block, x, positions, key):
        return block(x, positions, config, storage, key)

    return run


def _rematerialized(config: ModelConfig, storage: Remat) -> LayerFunction:
    """Returns the function of one layer that runs again in the backward pass."""
    run = _plain(config, Storage())
    if isinstance(storage.codec, actjax.Exact):
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = dots if storage.policy == "dots" else None
        # Nothing can be hoisted out of a scan, so the barrier against common subexpressions is
        # not needed.
        return jax.checkpoint(run, prevent_cse=False, policy=policy)

    def checkpointed(block, x, positions, key):
        named = isinstance(key, Mapping)
        own = key[BLOCK_INPUT] if named else jax.random.fold_in(key, len(SITES))
        recomputed = actjax.checkpoint(
            run, storage.codec, activations=1, key=own, name="block input"
        )
        return recomputed(block, x, positions, key)

    return checkpointed


def _compressed_residuals(config: ModelConfig, storage: CompressedResiduals) -> LayerFunction:
    """Returns the function of one layer of exact operators, whose residuals are compressed."""
    codecs = storage.codecs

    def name_site(site: str, x: jax.Array) -> jax.Array:
        return checkpoint_name(x, site) if site in codecs else x

    def run(block, x, positions):
        # No operator draws from the key.
        key = jax.random.key(0)
        return block(x, positions, config, Storage(), key, visit=name_site, recompute_scores=True)

    def compressed(block, x, positions, key):
        return actjax.compress_residuals(
            run, lambda kept: codecs.get(kept.name), activations=1, key=key
        )(block, x, positions)

    return compressed


def layer_keys(config: ModelConfig, key: Keys | None) -> Any:
    """Returns keys with a leading axis of layers; any will do if no codec draws and it is None."""
    key = jax.random.key(0) if key is None else key
    return jax.tree.map(lambda k: jax.random.split(k, config.num_layers), key)


def _check_key(storage: StorageChoice, key: Keys | None) -> None:
    for site, codec in storage.codecs.items():
        if key is None and codec.needs_key:
            raise ValueError(
                f"`{type(storage).__name__}.{site}` is {codec}, which draws random numbers, but got"
                " key=None: pass `key`."
            )
