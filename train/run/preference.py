"""The loss of Direct Preference Optimization (DPO), and sums of log-probabilities for it."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """The loss of pairs of responses, and what a run reports of it. All arrays are [B].

    Attributes:
      loss: of each pair, in nats.
      chosen_reward: `beta log(policy / reference)` of the chosen response, the implicit reward.
      rejected_reward: the implicit reward of the rejected response.
      is_correct: whether the chosen response has the larger reward; False for equal ones.
    """

    loss: jax.Array
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    is_correct: jax.Array


def dpo_loss(
    policy_chosen: jax.Array,
    policy_rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Returns the DPO loss of each pair, `-(1 − ε) log σ(z) − ε log σ(−z)`.

    `z` is the reward of the chosen response minus that of the rejected one, and `ε` is
    `label_smoothing`. Without smoothing this is equation 7 of Rafailov et al., "Direct Preference
    Optimization", 2023 (arXiv 2305.18290); with smoothing it is the conservative loss of Mitchell,
    "A note on DPO with noisy preferences & relationship to IPO", 2023. It is finite for any finite
    `z`.

    The arguments are sums of log-probabilities over the tokens of a response, in nats, [B] each.
    With means over tokens in their place the loss is length-normalized DPO, after SimPO (Meng et
    al., 2024): equation 6 of Lambert et al., "Tülu 3", 2024 (arXiv 2411.15124), called
    `loss_type="sigmoid_norm"` in TRL and `dpo_norm` in open-instruct. Torchtune has means for SimPO
    only (`return_average_logprobs`). With means `beta` is larger, such as 5 in place of 0.1.

    Args:
      policy_chosen: log-probabilities of the chosen responses under the trained model.
      policy_rejected: log-probabilities of the rejected responses under it.
      reference_chosen: log-probabilities of the chosen responses under the model at the start of
        training. They have no gradient.
      reference_rejected: log-probabilities of the rejected responses under the same model.
      beta: factor of the rewards: the larger, the closer the model stays to the reference.
      label_smoothing: probability that the labels of a pair are exchanged, in [0, 0.5).

    Raises:
      ValueError: arrays of different shapes, or a number out of range.
    """
    if not beta > 0:
        raise ValueError(f"`beta` must be above 0, got {beta}.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"`label_smoothing` must be in [0, 0.5), got {label_smoothing}: with 0.5 the loss does"
            " not tell chosen and rejected responses apart."
        )
    reference = jax.lax.stop_gradient((reference_chosen, reference_rejected))
    shapes = [x.shape for x in (policy_chosen, policy_rejected, *reference)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(
            "log-probabilities of policy and reference must be four arrays [B],"
            f" got {', '.join(map(str, shapes))}."
        )
    chosen_reward = beta * (policy_chosen - reference[0])
    rejected_reward = beta * (policy_rejected - reference[1])
    z = chosen_reward - rejected_reward
    loss = -jax.nn.log_sigmoid(z)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * jax.nn.log_sigmoid(-z)
    return PreferenceLoss(loss, chosen_reward, rejected_reward, chosen_reward > rejected_reward)


def segment_sums(log_probs: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Returns the sum of log-probabilities of each segment of a row, [B, count].

    The means of responses are these sums over `segment_sums(mask, segments, count)`, where `mask`
    is 1 for the tokens that count.

    Args:
      log_probs: log-probabilities of tokens, [B, S], 0 for tokens that do not count.
      segments: number of the response that each token belongs to, [B, S] integers: 1 to `count`,
        and 0 for padding, which is left out. With another number all sums of its row are NaN.
      count: largest number of segments in a row. A segment without tokens has the sum 0.

    Raises:
      ValueError: arrays that are not both [B, S].
    """
    if log_probs.ndim != 2 or log_probs.shape != segments.shape:
        raise ValueError(
            "`log_probs` and `segments` must both be [B, S],"
            f" got {log_probs.shape} and {segments.shape}."
        )
    # Not a product with zeros and ones: a NaN would reach all segments of its row.
    is_in = segments[..., None] == jnp.arange(1, count + 1)
    sums = jnp.where(is_in, log_probs[..., None], 0).sum(axis=1)
    outside = jnp.any((segments < 0) | (segments > count), axis=1, keepdims=True)
    return jnp.where(outside, jnp.nan, sums)
