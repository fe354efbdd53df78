"""Cached keys and values, and the two forward passes of generation that write them.

Prompts are padded on the right, so that a slot of the cache is a position. The causal mask hides
the padding of a short prompt, and its new tokens overwrite that padding later.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

import actjax
from actjax._math.precision import accumulation_dtype
from models.block import Attention, Block
from models.config import ModelConfig
from models.decoder import Decoder
from models.rope import Tables, rope_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the positions so far, for all layers.

    Attributes:
      k: keys, normalized and rotated, [L, B, S, G, D].
      v: values, [L, B, S, G, D].
    """

    k: jax.Array
    v: jax.Array


def prefill(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, slots: int, compute_dtype: str
) -> tuple[jax.Array, Cache]:
    """Returns the logits after prompts, [B, V] in float32, and a cache that begins with them.

    Args:
      model: the weights.
      tokens: prompts, padded on the right, [B, P] integers.
      lengths: lengths of the prompts, [B] integers of at least 1.
      slots: positions of the cache, at least P.
      compute_dtype: dtype of activations, products and the cache.
    """
    config = model.config
    tables = rope_tables(config, tokens.shape[1])

    def body(x: jax.Array, block: Block) -> tuple[jax.Array, Cache]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
            q, k = _prepare(block.attention, q, k, tables, config)
            out = actjax.attention(
                q,
                k,
                v,
                window=config.sliding_window,
                implementation=config.attention,
                merge_heads=True,
            )
            return actjax.linear(out, block.attention.o[...]), Cache(k, v)

        return block.run(x, attend, config)

    x, cache = jax.lax.scan(body, model.embed(tokens, compute_dtype), model.layers)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    room = [(0, 0), (0, 0), (0, slots - tokens.shape[1]), (0, 0), (0, 0)]
    return _logits(model, last)[:, 0], jax.tree.map(lambda y: jnp.pad(y, room), cache)


def extend(
    model: Decoder, tokens: jax.Array, positions: jax.Array, cache: Cache, tables: Tables
) -> tuple[jax.Array, Cache]:
    """Returns the logits after one more token of each text, [B, V] in float32, and the cache.

    Args:
      model: the weights.
      tokens: [B] integers.
      positions: positions of the tokens, [B] integers. The cache is read only before them.
      cache: keys and values of the positions before.
      tables: RoPE tables of all positions of the cache.
    """
    config = model.config
    cos, sin = tables
    token_tables = cos[positions], sin[positions]

    def body(x: jax.Array, layer: tuple[Block, Cache]) -> tuple[jax.Array, Cache]:
        block, before = layer

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
            q, k = _prepare(block.attention, q, k, token_tables, config)
            out = _attend_to_cache(before, positions, config.sliding_window, q, k, v)
            return actjax.linear(out, block.attention.o[...]), Cache(k[0], v[0])

        return block.run(x, attend, config)

    # The tokens of all texts form one sequence, [1, B, d]: RoPE tables have a row for each token.
    x = jnp.swapaxes(model.embed(tokens[:, None], cache.k.dtype.name), 0, 1)
    x, new = jax.lax.scan(body, x, (model.layers, cache))
    rows = jnp.arange(len(tokens))
    # The layers only read the cache. Writing after them lets XLA update it in place.
    cache = jax.tree.map(lambda stored, y: stored.at[:, rows, positions].set(y), cache, new)
    return _logits(model, x)[0], cache


def _prepare(
    weights: Attention, q: jax.Array, k: jax.Array, tables: Tables, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys, normalized by head and rotated."""
    norm = weights.head_norm(config.norm_eps)
    if norm is not None:
        q = actjax.rms_norm(q, norm.q, eps=norm.eps)
        k = actjax.rms_norm(k, norm.k, eps=norm.eps)
    return actjax.rope(q, *tables), actjax.rope(k, *tables)


def _attend_to_cache(
    cache: Cache,
    positions: jax.Array,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """Returns the attention of one token of each text to itself and the tokens before.

    Args:
      cache: keys and values of one layer, [B, S, G, D].
      positions: positions of the tokens, [B].
      window: as `ModelConfig.sliding_window`.
      q: queries of the tokens, [1, B, H, D].
      k: keys of the tokens, [1, B, G, D].
      v: values of the tokens, [1, B, G, D].

    Returns:
      [1, B, H * D].
    """
    wide = accumulation_dtype(q.dtype)
    queries = q[0].reshape(*k.shape[1:3], -1, q.shape[-1])
    past = jnp.einsum("bghd,bsgd->bghs", queries, cache.k, preferred_element_type=wide)
    current = jnp.einsum("bghd,bgd->bgh", queries, k[0], preferred_element_type=wide)
    back = positions[:, None] - jnp.arange(cache.k.shape[1])
    seen = back > 0 if window is None else (back > 0) & (back < window)
    past = jnp.where(seen[:, None, None], past, -jnp.inf)
    scores = jnp.concatenate([past, current[..., None]], axis=-1) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bghs,bsgd->bghd", weights[..., :-1], cache.v, preferred_element_type=wide)
    out += weights[..., -1:].astype(wide) * v[0][:, :, None].astype(wide)
    return out.astype(q.dtype).reshape(1, len(positions), -1)


def _logits(model: Decoder, x: jax.Array) -> jax.Array:
    """Returns logits in float32 from the residual stream after the last layer."""
    return actjax.linear(model.last_norm(x), model.head).astype(jnp.float32)
