"""Pairs of preference: a prompt with a chosen and a rejected response."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from train.text.chat import ChatTemplate
from train.text.conversations import Conversation, read_messages, write_conversation
from train.text.encoder import Encoder, Example, Written
from train.text.records import FieldTemplate, field_of

CHOSEN, REJECTED = "chosen", "rejected"


class Pair(NamedTuple):
    """Two examples with one prompt.

    Attributes:
      chosen: the better response.
      rejected: the other.
      reference: log-probabilities of both under the model before training, in nats; zeros where a
        step computes them itself.
    """

    chosen: Example
    rejected: Example
    reference: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class PairValidation:
    """Held-out batches of pairs.

    Attributes:
      batches: the batches.
      num_pairs: pairs in them.
    """

    batches: list[dict[str, np.ndarray]]
    num_pairs: int

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns means over pairs from sums: loss, accuracy and margin of the implicit reward."""
        means = {name: value / self.num_pairs for name, value in sums.items()}
        return {
            "validation_loss": means["loss"],
            "reward_accuracy": means["correct"],
            "reward_margin": means["margin"],
        }


def write_pair(
    fields: Mapping[str, Any],
    encoder: Encoder,
    prompt: FieldTemplate,
    template: ChatTemplate | None,
) -> list[Written]:
    """Returns the texts of a chosen and of a rejected response, each after the prompt.

    Responses are texts after the text of the prompt, or lists of messages after those of the
    prompt; a list that begins with a user's or the system's message repeats the prompt. The last
    message of a list is the response.

    Args:
      fields: `chosen` and `rejected`, and the fields of the prompt.
      encoder: marks special tokens in content.
      prompt: writes the prompt of responses that are texts.
      template: writes conversations; None if there is no chat template.

    Raises:
      ValueError: a field is missing or has another form.
    """
    responses = [field_of(fields, name) for name in (CHOSEN, REJECTED)]
    if all(isinstance(response, str) for response in responses):
        asked, texts = prompt.fill(fields), map(encoder.marker.mark, responses)
        return [Written(asked + text, [(len(asked), len(asked + text))]) for text in texts]
    if template is None:
        raise ValueError(
            "'chosen' is a list of messages, and the tokenizer has no chat template: pass"
            " `--chat-template`"
        )
    given = fields.get("prompt") or []
    before = given if isinstance(given, list) else [{"role": "user", "content": given}]
    special = tuple(encoder.tokenizer.special.values())
    written = []
    for name, response in zip((CHOSEN, REJECTED), responses, strict=True):
        messages = _whole(before, response, name)
        read, _ = read_messages(encoder.marker.mark(messages), f"field '{name}'", template)
        if not read or read[-1]["role"] != "assistant":
            raise ValueError(f"the last message of '{name}' is not the assistant's")
        learned = [False] * (len(read) - 1) + [True]
        written += write_conversation(Conversation(read, learned, None, {}), template, special)[-1:]
    return written


def _whole(before: list[Any], response: Any, name: str) -> Any:
    """Returns the messages of the prompt and of a response."""
    if isinstance(response, str):
        return [*before, {"role": "assistant", "content": response}]
    if not isinstance(response, list) or not response:
        raise ValueError(f"field '{name}' is {type(response).__name__}, not text or messages")
    first = response[0]
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    if role not in ("user", "system", "human"):
        return [*before, *response]
    # Or the prompt is the text of a message, as in UltraFeedback.
    repeated = response[: len(before)] == before
    if not repeated and not (len(before) == 1 and _text_of(before[0]) in map(_text_of, response)):
        raise ValueError(
            f"'{name}' begins with a message of the {role}, but not with those of 'prompt': leave"
            " out the prompt there, or repeat all of it"
        )
    return response


def _text_of(message: Any) -> Any:
    return message.get("content", message.get("value")) if isinstance(message, dict) else None
