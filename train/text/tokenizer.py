"""Text to token ids and back: one small interface over `tokenizers` and `sentencepiece`.

`encode` never makes special tokens of text: a document that contains `<|endoftext|>` is encoded
letter by letter, and the caller adds `bos_id` and `eos_id`. `encode_with_special` is for the text
of chat templates, which contains the names of special tokens.
"""

import abc
import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from models.folders import scratch_folder
from train.text.corpus import Corpus

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
KNOWN_BOS = ("<s>", "<|begin_of_text|>", "<bos>")
ACCEPTED = (
    "a tokenizer.json, a sentencepiece .model file, or a folder with one of these, or with "
    "vocab.json and merges.txt"
)
TRAINING_CHARS = 10_000_000
"""Characters that `default_tokenizer` trains on. On the standard library, three times as many make
the validation text about 1% shorter in tokens, and training takes three times as long."""
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizers` warns at each fork after its threads ran, unless this is set.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class Tokenizer(abc.ABC):
    """The interface of every tokenizer. Calls are safe from several threads.

    Attributes:
      vocab_size: the largest id plus one. Ids may have gaps.
      bos_id: id before each document; None if the vocabulary has none.
      eos_id: id after each document.
      bos_token: name of `bos_id` in templates, or None.
      eos_token: name of `eos_id`.
      fingerprint: hexadecimal; equal for equal vocabularies and rules.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    bos_token: str | None
    eos_token: str
    fingerprint: str

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without `bos_id` and `eos_id`."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of each text. Faster on several cores, for most tokenizers."""
        return [self.encode(text) for text in texts]

    def encode_with_special(self, text: str) -> list[int]:
        """Returns the ids of `text`, in which names of special tokens stand for these tokens.

        For text whose author means them so, such as that of a chat template.
        """
        raise NotImplementedError(f"{type(self).__name__} has no names for special tokens.")

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`, without special tokens; half a character gives U+FFFD."""

    @abc.abstractmethod
    def save(self, directory: pathlib.Path) -> None:
        """Writes the files that `load_tokenizer(directory)` reads."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, such as byte-level BPE.

    Byte-level BPE restores any text exactly, unless it normalizes (Qwen's tokenizer composes
    Unicode by NFC).
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, eos: str, bos: str | None = None) -> None:
        inner.encode_special_tokens = True  # As text, despite the name.
        inner.no_truncation()
        inner.no_padding()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner, self.eos_token, self.bos_token = inner, eos, bos
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = vocabulary[eos]
        self.bos_id = None if bos is None else vocabulary[bos]
        rules = json.dumps([inner.to_str(), bos, eos])
        self.fingerprint = hashlib.sha256(rules.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast" leaves out the places of tokens in the text.
        return [x.ids for x in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_special(self, text: str) -> list[int]:
        return self._with_special.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        # A copy, since changing the setting would change it for other threads.
        inner = copy.deepcopy(self._inner)
        inner.encode_special_tokens = False
        return inner

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._inner.decode(list(map(int, ids)), skip_special_tokens=True)

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._inner.save(str(directory / "tokenizer.json"))
        config = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of the `sentencepiece` library, such as Llama 2's.

    It restores a text exactly if its model neither normalizes nor lacks characters. Llama 2's model
    does neither: it falls back to bytes.
    """

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._inner = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._inner.vocab_size()
        self.bos_id = self._inner.bos_id() if self._inner.bos_id() >= 0 else None
        self.eos_id = self._inner.eos_id()
        self.bos_token = None if self.bos_id is None else self._inner.id_to_piece(self.bos_id)
        if self.eos_id < 0:
            raise ValueError("its model has no end-of-sentence piece. Train it with one (eos_id).")
        self.eos_token = self._inner.id_to_piece(self.eos_id)
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode(list(texts), out_type=int, num_threads=os.cpu_count())

    def encode_with_special(self, text: str) -> list[int]:
        """Encodes the parts between special tokens one by one, as in Llama 2's code."""
        ids = []
        pattern = "|".join(map(re.escape, self._special))
        for part in re.split(f"({pattern})", text):
            index = self._special.get(part)
            ids += self.encode(part) if index is None else [index]
        return ids

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        indices = filter(self._inner.is_control, range(self.vocab_size))
        return {self._inner.id_to_piece(index): index for index in indices}

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._inner.decode(list(map(int, ids)))

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.model").write_bytes(self._model)


def load_tokenizer(path: pathlib.Path | str) -> Tokenizer:
    """Reads a tokenizer: a tokenizer.json, a sentencepiece .model file, or the folder of one.

    A folder may instead have `vocab.json` and `merges.txt`, the latter with or without its
    `#version` line. A `tokenizer_config.json` next to the file names the tokens that begin and end
    a document; without it, the usual names are tried.

    Raises:
      FileNotFoundError: the path does not exist, or the folder has no tokenizer.
      ValueError: a file is damaged, or no token ends a document.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"`--tokenizer` is '{path}': no such path. Give {ACCEPTED}.")
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        files = [path / name for name in names if (path / name).exists()]
        if not files:
            there = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
            raise FileNotFoundError(f"`--tokenizer` is '{path}': it has {there}. Give {ACCEPTED}.")
        path = files[0]
    try:
        if path.suffix == ".model":
            return SentencePieceTokenizer(path.read_bytes())
        if path.suffix == ".bin":
            raise ValueError(
                "a tokenizer of llama2.c is no longer read. Give the sentencepiece .model file that"
                " it was exported from."
            )
        if path.name in ("vocab.json", "merges.txt"):
            return _load_vocab_and_merges(path.parent)
        return _with_special_tokens(tokenizers.Tokenizer.from_file(str(path)), path.parent)
    except ValueError as error:
        raise ValueError(f"`--tokenizer` is '{path}': {error}") from error
    except Exception as error:  # `tokenizers` raises only `Exception`.
        reason = " ".join(str(error).split())  # It may have several lines.
        raise ValueError(
            f"`--tokenizer` is '{path}': it cannot be read ({reason}). It may be truncated or of "
            f"another kind. Give {ACCEPTED}."
        ) from error


def tokenizer_of(checkpoint: pathlib.Path, path: pathlib.Path | None) -> Tokenizer:
    """Returns the tokenizer of a path, or that of the checkpoint if there is no path.

    Raises:
      ValueError: the checkpoint has no tokenizer, or it is damaged.
      OSError: a file that cannot be read.
    """
    if path is not None:
        return load_tokenizer(path)
    try:
        return load_tokenizer(checkpoint)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`--checkpoint` {checkpoint} has no tokenizer: pass `--tokenizer`: {ACCEPTED}."
        ) from error


def check_vocabulary(tokenizer: Tokenizer, model: str, vocab_size: int) -> None:
    """Raises a `ValueError` unless a model has an embedding for every token."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {model} has {vocab_size}:"
            " `--tokenizer` belongs to another model."
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns byte-level BPE trained on `texts`. Its only special token ends a document.

    The same texts give the same merges. The vocabulary is smaller than `vocab_size` if the texts
    have too few pairs to merge.

    Raises:
      ValueError: `vocab_size` is too small for the 256 bytes and the special token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"`--vocab-size` is {vocab_size}: at least {len(alphabet) + 1} are needed, one for "
            "each byte and one for the end of a document."
        )
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(iter(texts), trainer)
    return HuggingFaceTokenizer(inner, eos=END_OF_TEXT)


def default_tokenizer(corpus: Corpus, vocab_size: int, data_dir: pathlib.Path) -> Tokenizer:
    """Returns BPE trained on the corpus, from `data_dir` if it was trained before.

    It is trained on evenly spaced documents of the train split, about `TRAINING_CHARS` characters.
    The copy in `data_dir` belongs to this corpus and vocabulary size, and is written atomically.
    """
    final = data_dir / "tokenizers" / f"bpe-{vocab_size}-{corpus.fingerprint[:16]}"
    if not final.exists():
        trained = train_bpe(_sample(corpus.train), vocab_size)
        final.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(final.parent, ".training-") as scratch:
            trained.save(scratch / "tokenizer")
            with contextlib.suppress(OSError):  # Another process was faster.
                os.rename(scratch / "tokenizer", final)
    return load_tokenizer(final)


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Yields evenly spaced documents of about `TRAINING_CHARS` characters, or all documents."""
    probe = [len(texts[i]) for i in range(0, len(texts), -(-len(texts) // 100))]
    expected = len(texts) * sum(probe) / len(probe)
    step = max(1, math.ceil(expected / TRAINING_CHARS))
    seen = 0
    for index in range(0, len(texts), step):
        if seen >= TRAINING_CHARS:  # The probed documents were short.
            return
        text = texts[index]
        seen += len(text)
        yield text


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Returns a tokenizer over bytes that splits words as GPT-2 does."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _load_vocab_and_merges(directory: pathlib.Path) -> Tokenizer:
    for name in ("vocab.json", "merges.txt"):
        if not (directory / name).exists():
            raise ValueError(f"there is no {name} next to it. Both files are needed.")
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    inner = _byte_level(models.BPE(vocabulary, _read_merges(directory / "merges.txt")))
    config = _read_config(directory)
    if config.get("tokenizer_class", "").startswith("Qwen2Tokenizer"):
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_PATTERN), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    _add_tokens(inner, config.get("added_tokens_decoder", {}))
    return _with_special_tokens(inner, directory)


def _read_merges(path: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the pairs in `path`, in order, without a first line `#version...`."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line and not (number == 1 and line.startswith("#version")):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise ValueError(f"merges.txt line {number} is {line!r}: two tokens are needed.")
            pairs.append(pair)
    return pairs


def _add_tokens(inner: tokenizers.Tokenizer, added: dict[str, Any]) -> None:
    """Adds the tokens of a `tokenizer_config.json`. Each must get its listed id."""
    for index, token in sorted(added.items(), key=lambda item: int(item[0])):
        options = ("single_word", "lstrip", "rstrip", "normalized", "special")
        wanted = {name: token[name] for name in options if name in token}
        inner.add_tokens([tokenizers.AddedToken(token["content"], **wanted)])
        got = inner.token_to_id(token["content"])
        if got != int(index):
            raise ValueError(
                f"tokenizer_config.json gives {token['content']!r} the id {index}, but after the "
                f"vocabulary it is {got}. The two files belong to different tokenizers."
            )


def _with_special_tokens(inner: tokenizers.Tokenizer, directory: pathlib.Path) -> Tokenizer:
    config = _read_config(directory)
    eos = _token(config, "eos_token") or _first(inner, KNOWN_EOS)
    # A configuration without bos_token, such as Qwen's, means that there is no such token.
    bos = _token(config, "bos_token") if config else _first(inner, KNOWN_BOS)
    if eos is None:
        raise ValueError(
            f"no token ends a document: none of {', '.join(KNOWN_EOS)} is in its vocabulary. Name "
            "the token as eos_token in a tokenizer_config.json next to it."
        )
    for name, token in (("eos_token", eos), ("bos_token", bos)):
        if token is not None and inner.token_to_id(token) is None:
            raise ValueError(f"its {name} {token!r} is not in its vocabulary. Correct it.")
    return HuggingFaceTokenizer(inner, eos=eos, bos=bos)


def _first(inner: tokenizers.Tokenizer, names: Sequence[str]) -> str | None:
    return next((name for name in names if inner.token_to_id(name) is not None), None)


def _token(config: dict[str, Any], name: str) -> str | None:
    token = config.get(name)
    return token["content"] if isinstance(token, dict) else token


def _read_config(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
