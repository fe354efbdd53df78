"""Formats of records: from the fields of one to the texts that are learned."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from train.settings.data import ExampleConfig, Format
from train.settings.options import flag_name, given_fields, shown_flag
from train.text.chat import ChatTemplate, open_chat_template, template_arguments
from train.text.conversations import read_conversation, write_conversation
from train.text.encoder import Encoder, Written
from train.text.pairs import CHOSEN, REJECTED, write_pair
from train.text.records import FieldTemplate, Record, field_of, quoted
from train.text.text_files import text_of

_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately"
    " completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Alpaca (Taori et al., 2023)."""
_CONVERSATIONS = "conversations"
"""Field of a conversation in ShareGPT's form."""
_MEANT = ("weight", "weights", "sample_weight", "loss_weight", "functions", "function_call")
"""Fields of a record that other programs give a meaning, and this one does not."""


class Write(Protocol):
    """From the fields of a record to its texts: none if nothing in it is learned."""

    def __call__(self, fields: Mapping[str, Any]) -> list[Written]:
        """Returns the texts."""
        ...


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the records of a file as texts.

    Attributes:
      format: format of the records.
      write: from fields to texts.
      template: the chat template, if the format has one.
    """

    format: Format
    write: Write
    template: ChatTemplate | None = None


def open_writer(
    config: ExampleConfig,
    encoder: Encoder,
    folder: pathlib.Path | None,
    first: Record,
    *,
    preferences: bool = False,
) -> Writer:
    """Returns the writer of the records.

    Args:
      config: the settings.
      encoder: marks special tokens in content.
      folder: folder of the tokenizer, which may have a chat template.
      first: the first record, which decides the format unless a flag does.
      preferences: whether records are pairs of preference, written as two texts.

    Raises:
      ValueError: flags or a record that fit no format, or a template that cannot be read.
    """
    aliases = {"prompt": config.prompt_field, "completion": config.completion_field}
    mark = encoder.marker.mark
    arguments = template_arguments(config.template_argument)
    prompt = FieldTemplate("--prompt-template", config.prompt_template, aliases, mark)
    completion = FieldTemplate("--completion-template", config.completion_template, aliases, mark)
    if preferences:
        template = _template_of_pairs(config, encoder, folder, first, arguments)
        return Writer("preference", lambda fields: write_pair(fields, encoder, prompt, template))
    form = _format_of(config, first, prompt.fields | completion.fields)
    if form == "chat":
        field = config.messages_field
        if field not in first.fields and _CONVERSATIONS in first.fields:
            field = _CONVERSATIONS
        template = open_chat_template(config.chat_template, folder, encoder.tokenizer, arguments)
        special = tuple(encoder.tokenizer.special.values())

        def write_chat(fields: Mapping[str, Any]) -> list[Written]:
            marked = {
                **fields,
                field: mark(field_of(fields, field)),
                "tools": mark(fields.get("tools")),
            }
            return write_conversation(read_conversation(marked, field, template), template, special)

        return Writer(form, write_chat, template)
    writes: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
        "completion": lambda fields: (prompt.fill(fields), completion.fill(fields)),
        "alpaca": lambda fields: _alpaca(mark(dict(fields))),
        "text": lambda fields: ("", mark(text_of(fields, config.text_field))),
    }
    make = writes[form]

    def write(fields: Mapping[str, Any]) -> list[Written]:
        asked, answer = make(fields)
        return [Written(asked + answer, [(len(asked), len(asked + answer))])]

    return Writer(form, write)


def _template_of_pairs(
    config: ExampleConfig,
    encoder: Encoder,
    folder: pathlib.Path | None,
    first: Record,
    arguments: Mapping[str, Any],
) -> ChatTemplate | None:
    """Returns the template of responses that are messages; None where they are texts.

    Raises:
      ValueError: the first record is no pair, or a flag is for another format.
    """
    for name in (CHOSEN, REJECTED):
        if name not in first.fields:
            raise ValueError(
                f"{first.where} has the fields {quoted(first.fields)}: `--loss dpo` needs 'prompt',"
                " 'chosen' and 'rejected'."
            )
    given = given_fields(config)
    for name in ("format", *_FLAGS_OF["text"], "completion_template", "completion_field"):
        if name in given:
            raise ValueError(
                f"`{shown_flag(name, given[name])}` has no effect with `--loss dpo`: drop it."
            )
    if isinstance(first.fields[CHOSEN], str) and config.chat_template is None:
        return None
    return open_chat_template(config.chat_template, folder, encoder.tokenizer, arguments)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a field that has a meaning elsewhere and none here."""
    for name in _MEANT:
        if fields.get(name) not in (None, 1, [], {}, ""):
            raise ValueError(
                f"field '{name}' is {fields[name]!r}, and has no meaning here: remove it (a message"
                " may have a 'weight' of 0 or 1)"
            )


def _alpaca(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompt and the answer of a record with `instruction`, `input` and `output`."""
    given = str(fields.get("input") or "")
    texts = {
        "instruction": field_of(fields, "instruction"),
        "with_input": ", paired with an input that provides further context" if given else "",
        "input": f"### Input:\n{given}\n\n" if given else "",
    }
    return _ALPACA.format(**texts), str(field_of(fields, "output"))


_FLAGS_OF: dict[Format, tuple[str, ...]] = {
    "completion": ("prompt_template", "completion_template", "prompt_field", "completion_field"),
    "chat": ("messages_field", "chat_template", "template_argument"),
    "text": ("text_field",),
    "alpaca": (),
    "preference": (),
}
"""Fields of `ExampleConfig` that only one format reads."""


def _format_of(config: ExampleConfig, first: Record, fields: set[str]) -> Format:
    """Returns the format of the records.

    It is the given one; else that of the given flags; else that of the first record, whose fields
    must include `fields` for a completion.

    Raises:
      ValueError: flags of another format, or of several, or a record that has the fields of none.
    """
    changed = given_fields(config)
    wanted: dict[Format, str] = {
        form: name for form, names in _FLAGS_OF.items() for name in names if name in changed
    }
    if config.format != "auto":
        for form, name in wanted.items():
            if form != config.format:
                raise ValueError(
                    f"`{shown_flag(name, changed[name])}` is for `--format {form}` and has no"
                    f" effect with `--format {config.format}`: drop one of both."
                )
        return config.format
    if len(wanted) > 1:
        names = " and ".join(f"`{flag_name(name)}`" for name in wanted.values())
        raise ValueError(f"{names} are for different formats: drop one of both.")
    if wanted:
        return next(iter(wanted))
    known = first.fields.keys()
    if config.messages_field in known or _CONVERSATIONS in known:
        return "chat"
    if {"chosen", "rejected"} <= known:
        raise ValueError(
            f"{first.where} has 'chosen' and 'rejected', a pair of preference: pass `--loss dpo`."
        )
    if fields <= known:
        return "completion"
    if {"instruction", "output"} <= known:
        return "alpaca"
    if config.text_field in known:
        return "text"
    raise ValueError(
        f"{first.where} has the fields {quoted(first.fields)}: neither '{config.messages_field}' or"
        f" '{_CONVERSATIONS}' (a conversation), nor {quoted(sorted(fields))} (a prompt and its"
        " completion), nor 'instruction' and 'output' (Alpaca), nor"
        f" '{config.text_field}' (a text). Name the fields by `--messages-field`, `--prompt-field` "
        "and `--completion-field`, or `--text-field`; or give `--prompt-template` and "
        "`--completion-template`."
    )
