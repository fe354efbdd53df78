"""Text from a decoder: prompts in one forward pass, then a token at a time from cached keys.

Prompts are padded on the right, so that a slot of the cache is a position: the causal mask alone
hides what a short prompt is filled up with, and its own tokens take the place of that later on.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import actjax
from actjax._math.precision import accumulation_dtype
from models.config import ModelConfig
from models.decoder import Block, Decoder, rope_tables

Ids = Sequence[int]
Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines of RoPE, [positions, D / 2] each."""

_SMALLEST = 16
"""Fewest positions that a program is compiled for."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What attention reads of the positions so far.

    Attributes:
      k: keys, normalised and rotated, [L, B, S, G, D].
      v: values, likewise.
    """

    k: jax.Array
    v: jax.Array


def generate(
    model: Decoder,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    key: jax.Array | None = None,
    compute_dtype: str = "bfloat16",
) -> list[list[int]]:
    """Returns what a model writes after each of some prompts.

    All prompts go on together until each has come to its end; what one gives does not depend on
    the others. A program is compiled for each of a few lengths. It holds the weights, the cache,
    which is 2 L B S G D numbers for S positions of the longest prompt and what follows it, and the
    logits of one position, [B, V].

    Args:
      model: plain weights, or an `actjax.LoRA`, `actjax.NF4Weight` or `actjax.FrozenWeight` in the
        place of some. Dropout of adapters is left out.
      prompts: ids, at least one each.
      max_new_tokens: where each ends at the latest.
      stop: ids that end a text.
      temperature: what logits are divided by before one is drawn; 0 takes the largest.
      top_p: draws from the likeliest tokens that have this probability together (Holtzman et al.,
        "The Curious Case of Neural Text Degeneration", 2020).
      top_k: draws from so many of the likeliest tokens, before `top_p`; 0 for no such limit.
      key: randomness; consumed. It is folded with the number of the prompt; or one for each,
        [prompts]. Needed if the temperature is above 0.
      compute_dtype: dtype of activations, products and the cache.

    Returns:
      New ids of each prompt, up to its stop and without it.

    Raises:
      ValueError: a number out of range, an empty prompt, one that leaves no room for what is to
        follow, or no key where one is needed.
    """
    _check_sampling(max_new_tokens, temperature, top_p, top_k, key)
    if not prompts:
        return []
    for i, prompt in enumerate(prompts):
        _check_ids(f"prompts[{i}]", prompt, model.config)
        if len(prompt) + max_new_tokens > model.config.max_seq_len:
            raise ValueError(
                f"`prompts[{i}]` has {len(prompt)} tokens, and `max_new_tokens` {max_new_tokens}"
                f" more are above the {model.config.max_seq_len} positions of the model: shorten"
                " it, or lower `max_new_tokens`."
            )
    if stop:
        _check_ids("stop", list(stop), model.config)
    longest = max(map(len, prompts))
    limit = model.config.max_seq_len
    texts = _generate(
        _without_dropout(model),
        _padded(prompts, _rounded(longest, limit)),
        np.array([len(prompt) for prompt in prompts], np.int32),
        _padded([list(stop)], _rounded(len(stop)), fill=-1)[0],
        np.int32(max_new_tokens),
        _keys_of(key, len(prompts)),
        (np.float32(temperature or 1), np.float32(top_p), np.int32(top_k)),
        slots=_rounded(longest + max_new_tokens, limit),
        greedy=temperature == 0,
        limited=top_p < 1 or top_k > 0,
        compute_dtype=compute_dtype,
    )
    return [row[row >= 0].tolist() for row in np.asarray(texts)]


