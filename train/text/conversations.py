"""Conversations: messages of several forms become one, and a chat template writes them as text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from train.text.chat import ChatTemplate
from train.text.encoder import Written
from train.text.records import field_of, quoted
from train.text.special_tokens import pattern_of

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARED_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Roles by their names in ShareGPT's form."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ALIASES: dict[str, tuple[str, ...]] = dict.fromkeys(_REASONING, _REASONING)
"""Names under which a template may read a field."""
_KNOWN = frozenset((
    *("role", "content", "name", "tool_calls", "tool_call_id", "weight", *_REASONING),
    *("id", "timestamp", "created_at", "model", "user", "index", "url", "lang", "language"),
))  # fmt: skip
"""Fields of a message that have a meaning here or none at all. A template may read further ones."""


class Conversation(NamedTuple):
    """A conversation, checked.

    Attributes:
      messages: each with a role, and the text of its content.
      learned: whether the answer in a message is learned, for each message.
      tools: descriptions of functions for the template, or None.
      arguments: arguments for the template.
    """

    messages: list[dict[str, Any]]
    learned: list[bool]
    tools: Any
    arguments: Mapping[str, Any]


def read_conversation(
    fields: Mapping[str, Any], field: str, template: ChatTemplate
) -> Conversation:
    """Returns the conversation of a record.

    Args:
      fields: of the record.
      field: name of the list of messages; each has `role` and `content`, or `from` and `value` as
        ShareGPT has.
      template: reads fields of messages too.

    Raises:
      ValueError: a message has another form, or a field whose meaning is not known.
    """
    arguments = fields.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"'chat_template_kwargs' is {type(arguments).__name__}, not an object")
    if fields.get("tools") and "tools" not in template.source:
        raise ValueError("it has 'tools', which the chat template does not write: remove them")
    messages, learned = read_messages(field_of(fields, field), f"field '{field}'", template)
    return Conversation(messages, learned, fields.get("tools"), arguments)


def read_messages(
    messages: Any, name: str, template: ChatTemplate
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Returns messages in one form, and whether each is learned; see `read_conversation`.

    Args:
      messages: the list.
      name: its name, for messages to the user.
      template: as for `read_conversation`.
    """
    if not isinstance(messages, list):
        raise ValueError(f"{name} is {type(messages).__name__}, not a list of messages")
    read, learned = [], []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {type(message).__name__}, not an object")
        if "from" in message and "role" not in message:
            message = _of_share_gpt(message, number)
        _check_fields(message, number, template)
        message = {name: value for name, value in message.items() if value is not None}
        weight = message.pop("weight", 1)
        if weight not in (0, 1):
            raise ValueError(f"the 'weight' of message {number} is {weight!r}, not 0 or 1")
        if (reasoning := next(filter(None, map(message.get, _REASONING)), None)) is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        message["content"] = _text_of(message, number)
        read.append(message)
        learned.append(message["role"] == "assistant" and weight == 1)
    return read, learned


