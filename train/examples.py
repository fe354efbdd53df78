"""Examples to fine-tune on: records of JSON become tokens, and which of them the loss counts.

`open_examples` is the way in. A record is a prompt and its completion, a conversation that a chat
template writes out, or plain text; all end as the same thing, an `Example`. Everything is encoded
at once and held in memory, so whatever is wrong with a record is found before the first step.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from train.chat import ChatTemplate, open_chat_template
from train.corpus import unit_hash
from train.records import FieldTemplate, Record, field_of, quoted, read_records
from train.tokenizer import Tokenizer

Format = Literal["completion", "chat", "text"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTEXT = 64
"""Characters before a text that are encoded along with it: the name of any special token fits."""


@dataclasses.dataclass(frozen=True)
class ExampleConfig:
    """What is learnt from, and how records become examples."""

    data: str = ""
    """Records, and needed: a .jsonl file with a JSON object a line, a .json file with an array of
    them (or one a line), each of them also as .gz, or a folder of such files."""
    format: Literal["auto", "completion", "chat", "text"] = "auto"
    """completion (a prompt and what is to follow it), chat (messages, written out by the chat
    template), text (all of it is learnt), or auto: the first of chat, completion and text whose
    fields the first record has."""
    prompt_field: str = "prompt"
    """Field that {prompt} stands for in templates."""
    completion_field: str = "completion"
    """Field that {completion} stands for in templates."""
    messages_field: str = "messages"
    """Field of a conversation: a list of objects with `role` and `content`."""
    text_field: str = "text"
    """Field of plain text."""
    prompt_template: str = "{prompt}"
    r"""What a prompt is made of: a Python format string over the fields of the record, such as
    "Question: {question}\nAnswer:". \n stands for a new line, {{ for a brace, {options[0]} for the
    first of a list, {price:.2f} for two digits."""
    completion_template: str = "{completion}"
    """What a completion is made of, likewise. Nothing is put between the two: where the prompt ends
    without a space, begin with one, as in " {answer}". The end-of-text token follows."""
    chat_template: pathlib.Path | None = None
    """Jinja template of conversations, as Hugging Face has them, or a tokenizer_config.json with
    one. By default that of the tokenizer's folder."""
    validation: str | None = None
    """Records to validate on, as for `--data`. By default a share of those is held out."""
    held_out: float = 0.05
    """Share of the records to hold out where there is no `--validation`. A hash of the record
    decides, so that others that are added move none."""
    count_prompts: bool = False
    """Learn prompts, too, and in a chat what others than the assistant say. By default the loss
    counts completions, and what the assistant says."""
    long: Literal["cut", "drop"] = "cut"
    """What becomes of examples longer than a sequence: their end is cut off, or they are dropped
    whole."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"`--held-out` must be in (0, 1), got {self.held_out}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """Tokens that are learnt together.

    Attributes:
      tokens: ids, int32 [n].
      counted: whether the loss counts a token as a target, bool [n]. Never the first, which nothing
        predicts.
    """

    tokens: np.ndarray
    counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples to train on and examples held out: some of both, and in each a token counts."""

    name: str
    """What to call them in a log."""
    train: Sequence[Example]
    validation: Sequence[Example]
    cut: int
    """How many of both were longer than a sequence, and lost their end."""
    dropped: int
    """How many were left out: for their length, or because nothing in them counted, be it that the
    end that did was cut off."""
    fingerprint: str
    """Hexadecimal: a hash of all tokens, of what counts and of what is held out. Whatever shapes
    the examples shapes it, and nothing else does."""


def open_examples(
    config: ExampleConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    tokenizer_path: pathlib.Path | None = None,
) -> Examples:
    """Reads and encodes all records.

    Args:
      config: what to read, and how.
      tokenizer: of prompts and texts, which its `bos_id`, if any, leads and its `eos_id` ends. Of a
        conversation it encodes what the template wrote and puts nothing around it.
      seq_len: an example has at most a token more, since the last one is only a target.
      tokenizer_path: where the tokenizer was read, a folder or a file in it. A chat template is
        looked for there, unless `config` names one.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record or a template is not as it should be, or no example is left.
    """
    if seq_len < 1:
        raise ValueError(f"`--seq-len` is {seq_len}: give at least 1.")
    records = read_records(config.data, "--data")
    encode = _make_encoder(config, tokenizer, tokenizer_path, records[0])
    if config.validation is None:
        flag, source = "--data", config.data
        records, held_out = _hold_out(records, config)
    else:
        flag, source = "--validation", config.validation
        held_out = read_records(source, flag)
    train, validation = (
        _fit([example for record in part for example in encode(record)], seq_len + 1, config.long)
        for part in (records, held_out)
    )
    if not train.examples:
        _raise_nothing_left("--data", config.data, "train on", len(records), seq_len)
    if not validation.examples:
        _raise_nothing_left(flag, source, "validate on", len(held_out), seq_len)
    return Examples(
        name=pathlib.Path(config.data).name,
        train=train.examples,
        validation=validation.examples,
        cut=train.cut + validation.cut,
        dropped=train.dropped + validation.dropped,
        fingerprint=_fingerprint(train.examples, validation.examples),
    )


def _raise_nothing_left(flag: str, data: str, use: str, count: int, seq_len: int) -> NoReturn:
    raise ValueError(
        f"`{flag}` is '{data}': of {count} record(s) to {use}, all were dropped: no token that "
        f"counts (of a completion, or of what an assistant says) is within `--seq-len` {seq_len}, "
        "or `--long drop` took them. Raise `--seq-len`, or give other records."
    )


# --- Records become texts, texts become tokens. ---


Pieces = list[tuple[str, bool]]
"""Texts that follow one another, and whether each is something to learn."""


def _make_encoder(
    config: ExampleConfig,
    tokenizer: Tokenizer,
    tokenizer_path: pathlib.Path | None,
    first: Record,
) -> Callable[[Record], list[Example]]:
    """Returns what makes the examples of a record: one, but for conversations that need several."""
    aliases = {"prompt": config.prompt_field, "completion": config.completion_field}
    prompt = FieldTemplate("--prompt-template", config.prompt_template, aliases)
    completion = FieldTemplate("--completion-template", config.completion_template, aliases)
    encode, after = tokenizer.encode, [tokenizer.eos_id]
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    write: Callable[[dict[str, Any]], list[Pieces]]
    match _format_of(config, first, prompt.fields | completion.fields):
        case "completion":
            write = functools.partial(_write_completion, prompt=prompt, completion=completion)
        case "text":
            write = functools.partial(_write_text, field=config.text_field)
        case "chat":
            template = open_chat_template(config.chat_template, tokenizer_path, tokenizer)
            write = functools.partial(_write_chat, field=config.messages_field, template=template)
            # The template writes special tokens, also at both ends.
            encode, before, after = tokenizer.encode_with_special, [], []

    def examples_of(record: Record) -> list[Example]:
        return [
            _encode(pieces, encode, before, after, config.count_prompts)
            for pieces in write(record.fields)
        ]

    return lambda record: record.apply(examples_of)


def _format_of(config: ExampleConfig, first: Record, fields: set[str]) -> Format:
    """Returns what the first record is, unless `config` says so; templates need `fields`."""
    if config.format != "auto":
        return config.format
    if config.messages_field in first.fields:
        return "chat"
    if fields <= first.fields.keys():
        return "completion"
    if config.text_field in first.fields:
        return "text"
    raise ValueError(
        f"{first.where} has the fields {quoted(first.fields)}: neither '{config.messages_field}',"
        f" a conversation, nor {quoted(sorted(fields))}, a prompt and its completion, nor "
        f"'{config.text_field}', a text. Name them by `--messages-field`, `--prompt-field` and "
        "`--completion-field`, or `--text-field`; or give `--prompt-template` and "
        "`--completion-template`."
    )


def _encode(
    pieces: Pieces,
    encode: Callable[[str], list[int]],
    before: list[int],
    after: list[int],
    count_all: bool,
) -> Example:
    """Encodes piece after piece: a prompt has the tokens that it has where nothing follows it."""
    tokens, counted, previous = [*before], [False] * len(before), ""
    for text, counts in pieces:
        text.encode()  # Raises where the text is none, which tokenizers do not all say.
        new = _encode_rest(text, previous, encode)
        tokens += new
        counted += [counts or count_all] * len(new)
        previous = text or previous
    tokens += after
    counted += [True] * len(after)
    counted[:1] = [False] * len(tokens[:1])
    return Example(np.asarray(tokens, np.int32), np.asarray(counted, np.bool_))


def _encode_rest(text: str, previous: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the ids of `text` where `previous` stands before it, whose own ids stay as they are.

    The end of a text may matter to the next: sentencepiece puts a space in front of all that it
    encodes, and so do some tokenizers after each special token. So the two are encoded together, or
    where a token would then cross from one into the other, as after a space, the second behind a
    line break.
    """
    for end in (previous[-_CONTEXT:], "\n") if previous else ():
        known, both = encode(end), encode(end + text)
        if both[: len(known)] == known:
            return both[len(known) :]
    return encode(text)


class _Fitted(NamedTuple):
    examples: list[Example]
    cut: int
    dropped: int


def _fit(examples: list[Example], longest: int, long: Literal["cut", "drop"]) -> _Fitted:
    """Returns the examples of at most `longest` tokens in which a token counts."""
    kept, cut = [], 0
    for example in examples:
        is_long = len(example.tokens) > longest
        if not (is_long and long == "drop") and example.counted[:longest].any():
            if is_long:  # Copies: of a slice, all that was cut off would stay in memory.
                example = Example(example.tokens[:longest].copy(), example.counted[:longest].copy())
                cut += 1
            kept.append(example)
    return _Fitted(kept, cut, len(examples) - len(kept))


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
    """Splits records by a hash of what is in them: copies stay together, and both sides get one."""
    hashes = [unit_hash(json.dumps(x.fields, sort_keys=True).encode()) for x in records]
    values = sorted(set(hashes))
    if len(values) < 2:
        raise ValueError(
            f"`--data` is '{config.data}': it has {len(records)} record(s), all the same, and one "
            "is to be held out. Give others, or name a file to validate on by `--validation`."
        )
    bound = min(max(config.held_out, values[0]), values[-2])
    return (
        [x for x, value in zip(records, hashes, strict=True) if value > bound],
        [x for x, value in zip(records, hashes, strict=True) if value <= bound],
    )


def _write_completion(
    fields: Mapping[str, Any], prompt: FieldTemplate, completion: FieldTemplate
) -> list[Pieces]:
    return [[(prompt.fill(fields), False), (completion.fill(fields), True)]]


def _write_text(fields: Mapping[str, Any], field: str) -> list[Pieces]:
    text = field_of(fields, field)
    if not isinstance(text, str):
        raise ValueError(f"field '{field}' is {type(text).__name__}, not text")
    return [[(text, True)]]


def _write_chat(fields: Mapping[str, Any], field: str, template: ChatTemplate) -> list[Pieces]:
    """Returns a conversation up to the last turn of the assistant, whose turns are to be learnt.

    A turn is what its message adds to the text that asks for it. Some templates write earlier turns
    otherwise once others follow, such as Qwen 3's, which drops what was thought. Then each turn
    gets an example of its own, with all that stands before it as it is there when it is asked for.
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
                    f"the chat template does not go on from {_ending(asked)!r}, which asks for "
                    f"message {index + 1}, but writes it after {_ending(said[: len(asked)])!r}: "
                    "what the assistant says cannot be told from the rest. Another "
                    "`--chat-template` may not do so"
                )
            turns.append((asked, said))
    if not turns:
        return [[]]
    whole, ends = turns[-1][1], [len(text) for turn in turns for text in turn]
    if ends != sorted(ends) or not all(whole.startswith(said) for _, said in turns):
        return [[(asked, False), (said[len(asked) :], True)] for asked, said in turns]
    pairs = enumerate(itertools.pairwise([0, *ends]))
    return [[(whole[start:end], index % 2 == 1) for index, (start, end) in pairs]]


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
