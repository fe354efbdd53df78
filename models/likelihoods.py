"""Log-probabilities of given continuations, as multiple-choice evaluations need them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import actjax
from models.decoder import Decoder
from models.prompts import Ids, check_ids, padded, rounded_length, without_dropout


def log_likelihoods(
    model: Decoder,
    prompts: Sequence[Ids],
    continuations: Sequence[Ids],
    *,
    compute_dtype: str = "bfloat16",
) -> np.ndarray:
    """Returns the log-probability of each continuation after its prompt, [B] float32, in nats.

    It is the sum over the tokens of the continuation. Logits exist for a chunk of tokens at a time.

    Args:
      model: as for `models.generation.generate`.
      prompts: ids, at least one in each.
      continuations: ids, at least one in each; one continuation for each prompt.
      compute_dtype: dtype of activations and products; sums are in float32.

    Raises:
      ValueError: an empty prompt or continuation, ids out of range, or more tokens than the model
        has positions.
    """
    if len(prompts) != len(continuations):
        raise ValueError(
            f"`continuations` has {len(continuations)} entries and `prompts` {len(prompts)}: give"
            " one continuation for each prompt."
        )
    if not prompts:
        return np.zeros(0, np.float32)
    limit = model.config.max_seq_len
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        check_ids(f"prompts[{i}]", prompt, model.config)
        check_ids(f"continuations[{i}]", continuation, model.config)
        # Nothing is predicted from the last token.
        if len(prompt) + len(continuation) - 1 > limit:
            raise ValueError(
                f"`prompts[{i}]` has {len(prompt)} tokens and `continuations[{i}]`"
                f" {len(continuation)}: more than the {limit} positions of the model. Shorten one."
            )
    inputs = [[*p, *c[:-1]] for p, c in zip(prompts, continuations, strict=True)]
    width = rounded_length(max(map(len, continuations)), limit)
    return np.asarray(
        _log_likelihoods(
            without_dropout(model),
            padded(inputs, rounded_length(max(map(len, inputs)), limit)),
            np.array([len(prompt) for prompt in prompts], np.int32),
            padded(continuations, width),
            np.array([len(continuation) for continuation in continuations], np.int32),
            compute_dtype=compute_dtype,
        )
    )


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
      counts: lengths of the continuations, [B].
      compute_dtype: as for `log_likelihoods`.
    """
    hidden = model.hidden(tokens, compute_dtype=compute_dtype)
    columns = jnp.arange(labels.shape[1])
    places = jnp.minimum(starts[:, None] - 1 + columns, tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    mask = columns < counts[:, None]
    return actjax.token_log_probs(hidden, model.head, labels, mask=mask).sum(axis=1)