def _of_share_gpt(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    role = _SHARED_ROLES.get(str(message["from"]))
    if role is None:
        raise ValueError(
            f"message {number} is from {message['from']!r}, not from one of {quoted(_SHARED_ROLES)}"
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **others}


def _check_fields(message: Mapping[str, Any], number: int, template: ChatTemplate) -> None:
    if message.get("role") not in ROLES:
        raise ValueError(
            f"message {number} has the role {message.get('role')!r}, not one of {quoted(ROLES)}"
        )
    for name in ("tool_calls", *_REASONING):
        if message.get(name) and not any(x in template.source for x in _ALIASES.get(name, (name,))):
            raise ValueError(
                f"message {number} has '{name}', which the chat template does not write: remove it,"
                " or try another `--chat-template`"
            )
    for name, value in message.items():
        if name not in _KNOWN and name not in template.source and value not in (None, "", [], {}):
            raise ValueError(
                f"field '{name}' of message {number} has no meaning here, and the chat template"
                " does not read it: remove it"
            )


def _text_of(message: Mapping[str, Any], number: int) -> str:
    """Returns the content of a message as one text."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        texts = [
            part if isinstance(part, str) else part.get("text")
            for part in content
            if isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        ]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a part of the 'content' of message {number} is no text")
        return "".join(map(str, texts))
    if not isinstance(content, str):
        raise ValueError(f"the 'content' of message {number} is {type(content).__name__}, not text")
    return content


def write_conversation(
    talk: Conversation, template: ChatTemplate, special: Sequence[str]
) -> list[Written]:
    """Returns a conversation as texts in which the answers of the assistant are learned.

    Where the template has `{% generation %}` blocks, they are learned. Elsewhere an answer is the
    text that its message adds to the text that asks for it, up to the token that ends it: neither
    an empty thought that the template writes before the answer nor the line break after its end.
    Some templates change earlier turns when others follow: Qwen 3's drops their thoughts. Then each
    answer becomes a separate text, after the text that asks for it.

    Args:
      talk: the conversation, with marks in names of special tokens.
      template: the template.
      special: names of special tokens.

    Raises:
      ValueError: the template refuses the conversation, or an answer cannot be told from the rest.
    """
    if template.marks_answers:
        return _write_marked(talk, template)
    names, turns = pattern_of(special), []
    for index, message in enumerate(talk.messages):
        if message["role"] == "assistant":
            asked, said = _turn(talk, index, template)
            place = _answer_in(said, len(asked), message, names)
            turns.append((asked, said, place, talk.learned[index]))
    if not any(learned for *_, learned in turns):
        return []
    whole, ends = turns[-1][1], [len(text) for asked, said, *_ in turns for text in (asked, said)]
    if ends != sorted(ends) or not all(whole.startswith(said) for _, said, *_ in turns):
        return [Written(said, [place], True) for _, said, place, learned in turns if learned]
    return [Written(whole, [place for *_, place, learned in turns if learned], True)]


def _write_marked(talk: Conversation, template: ChatTemplate) -> list[Written]:
    text, places = template.render_answers(
        talk.messages, tools=talk.tools, arguments=talk.arguments
    )
    answers = [
        learned
        for message, learned in zip(talk.messages, talk.learned, strict=True)
        if message["role"] == "assistant"
    ]
    if not all(answers):
        if len(places) != len(answers):
            raise ValueError(
                f"the chat template marks {len(places)} answers of {len(answers)} messages, so the"
                " one with 'weight' 0 is not known: remove the weight"
            )
        places = [place for place, learned in zip(places, answers, strict=True) if learned]
    return [Written(text, places, True)] if places else []


def _turn(talk: Conversation, index: int, template: ChatTemplate) -> tuple[str, str]:
    """Returns the text that asks for an answer, and the text with the answer."""
    options = {"tools": talk.tools, "arguments": talk.arguments}
    try:
        said = template.render(talk.messages[: index + 1], **options)
        if index == 0:  # Many templates refuse an empty conversation.
            return "", said
        asked = template.render(talk.messages[:index], add_generation_prompt=True, **options)
    except ValueError as error:
        raise ValueError(f"message {index + 1}: {error}") from error
    if not said.startswith(asked):
        raise ValueError(
            f"the chat template does not continue {_ending(asked)!r}, which asks for message"
            f" {index + 1}, but writes it after {_ending(said[: len(asked)])!r}: the text of the"
            " assistant cannot be separated. Try another `--chat-template`"
        )
    return asked, said


def _answer_in(
    said: str, start: int, message: Mapping[str, Any], names: re.Pattern[str]
) -> tuple[int, int]:
    """Returns the place of an answer in a text that begins to answer at `start`."""
    bound = stop = len(said)
    for name in names.finditer(said, start):
        if not said[name.end() :].strip():
            bound, stop = name.span()
    # A thought or a call is written around the content, in the template's words.
    if not (message.get("tool_calls") or message.get("reasoning_content")):
        content = message["content"]
        content = content if content in said[start:bound] else content.strip()
        # The last place, because words of the template before it can hold the content.
        start = max(start, said.rfind(content, start, bound)) if content else max(start, bound)
    return start, stop


def _ending(text: str) -> str:
    return text if len(text) <= 40 else "..." + text[-40:]
