"""Examples to fine-tune on: JSON records become tokens, with a mask of those that the loss counts.

`open_examples` makes an `Example` of each record: a prompt and its completion, a conversation for a
chat template, or plain text. All records are encoded at once and held in memory, so that errors in
records are found before the first step.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from train.settings.data import ExampleConfig, Format
from train.settings.options import check_at_least, flag_name, given_fields, shown_flag
from train.text.chat import ChatTemplate, open_chat_template
from train.text.hashes import unit_hash
from train.text.records import FieldTemplate, Record, field_of, quoted, read_records
from train.text.text_files import text_of
from train.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTEXT = 64
"""Characters before a text that are encoded with it; enough for any special token's name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """The tokens of one example.

    Attributes:
      tokens: ids, int32 [n].
      counted: whether the loss counts a token as a target, bool [n]. False for the first token,
        which nothing predicts.
    """

    tokens: np.ndarray
    counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Examples:
    """Training and held-out examples: at least one of both, each with a counted token."""

    name: str
    """Name for logs."""
    train: Sequence[Example]
    validation: Sequence[Example]
    cut: int
    """Number of examples, of both kinds, that lost their end for being longer than a sequence."""
    dropped: int
    """Number of examples that were dropped: for their length, or because no token counts, possibly
    after their end was cut off."""
    fingerprint: str
    """Hexadecimal: a hash of all tokens, of which count and of which are held out."""


def open_examples(
    config: ExampleConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    tokenizer_path: pathlib.Path | None = None,
) -> Examples:
    """Reads and encodes all records.

    Args:
      config: what to read, and how.
      tokenizer: adds its `bos_id`, if any, and its `eos_id` to prompts and texts, but not to
        conversations, whose template writes special tokens.
      seq_len: largest number of tokens of an example minus one; the last token is only a target.
      tokenizer_path: folder of the tokenizer, or a file in it. The chat template is read there
        unless `config` names one.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a record or a template is malformed, or no example is left.
    """
    check_at_least(1, seq_len=seq_len)
    records = read_records(config.data, "--data")
    encode = _make_encoder(config, tokenizer, tokenizer_path, records[0])
    if config.validation is None:
        flag, source = "--data", config.data
        records, held_out = _hold_out(records, config)
    else:
        flag, source = "--validation", config.validation
        held_out = read_records(source, flag)
    encoded = [
        [example for record in part for example in encode(record)] for part in (records, held_out)
    ]
    fitted = [_fit(examples, seq_len + 1, config.long) for examples in encoded]
    train, validation = (examples for examples, _ in fitted)
    for examples, name, data, use, count in (
        (train, "--data", config.data, "train on", len(records)),
        (validation, flag, source, "validate on", len(held_out)),
    ):
        if not examples:
            raise ValueError(
                f"`{name}` is '{data}': all {count} record(s) to {use} were dropped. No counted"
                f" token (of a completion or of the assistant) is within `--seq-len` {seq_len}, or"
                " `--long drop` removed them. Raise `--seq-len`, or give other records."
            )
    return Examples(
        name=pathlib.Path(config.data).name,
        train=train,
        validation=validation,
        cut=sum(cut for _, cut in fitted),
        dropped=sum(map(len, encoded)) - len(train) - len(validation),
        fingerprint=_fingerprint(train, validation),
    )


# --- Records become texts, texts become tokens. ---


Pieces = list[tuple[str, bool]]
"""Consecutive texts, and whether each is learnt."""


def _make_encoder(
    config: ExampleConfig, tokenizer: Tokenizer, tokenizer_path: pathlib.Path | None, first: Record
) -> Callable[[Record], list[Example]]:
    """Returns a function from a record to its examples: one, or several for some conversations."""
    aliases = {"prompt": config.prompt_field, "completion": config.completion_field}
    prompt = FieldTemplate("--prompt-template", config.prompt_template, aliases)
    completion = FieldTemplate("--completion-template", config.completion_template, aliases)
    encode, after = tokenizer.encode, [tokenizer.eos_id]
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    form, template = _format_of(config, first, prompt.fields | completion.fields), None
    if form == "chat":
        template = open_chat_template(config.chat_template, tokenizer_path, tokenizer)
        # The template writes special tokens, at both ends too.
        encode, before, after = tokenizer.encode_with_special, [], []

    def write(record: Record) -> list[Pieces]:
        if template is not None:
            return _write_chat(record.fields, config.messages_field, template)
        if form == "completion":
            return [[(prompt.fill(record.fields), False), (completion.fill(record.fields), True)]]
        return [[(text_of(record, config.text_field), True)]]

    def examples_of(record: Record) -> list[Example]:
        return [
            _encode(pieces, encode, before, after, config.count_prompts) for pieces in write(record)
        ]

    return lambda record: record.apply(examples_of)


_FLAGS_OF: dict[Format, tuple[str, ...]] = {
    "completion": ("prompt_template", "completion_template", "prompt_field", "completion_field"),
    "chat": ("messages_field", "chat_template"),
    "text": ("text_field",),
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
    if config.messages_field in first.fields:
        return "chat"
    if fields <= first.fields.keys():
        return "completion"
    if config.text_field in first.fields:
        return "text"
    raise ValueError(
        f"{first.where} has the fields {quoted(first.fields)}: neither '{config.messages_field}'"
        f" (a conversation), nor {quoted(sorted(fields))} (a prompt and its completion), nor "
        f"'{config.text_field}' (a text). Name the fields by `--messages-field`, `--prompt-field` "
        "and `--completion-field`, or `--text-field`; or give `--prompt-template` and "
        "`--completion-template`."
    )


def _encode(
    pieces: Pieces,
    encode: Callable[[str], list[int]],
    before: list[int],
    after: list[int],
    count_all: bool,
) -> Example:
    """Encodes piece by piece, so that a prompt has the same tokens without its completion."""
    tokens, counted, previous = [*before], [False] * len(before), ""
    for text, counts in pieces:
        text.encode()  # Raises for lone surrogates, which some tokenizers accept.
        new = _encode_after(text, previous, encode)
        tokens += new
        counted += [counts or count_all] * len(new)
        previous = text or previous
    tokens += after
    counted += [True] * len(after)
    counted[:1] = [False] * len(tokens[:1])
    return Example(np.asarray(tokens, np.int32), np.asarray(counted, np.bool_))


def _encode_after(text: str, previous: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the ids of `text` after `previous`, whose ids do not change.

    The text before can matter: sentencepiece adds a space before everything that it encodes, and
    some tokenizers after each special token. So both texts are encoded together. If a token would
    then cross their border, as after a space, `text` is encoded after a line break instead.
    """
    for end in (previous[-_CONTEXT:], "\n") if previous else ():
        known, both = encode(end), encode(end + text)
        if both[: len(known)] == known:
            return both[len(known) :]
    return encode(text)


