"""One layer of the decoder: its weights, and the forward pass that training and generation share.

A block is a short list of actjax operators. Each operator decides what it stores for the backward
pass. Only attention differs between training and generation, so the caller passes it in.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import actjax
from models.chunks import in_chunks
from models.config import ModelConfig
from models.padding import pad
from models.rope import Tables, rope_tables
from models.sharding import attend_by_heads, split_features, split_residual
from models.storage import SITES, Storage

Keys = jax.Array | Mapping[str, jax.Array]
"""A key to fold for each site, or a key for each of `models.storage.SITES` and, for `Remat`,
`models.storage.BLOCK_INPUT`."""

Visit = Callable[[str, Any], Any]
"""From the name of a site and the activation that it stores, [B, S, n], to the activation."""

Attend = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
"""From q [B, S, H, D], k and v [B, S, G, D], before head norms and RoPE, to the output of the
projection, [B, S, d], and values that the caller collects, such as keys and values."""

_LINEAR_OUTPUTS = ("q", "k", "v", "gate", "up")
_NO_KEYS: Mapping[str, None] = dict.fromkeys(SITES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of tokens, as attention reads them. They are the same in all layers.

    Attributes:
      rope: cosines and sines of RoPE, [S, D / 2] each.
      segments: document numbers, [B, S] integers; None if each sequence is one document.
    """

    rope: Tables
    segments: jax.Array | None = None

    @classmethod
    def of(cls, config: ModelConfig, length: int, segments: jax.Array | None = None) -> "Positions":
        """Returns the positions of sequences of `length` tokens."""
        return cls(rope_tables(config, length), segments)


class Attention(nnx.Module):
    """Weights of causal grouped-query attention, [in, out] each.

    The biases of q, k and v and the scales of the head norms are None in models without them.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, key: jax.Array):
        queries = config.num_heads * config.head_size
        keys = config.num_kv_heads * config.head_size
        d = config.hidden_size
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q = normal(q_key, (d, queries), config.init_std, dtype)
        self.k = normal(k_key, (d, keys), config.init_std, dtype)
        self.v = normal(v_key, (d, keys), config.init_std, dtype)
        self.o = normal(o_key, (queries, d), config.init_std, dtype)
        biased, normed, size = config.attention_bias, config.qk_norm, config.head_size
        self.q_bias = nnx.Param(jnp.zeros(queries, dtype)) if biased else None
        self.k_bias = nnx.Param(jnp.zeros(keys, dtype)) if biased else None
        self.v_bias = nnx.Param(jnp.zeros(keys, dtype)) if biased else None
        self.q_norm = nnx.Param(jnp.ones(size, dtype)) if normed else None
        self.k_norm = nnx.Param(jnp.ones(size, dtype)) if normed else None

    @property
    def biases(self) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Biases of q, k and v, or None."""
        if self.q_bias is None or self.k_bias is None or self.v_bias is None:
            return None
        return self.q_bias[...], self.k_bias[...], self.v_bias[...]

    def head_norm(self, eps: float) -> actjax.HeadNorm | None:
        """Norms of the heads, or None."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return actjax.HeadNorm(self.q_norm[...], self.k_norm[...], eps)


class MLP(nnx.Module):
    """Weights of the gated feed-forward network, [in, out] each, with their padding."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, key: jax.Array):
        d, f = config.hidden_size, config.ffn_size
        gate_key, up_key, down_key = jax.random.split(key, 3)

        def drawn(name: str, key: jax.Array, *shape: int) -> nnx.Param:
            weight = normal(key, shape, config.init_std, dtype)
            return nnx.Param(pad(name, weight[...], config))

        self.gate = drawn("gate", gate_key, d, f)
        self.up = drawn("up", up_key, d, f)
        self.down = drawn("down", down_key, f, d)


