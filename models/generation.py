"""Text from a decoder: one forward pass over the prompts, then one token at a time from a cache."""

import functools
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import extend, prefill
from models.decoder import Decoder
from models.prompts import Ids, check_ids, padded, rounded_length, without_dropout
from models.rope import rope_tables
from models.sampling import Sampling, check_sampling, draw, keys_at_step, keys_of_prompts


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
    """Returns the continuation that a model writes after each prompt.

    All prompts are continued together until each has ended. The continuation of a prompt does not
    depend on the other prompts. Lengths are rounded up, so that few programs are compiled. A
    program holds the weights, the logits of one position, [B, V], and the cache: 2 L B S G D
    numbers for S positions of the longest prompt and its continuation.

    Args:
      model: plain weights, or an `actjax.LoRA`, `actjax.NF4Weight` or `actjax.FrozenWeight` in the
        place of some. Dropout of adapters is turned off.
      prompts: ids, at least one in each.
      max_new_tokens: largest length of a continuation.
      stop: ids that end a text.
      temperature: divides the logits before a token is drawn; 0 takes the likeliest token.
      top_p: draws from the likeliest tokens that have this probability together (Holtzman et al.,
        "The Curious Case of Neural Text Degeneration", 2020).
      top_k: draws from this many of the likeliest tokens; applied before `top_p`. 0 is no limit.
      key: randomness; consumed. Either one key, which is folded with the index of each prompt, or
        one key for each prompt, [prompts]. Needed if the temperature is above 0.
      compute_dtype: dtype of activations, products and the cache.

    Returns:
      New ids of each prompt, without the id that ends it.

    Raises:
      ValueError: a number out of range, an empty prompt, a prompt that leaves no room for
        `max_new_tokens`, or no key where one is needed.
    """
    check_sampling(max_new_tokens, temperature, top_p, top_k, key)
    if not prompts:
        return []
    limit = model.config.max_seq_len
    for i, prompt in enumerate(prompts):
        check_ids(f"prompts[{i}]", prompt, model.config)
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"`prompts[{i}]` has {len(prompt)} tokens, and with `max_new_tokens`"
                f" {max_new_tokens} more it exceeds the {limit} positions of the model: shorten it,"
                " or lower `max_new_tokens`."
            )
    if stop:
        check_ids("stop", list(stop), model.config)
    longest = max(map(len, prompts))
    texts = _generate(
        without_dropout(model),
        padded(prompts, rounded_length(longest, limit)),
        np.array([len(prompt) for prompt in prompts], np.int32),
        padded([list(stop)], rounded_length(len(stop)), fill=-1)[0],
        np.int32(max_new_tokens),
        keys_of_prompts(key, len(prompts)),
        (np.float32(temperature or 1), np.float32(top_p), np.int32(top_k)),
        slots=rounded_length(longest + max_new_tokens, limit),
        greedy=temperature == 0,
        limited=top_p < 1 or top_k > 0,
        compute_dtype=compute_dtype,
    )
    return [row[row >= 0].tolist() for row in np.asarray(texts)]


@functools.partial(jax.jit, static_argnames=("slots", "greedy", "limited", "compute_dtype"))
def _generate(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    stop: jax.Array,
    max_new_tokens: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
    *,
    slots: int,
    greedy: bool,
    limited: bool,
    compute_dtype: str,
) -> jax.Array:
    """Returns new ids, [B, slots], with -1 from the stop on.

    Args:
      model: the weights.
      tokens: prompts, [B, P].
      lengths: lengths of the prompts, [B].
      stop: ids that end a text, padded with -1.
      max_new_tokens: scalar.
      keys: a key for each prompt, [B].
      sampling: temperature, `top_p` and `top_k`.
      slots: positions of the cache.
      greedy: whether to take the largest logit.
      limited: whether `top_p` or `top_k` leave out any token.
      compute_dtype: as for `generate`.
    """
    tables = rope_tables(model.config, slots)

    def write(texts, done, step, logits):
        if greedy:
            chosen = logits.argmax(-1).astype(jnp.int32)
        else:
            chosen = draw(logits, keys_at_step(keys, step), sampling, limited)
        done = done | jnp.isin(chosen, stop)
        return texts.at[:, step].set(jnp.where(done, -1, chosen)), done, step + 1, chosen

    def is_unfinished(state):
        _, done, step, _, _ = state
        return (step < max_new_tokens) & ~done.all()

    def write_next(state):
        texts, done, step, chosen, cache = state
        logits, cache = extend(model, chosen, lengths + step - 1, cache, tables)
        return *write(texts, done, step, logits), cache

    logits, cache = prefill(model, tokens, lengths, slots, compute_dtype)
    texts = jnp.full((len(tokens), slots), -1, jnp.int32)
    state = write(texts, jnp.zeros(len(tokens), bool), jnp.int32(0), logits)
    return jax.lax.while_loop(is_unfinished, write_next, (*state, cache))[0]