def log_likelihoods(
    model: Decoder,
    prompts: Sequence[Ids],
    continuations: Sequence[Ids],
    *,
    compute_dtype: str = "bfloat16",
) -> np.ndarray:
    """Returns the log-probability of each continuation after its prompt, [B] float32, in nats.

    The sum over its tokens. Of the logits those of some continuation's tokens exist at a time.

    Args:
      model: as for `generate`.
      prompts: ids, at least one each.
      continuations: ids, at least one each: as many as there are prompts.
      compute_dtype: dtype of activations and products; sums are in float32.

    Raises:
      ValueError: none of either, ids out of range, or more tokens than the model has positions.
    """
    if len(prompts) != len(continuations):
        raise ValueError(
            f"`continuations` are {len(continuations)} for {len(prompts)} `prompts`: give one each."
        )
    if not prompts:
        return np.zeros(0, np.float32)
    limit = model.config.max_seq_len
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        _check_ids(f"prompts[{i}]", prompt, model.config)
        _check_ids(f"continuations[{i}]", continuation, model.config)
        # Nothing is predicted from the last token.
        if len(prompt) + len(continuation) - 1 > limit:
            raise ValueError(
                f"`prompts[{i}]` has {len(prompt)} tokens and `continuations[{i}]`"
                f" {len(continuation)}: more than the {limit} positions of the model. Shorten one."
            )
    inputs = [[*p, *c[:-1]] for p, c in zip(prompts, continuations, strict=True)]
    width = _rounded(max(map(len, continuations)), limit)
    return np.asarray(
        _log_likelihoods(
            _without_dropout(model),
            _padded(inputs, _rounded(max(map(len, inputs)), limit)),
            np.array([len(prompt) for prompt in prompts], np.int32),
            _padded(continuations, width),
            np.array([len(continuation) for continuation in continuations], np.int32),
            compute_dtype=compute_dtype,
        )
    )


# ----- the two kinds of forward pass


def prefill(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, slots: int, compute_dtype: str
) -> tuple[jax.Array, Cache]:
    """Returns the logits after prompts, [B, V] in float32, and a cache that begins with them.

    Args:
      model: the weights.
      tokens: prompts, padded on the right, [B, P] integers.
      lengths: of the prompts, [B] integers of at least 1.
      slots: positions of the cache, at least P.
      compute_dtype: as for `generate`.
    """
    config = model.config
    tables = rope_tables(config, tokens.shape[1])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return actjax.attention(
            q,
            k,
            v,
            window=config.sliding_window,
            implementation=config.attention,
            merge_heads=True,
        )

    def body(x: jax.Array, block: Block) -> tuple[jax.Array, Cache]:
        x, k, v = _layer(block, x, tables, config, attend)
        return x, Cache(k, v)

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
      positions: of the tokens, [B] integers. What the cache has at and after them is not read.
      cache: of the positions before.
      tables: of all positions of the cache.
    """
    config = model.config
    cos, sin = tables
    own = cos[positions], sin[positions]

    def body(x: jax.Array, layer: tuple[Block, Cache]) -> tuple[jax.Array, Cache]:
        block, before = layer
        attend = functools.partial(_attend_to_cache, before, positions, config.sliding_window)
        x, k, v = _layer(block, x, own, config, attend)
        return x, Cache(k[0], v[0])

    # The tokens as one sequence [1, B, d], each at a position of its own: as operators take them.
    x = jnp.swapaxes(model.embed(tokens[:, None], cache.k.dtype.name), 0, 1)
    x, new = jax.lax.scan(body, x, (model.layers, cache))
    rows = jnp.arange(len(tokens))
    # Written after the layers, which read the cache alone: it is then changed in place.
    cache = jax.tree.map(lambda whole, y: whole.at[:, rows, positions].set(y), cache, new)
    return _logits(model, x)[0], cache


def _layer(
    block: Block,
    x: jax.Array,
    tables: Tables,
    config: ModelConfig,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the residual stream [b, s, d] after a layer, and its keys and values [b, s, G, D].

    Args:
      block: weights of the layer.
      x: residual stream before.
      tables: of RoPE for the positions s.
      config: dimensions.
      attend: from q, rotated k, and v to the output of attention with merged heads.
    """
    weights, mlp, eps = block.attention, block.mlp, config.norm_eps
    h = actjax.rms_norm(x, block.attention_norm[...], eps=eps)
    projections = weights.q[...], weights.k[...], weights.v[...]
    q, k, v = (
        y.reshape(*y.shape[:2], -1, config.head_size)
        for y in actjax.linear(h, projections, bias=weights.biases)
    )
    norm = weights.head_norm(eps)
    if norm is not None:
        q, k = actjax.rms_norm(q, norm.q, eps=eps), actjax.rms_norm(k, norm.k, eps=eps)
    q, k = actjax.rope(q, *tables), actjax.rope(k, *tables)
    x = x + actjax.linear(attend(q, k, v), weights.o[...])
    h = actjax.rms_norm(x, block.mlp_norm[...], eps=eps)
    gate, up = actjax.linear(h, (mlp.gate[...], mlp.up[...]))
    return x + actjax.linear(actjax.swiglu(gate, up), mlp.down[...]), k, v