class Block(nnx.Module):
    """One layer: attention and a feed-forward network, each after a norm and with a skip."""

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
        recompute_attention: bool = False,
        chunked: bool = False,
    ) -> jax.Array:
        """Runs the layer on whole sequences, for training.

        Args:
          x: residual stream, [B, S, d].
          positions: positions and documents of the tokens.
          config: dimensions.
          storage: what each site stores.
          key: randomness of the codecs of this layer and step; or a key for each site.
          visit: called with the activation of each site; its result replaces the activation.
          recompute_attention: whether attention stores only q, k and v even where its output is
            stored exactly.
          chunked: whether linear operators run on chunks of long sequences, and store only the
            residual stream. For a layer that runs again in the backward pass anyway.

        Returns:
          The residual stream after the layer, [B, S, d].
        """
        if not isinstance(key, Mapping):
            key = {site: jax.random.fold_in(key, i) for i, site in enumerate(SITES)}

        def visit_split(site: str, y: Any) -> Any:
            return visit(site, split_features(y) if site in _LINEAR_OUTPUTS else y)

        def attend(q: Any, k: Any, v: Any) -> tuple[jax.Array, None]:
            recompute = recompute_attention or not isinstance(storage.attention_out, actjax.Exact)
            return self._attend(q, k, v, positions, config, storage, key, visit, recompute), None

        x = self.run(x, attend, config, storage, key, visit_split, chunked)[0]
        return split_residual(x)

    def run(
        self,
        x: jax.Array,
        attend: Attend,
        config: ModelConfig,
        storage: Storage = Storage(),
        keys: Mapping[str, jax.Array | None] = _NO_KEYS,
        visit: Visit = lambda site, x: x,
        chunked: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Runs the layer with any attention: the forward pass of training and of generation.

        Args:
          x: residual stream, [B, S, d].
          attend: attention and its output projection.
          config: dimensions.
          storage: what each site stores.
          keys: randomness of the codecs, by site; the default if no codec draws.
          visit: as for `__call__`.
          chunked: as for `__call__`.

        Returns:
          The residual stream after the layer, [B, S, d], and what `attend` collects.
        """
        by_token = in_chunks if chunked else lambda fun, x: fun(x)
        q, k, v = by_token(lambda x: self._projections(x, config, storage, keys, visit), x)
        q, k, v = visit("q", q), visit("k", k), visit("v", v)
        q, k, v = (y.reshape(*y.shape[:2], -1, config.head_size) for y in (q, k, v))
        out, collected = attend(q, k, v)
        x = x + out

        fed = by_token(lambda x: self._feed_forward(x, config, storage, keys, visit), x)
        return x + fed, collected

    def _projections(self, x, config, storage, keys, visit) -> tuple[Any, Any, Any]:
        """Returns queries, keys and values, [B, S, n] each."""
        weights = self.attention
        q, k, v = _norm_linear(
            visit("attention_norm", x),
            self.attention_norm[...],
            (weights.q[...], weights.k[...], weights.v[...]),
            config,
            storage,
            keys,
            visit,
            sites=("attention_norm", "attention_in"),
            biases=weights.biases,
        )
        return q, k, v

    def _attend(
        self, q, k, v, positions, config, storage, keys, visit, recompute: bool
    ) -> jax.Array:
        """Returns causal attention within whole sequences, after the output projection."""
        weights = self.attention
        options: dict[str, Any] = {
            "rope": positions.rope,
            "segments": positions.segments,
            "window": config.sliding_window,
            "norm": weights.head_norm(config.norm_eps),
            "codec": (storage.q, storage.k, storage.v),
            "key": (keys["q"], keys["k"], keys["v"]),
            "implementation": config.attention,
            "on_devices": attend_by_heads,
        }
        if storage.attention_out is None:
            return actjax.attention_linear(q, k, v, weights.o[...], **options, name="attention")
        # Where the output projection stores its input exactly, attention can keep the same array
        # and a log-sum-exp, at no cost. Otherwise it runs its forward pass again.
        out = actjax.attention(q, k, v, recompute=recompute, merge_heads=True, **options)
        return actjax.linear(
            visit("attention_out", out),
            weights.o[...],
            codec=storage.attention_out,
            key=keys["attention_out"],
            name="attention_out",
        )

    def _feed_forward(self, x, config, storage, keys, visit) -> jax.Array:
        """Returns the output of the feed-forward network, a term of the residual stream."""
        mlp = self.mlp
        gate, up = _norm_linear(
            visit("mlp_norm", x),
            self.mlp_norm[...],
            (mlp.gate[...], mlp.up[...]),
            config,
            storage,
            keys,
            visit,
            sites=("mlp_norm", "mlp_in"),
        )
        gate, up, weight = visit("gate", gate), visit("up", up), mlp.down[...]
        options: dict[str, Any] = {
            "codec": (storage.gate, storage.up),
            "key": (keys["gate"], keys["up"]),
        }
        features = config.ffn_size
        if storage.mlp_out is None:
            return actjax.swiglu_linear(gate, up, weight, **options, features=features, name="mlp")
        out = visit("mlp_out", actjax.swiglu(gate, up, **options, features=features))
        options = {"codec": storage.mlp_out, "key": keys["mlp_out"], "features": features}
        return actjax.linear(out, weight, **options, name="mlp_out")


_NORM_NAMES = {"attention_norm": "attention norm input", "mlp_norm": "mlp norm input"}
"""Names of the inputs of the norms in `actjax.explain`."""


def _norm_linear(
    x, scale, weights, config, storage, keys, visit, *, sites, biases=None
) -> tuple[Any, ...]:
    """Returns linear maps of the normalized `x`, whose input is rebuilt if its codec is None."""
    norm_site, site = sites
    codec, split = getattr(storage, site), storage.split_adapters
    norm: dict[str, Any] = {
        "eps": config.norm_eps,
        "codec": getattr(storage, norm_site),
        "key": keys[norm_site],
        "name": _NORM_NAMES[norm_site],
    }
    if codec is None:
        return actjax.norm_linear(x, scale, weights, bias=biases, split=split, **norm)
    h = visit(site, actjax.rms_norm(x, scale, **norm))
    key = keys[site]
    return actjax.linear(h, weights, bias=biases, codec=codec, key=key, split=split, name=site)


def normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> nnx.Param:
    """Returns a parameter drawn from a normal distribution."""
    return nnx.Param((std * jax.random.normal(key, shape, jnp.float32)).astype(dtype))
