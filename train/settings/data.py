"""The text to pretrain on, and the records to fine-tune on."""

import dataclasses
import pathlib
from typing import Literal

Format = Literal["completion", "chat", "text", "alpaca", "preference"]
SpecialTokens = Literal["text", "parse"]
MOST_TOKENS = 2**24
"""Largest vocabulary that is trained: training one takes about 60 bytes a token."""
MOST_PAIRS = 32
"""Most pairs of preference in a row of a batch: a step has a place for each."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to train on, and its tokenizer.

    Raises:
      ValueError: settings that exclude each other.
    """

    data: str = "stdlib"
    """stdlib (the sources of Python's standard library, present on every machine), a path to text,
    jsonl or parquet (a file or a folder), or the name of a TFDS data set prepared in `--data-dir`,
    such as c4/en."""
    data_dir: pathlib.Path = pathlib.Path("~/.cache/actjax")
    """Folder of prepared data sets and trained tokenizers."""
    text_field: str = "text"
    """Field of jsonl records, or column of tables, that holds the text."""
    special_tokens: SpecialTokens = "text"
    """Names of special tokens, such as <|endoftext|>, in the text: text (letters) or parse (these
    tokens)."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, or a folder with vocab.json and merges.txt. Default:
    a byte-level BPE that is trained on the text and kept in `--data-dir`."""
    vocab_size: int = 8192
    """Vocabulary size of the tokenizer that is trained when `--tokenizer` is not given."""

    def __post_init__(self) -> None:
        if self.vocab_size > MOST_TOKENS:
            raise ValueError(
                f"`--vocab-size` must be at most {MOST_TOKENS:,}, got {self.vocab_size:,}."
            )
        if self.tokenizer is not None and self.vocab_size != DataConfig.vocab_size:
            raise ValueError(
                f"`--vocab-size {self.vocab_size}` has no effect with `--tokenizer`, which has a"
                " vocabulary: drop one."
            )


@dataclasses.dataclass(frozen=True)
class ExampleConfig:
    """The records to learn from, and how they become examples.

    Raises:
      ValueError: a setting is out of range, or has no effect.
    """

    data: tuple[str, ...] = ()
    """Required: the records. A .jsonl file with one JSON object per line, a .json file with an
    array of objects (or one object per line), either of them also as .gz, a .parquet or .arrow
    file, or a folder of such files. Several with weights, such as a.jsonl:0.7 b.jsonl:0.3, are
    drawn in these shares."""
    format: Literal["auto", "completion", "chat", "text", "alpaca"] = "auto"
    """completion (a prompt and its completion), chat (messages, for the chat template; ShareGPT's
    form too), alpaca (instruction, input and output) or text (all of it is learned). auto: that of
    the flags below that are given, else the first of chat, completion, alpaca and text whose fields
    the first record has."""
    prompt_field: str = "prompt"
    """Field of the prompt; {prompt} in templates."""
    completion_field: str = "completion"
    """Field of the completion; {completion} in templates."""
    messages_field: str = "messages"
    """Field of a conversation: a list of objects with `role` and `content`."""
    text_field: str = "text"
    """Field of plain text."""
    prompt_template: str = "{prompt}"
    r"""The prompt: a Python format string over the fields of the record, for example
    "Question: {question}\nAnswer:". \n is a new line, {{ a brace, {options[0]} the first element
    of a list, and {price:.2f} has two digits."""
    completion_template: str = "{completion}"
    """The completion, in the same form. Prompt and completion are joined without a space: if the
    prompt ends without one, begin with one, as in " {answer}". The end-of-text token follows."""
    template_argument: tuple[str, ...] = ()
    """Arguments of the chat template, such as enable_thinking=false. A record may have its own as
    `chat_template_kwargs`."""
    special_tokens: SpecialTokens = "text"
    """Names of special tokens, such as <|im_end|>, in the texts of records: text (letters) or parse
    (these tokens, for text that a template wrote). In templates they are tokens anyway."""
    skip_bad: bool = False
    """Skip records that cannot be read, and count them, instead of stopping at the first."""
    chat_template: pathlib.Path | None = None
    """Jinja template of conversations in Hugging Face's form, or a tokenizer_config.json with one.
    Default: the template in the folder of the tokenizer."""
    validation: str | None = None
    """Records to validate on, as for `--data`. Default: a share of `--data` is held out."""
    held_out: float = 0.05
    """Share of the records to hold out without `--validation`. A hash of each record decides, so
    that adding records does not move others; their places do if many are copies."""
    count_prompts: bool = False
    """Also learn prompts and, in a chat, messages of other roles. By default the loss counts
    completions and messages of the assistant."""
    long: Literal["cut", "drop"] = "cut"
    """Examples longer than a sequence: cut removes their end, drop removes them."""

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        if not 0 < self.held_out < 1:
            raise ValueError(f"`--held-out` must be in (0, 1), got {self.held_out}.")
        if self.validation is not None and self.held_out != ExampleConfig.held_out:
            raise ValueError(
                f"`--held-out {self.held_out}` has no effect with `--validation`: drop one."
            )