def _attend_to_cache(
    cache: Cache,
    positions: jax.Array,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """Returns attention of one token of each text to those before it and to itself, [1, B, H * D].

    Args:
      cache: of one layer, [B, S, G, D].
      positions: of the tokens, [B].
      window: as `ModelConfig.sliding_window`.
      q: [1, B, H, D].
      k: the tokens' own, [1, B, G, D].
      v: likewise.
    """
    wide = accumulation_dtype(q.dtype)
    queries = q[0].reshape(*k.shape[1:3], -1, q.shape[-1])
    before = jnp.einsum("bghd,bsgd->bghs", queries, cache.k, preferred_element_type=wide)
    own = jnp.einsum("bghd,bgd->bgh", queries, k[0], preferred_element_type=wide)
    back = positions[:, None] - jnp.arange(cache.k.shape[1])
    seen = back > 0 if window is None else (back > 0) & (back < window)
    before = jnp.where(seen[:, None, None], before, -jnp.inf)
    scores = jnp.concatenate([before, own[..., None]], axis=-1) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bghs,bsgd->bghd", weights[..., :-1], cache.v, preferred_element_type=wide)
    out += weights[..., -1:].astype(wide) * v[0][:, :, None].astype(wide)
    return out.astype(q.dtype).reshape(1, len(positions), -1)


def _logits(model: Decoder, x: jax.Array) -> jax.Array:
    """Returns logits in float32 from the residual stream after the last layer."""
    return actjax.linear(model.last_norm(x), model.head).astype(jnp.float32)


# ----- programs


@functools.partial(jax.jit, static_argnames=("slots", "greedy", "limited", "compute_dtype"))
def _generate(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    stop: jax.Array,
    max_new_tokens: jax.Array,
    keys: jax.Array,
    sampling: tuple[jax.Array, jax.Array, jax.Array],
    *,
    slots: int,
    greedy: bool,
    limited: bool,
    compute_dtype: str,
) -> jax.Array:
    """Returns new ids, [B, slots], with -1 from the stop on.

    Args:
      model: the weights.
      tokens: [B, P].
      lengths: [B].
      stop: ids, and -1.
      max_new_tokens: scalar.
      keys: [B].
      sampling: temperature, top_p and top_k.
      slots: positions of the cache.
      greedy: whether to take the largest logit.
      limited: whether top_p or top_k leave any token out.
      compute_dtype: as for `generate`.
    """
    tables = rope_tables(model.config, slots)

    def write(texts, done, step, logits):
        if greedy:
            chosen = logits.argmax(-1).astype(jnp.int32)
        else:
            chosen = _draw(logits, _at_step(keys, step), sampling, limited)
        done = done | jnp.isin(chosen, stop)
        return texts.at[:, step].set(jnp.where(done, -1, chosen)), done, step + 1, chosen

    def is_going_on(state):
        _, done, step, _, _ = state
        return (step < max_new_tokens) & ~done.all()

    def one_more(state):
        texts, done, step, chosen, cache = state
        logits, cache = extend(model, chosen, lengths + step - 1, cache, tables)
        return *write(texts, done, step, logits), cache

    logits, cache = prefill(model, tokens, lengths, slots, compute_dtype)
    texts = jnp.full((len(tokens), slots), -1, jnp.int32)
    state = write(texts, jnp.zeros(len(tokens), bool), jnp.int32(0), logits)
    return jax.lax.while_loop(is_going_on, one_more, (*state, cache))[0]


def _at_step(keys: jax.Array, step: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, step))(keys)