def _fit(
    examples: list[Example], longest: int, long: Literal["cut", "drop"]
) -> tuple[list[Example], int]:
    """Returns the examples with a counted token within `longest` tokens, and how many are cut."""
    fitting, cut = [], 0
    for example in examples:
        is_long = len(example.tokens) > longest
        if not (is_long and long == "drop") and example.counted[:longest].any():
            if is_long:  # Copies, because a slice would keep the whole array in memory.
                example = Example(example.tokens[:longest].copy(), example.counted[:longest].copy())
                cut += 1
            fitting.append(example)
    return fitting, cut


def _fingerprint(*splits: list[Example]) -> str:
    digest = hashlib.sha256()
    for examples in splits:
        digest.update(len(examples).to_bytes(8, "little"))
        for example in examples:
            digest.update(len(example.tokens).to_bytes(8, "little"))
            digest.update(example.tokens.astype("<i4").tobytes())
            digest.update(example.counted.tobytes())
    return digest.hexdigest()


def _hold_out(records: list[Record], config: ExampleConfig) -> tuple[list[Record], list[Record]]:
    """Splits records by a hash of their fields. Copies stay together; both sides get one."""
    hashes = [unit_hash(json.dumps(x.fields, sort_keys=True).encode()) for x in records]
    values = sorted(set(hashes))
    if len(values) < 2:
        raise ValueError(
            f"`--data` is '{config.data}': it has {len(records)} record(s), all equal, and one "
            "must be held out. Give other records, or a file to validate on by `--validation`."
        )
    bound = min(max(config.held_out, values[0]), values[-2])
    return (
        [x for x, value in zip(records, hashes, strict=True) if value > bound],
        [x for x, value in zip(records, hashes, strict=True) if value <= bound],
    )


def _write_chat(fields: Mapping[str, Any], field: str, template: ChatTemplate) -> list[Pieces]:
    """Returns a conversation up to the assistant's last turn; the assistant's turns are learnt.

    A turn is the text that its message adds to the text that asks for it. Some templates change
    earlier turns when others follow: Qwen 3's drops their thoughts. Then each turn becomes a
    separate example, after the text that asks for it.
    """
    messages, tools = field_of(fields, field), fields.get("tools")
    _check_messages(messages, field)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = template.render(messages[:index], add_generation_prompt=True, tools=tools)
            said = template.render(messages[: index + 1], tools=tools)
            if not said.startswith(asked):
                raise ValueError(
                    f"the chat template does not continue {_ending(asked)!r}, which asks for "
                    f"message {index + 1}, but writes it after {_ending(said[: len(asked)])!r}: "
                    "the text of the assistant cannot be separated. Try another `--chat-template`"
                )
            turns.append((asked, said))
    if not turns:
        return [[]]
    conversation, ends = turns[-1][1], [len(text) for turn in turns for text in turn]
    if ends != sorted(ends) or not all(conversation.startswith(said) for _, said in turns):
        return [[(asked, False), (said[len(asked) :], True)] for asked, said in turns]
    pairs = enumerate(itertools.pairwise([0, *ends]))
    return [[(conversation[start:end], index % 2 == 1) for index, (start, end) in pairs]]


def _ending(text: str) -> str:
    return text if len(text) <= 40 else "..." + text[-40:]


def _check_messages(messages: Any, field: str) -> None:
    if not isinstance(messages, list):
        raise ValueError(f"field '{field}' is {type(messages).__name__}, not a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {type(message).__name__}, not an object")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"message {number} has the role {message.get('role')!r}, not one of {quoted(ROLES)}"
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"the 'content' of message {number} is {type(content).__name__}, not text"
            )