def _draw(
    logits: jax.Array,
    keys: jax.Array,
    sampling: tuple[jax.Array, jax.Array, jax.Array],
    limited: bool,
) -> jax.Array:
    """Returns a token for each row of logits [B, V]; as `_generate` otherwise."""
    temperature, top_p, top_k = sampling
    logits = logits / temperature
    draw = jax.vmap(jax.random.categorical)
    if not limited:
        return draw(keys, logits).astype(jnp.int32)
    # By rank and not by a threshold: of equal logits no more than asked for are kept, the first.
    order = jnp.argsort(-logits, axis=-1)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    size = logits.shape[-1]
    within = jnp.arange(size) < jnp.where(top_k > 0, top_k, size)
    logits = jnp.where(within, logits, -jnp.inf)
    likely = jax.nn.softmax(logits, axis=-1)
    above = jnp.cumsum(likely, axis=-1) - likely
    # The first always is: rounding must not leave none.
    kept = (above < top_p) | (jnp.arange(size) == 0)
    ranks = draw(keys, jnp.where(kept, logits, -jnp.inf))
    return jnp.take_along_axis(order, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("compute_dtype",))
def _log_likelihoods(
    model: Decoder,
    tokens: jax.Array,
    starts: jax.Array,
    labels: jax.Array,
    counts: jax.Array,
    *,
    compute_dtype: str,
) -> jax.Array:
    """Returns sums of log-probabilities, [B].

    Args:
      model: the weights.
      tokens: prompts and continuations, [B, S].
      starts: lengths of the prompts, [B].
      labels: continuations, [B, C].
      counts: their lengths, [B].
      compute_dtype: as for `log_likelihoods`.
    """
    hidden = model.hidden(tokens, compute_dtype=compute_dtype)
    columns = jnp.arange(labels.shape[1])
    places = jnp.minimum(starts[:, None] - 1 + columns, tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    mask = (columns < counts[:, None]).astype(jnp.float32)

    def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, labels, mask = row
        return -actjax.cross_entropy(hidden, model.head, labels, mask=mask) * mask.sum()

    return jax.lax.map(one, (hidden, labels, mask))


# ----- what goes in


def _rounded(length: int, limit: int | None = None) -> int:
    """Returns the next of 16, 24, 32, 48, 64, 96, ..., or the limit if that is less."""
    size = _SMALLEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else min(size, limit)


def _padded(rows: Sequence[Ids], width: int, fill: int = 0) -> np.ndarray:
    """Returns rows of ids as one array, [rows, width] int32."""
    padded = np.full((len(rows), width), fill, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded


def _keys_of(key: jax.Array | None, count: int) -> jax.Array:
    """Returns a key for each prompt, [count]; any will do if none is drawn from."""
    key = jax.random.key(0) if key is None else key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim:
        if key.shape != (count,):
            raise ValueError(
                f"`key` must be one, or one for each of {count} `prompts`: got {key.shape}."
            )
        return key
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def _without_dropout(model: Decoder) -> Decoder:
    def adapter(x: Any) -> bool:
        return isinstance(x, actjax.LoRA)

    return jax.tree.map(
        lambda x: dataclasses.replace(x, key=None, dropout=0.0) if adapter(x) else x,
        model,
        is_leaf=adapter,
    )


def _check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    key: jax.Array | None,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"`temperature` must be 0, for the likeliest token, or above, got {temperature}."
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1, got {top_p}.")
    if top_k < 0:
        raise ValueError(f"`top_k` must be at least 0, which is no limit, got {top_k}.")
    if temperature > 0 and key is None:
        raise ValueError(
            f"`temperature` {temperature} draws random numbers, but got key=None: pass `key`, or"
            " temperature=0."
        )


def _check_ids(name: str, ids: Ids, config: ModelConfig) -> None:
    if not len(ids):
        raise ValueError(f"`{name}` is empty: give at least one token, such as that of a start.")
    for index in (min(ids), max(ids)):
        if not 0 <= index < config.vocab_size:
            raise ValueError(
                f"`{name}` has the id {index}, but those of the model are 0 to"
                f" {config.vocab_size - 1}: it is of another tokenizer."
            )
