"""Text to token ids and back: the interface, and tokenizers of the `tokenizers` library.

The ids are those that `transformers` gives for the same files. `encode` makes no special tokens of
text: a document that contains `<|endoftext|>` is encoded letter by letter.
"""

import abc
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from train.text.special_tokens import is_marked, letters_of, pattern_of, split_marked

# `tokenizers` warns at each fork after its threads ran, unless this is set.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

CONFIG = "tokenizer_config.json"
_ALIAS = "\ufde0"
"""Encloses the number that stands for a special token while its name is letters elsewhere."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of a text.

    Attributes:
      ids: the ids.
      ends: for each id, the number of characters of the text up to its end.
    """

    ids: list[int]
    ends: list[int]


class Tokenizer(abc.ABC):
    """The interface of every tokenizer. Calls are safe from several threads.

    Attributes:
      vocab_size: the largest id plus one. Ids may have gaps.
      prefix: ids before each text; none if `transformers` adds none.
      suffix: ids that `transformers` adds after each text; usually none.
      eos_id: id that ends a document.
      bos_token: name of the first token of a document in templates, or None.
      eos_token: name of `eos_id`.
      special: names of the special tokens, by id.
      fingerprint: hexadecimal; equal for equal vocabularies and rules.
      source: files that it was read from, for messages.
      limit: ids from this one on are refused, because a model has no embedding for them; or None.
    """

    vocab_size: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    eos_id: int
    bos_token: str | None = None
    eos_token: str = ""
    special: Mapping[int, str] = types.MappingProxyType({})
    fingerprint: str
    source: str = ""
    limit: int | None = None

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without `prefix` and `suffix`."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of each text. Faster on several cores, for most tokenizers."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, text: str) -> Encoded:
        """Returns the ids of `text`, in which names of special tokens stand for these tokens.

        Names with a mark after each letter are letters, and are encoded without the marks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no names for special tokens.")

    def encode_with_special(self, text: str) -> list[int]:
        """Returns the ids of `encode_marked`."""
        return self.encode_marked(text).ids

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`, without special tokens; half a character gives U+FFFD."""

    @abc.abstractmethod
    def save(self, directory: pathlib.Path) -> None:
        """Writes the files that `load_tokenizer(directory)` and `transformers` read."""

    @property
    def bos_id(self) -> int | None:
        """The id before each text, or None."""
        return self.prefix[0] if self.prefix else None

    @property
    def between(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after each of several documents that follow one another.

        Where one token begins and ends documents, it stands once between two of them.
        """
        after = self.suffix or (self.eos_id,)
        return (() if self.prefix == after else self.prefix), after

    @property
    def dictated(self) -> tuple[int, ...]:
        """Ids that the construction of a stream of documents dictates: nothing learns them."""
        before, after = self.between
        return tuple(index for index in (*before, *after[1:]) if index != after[0])

    def describe(self) -> str:
        """Returns a line about the rules, for the user."""
        before = " ".join(map(self.shown, self.prefix)) or "nothing"
        after = " ".join(map(self.shown, self.between[1]))
        read = f" ({self.source})" if self.source else ""
        return (
            f"tokenizer of {self.vocab_size:,}{read}: {before} before a text, {after} after a"
            " document"
        )

    def shown(self, index: int) -> str:
        """Returns a token as messages show it: its name and its id."""
        return f"{self.special.get(index, '')} [{index}]".strip()

    def check(self, ids: Sequence[int]) -> None:
        """Raises a `ValueError` if an id is not below `limit`."""
        if self.limit is not None and ids and max(ids) >= self.limit:
            name = self.shown(max(ids))
            raise ValueError(
                f"it holds the token {name}, and the model has {self.limit:,} embeddings: remove it"
            )


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, such as byte-level BPE.

    Byte-level BPE restores any text exactly, unless it normalizes (Qwen's tokenizer composes
    Unicode by NFC).
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos: str,
        bos: str | None = None,
        prefix: Sequence[str] = (),
        suffix: Sequence[str] = (),
        source: str = "",
        files: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        """Takes a tokenizer and the roles of its special tokens.

        Args:
          inner: the tokenizer; its post-processor is not used.
          eos: name of the token that ends a document.
          bos: name of `bos_token` in templates.
          prefix: names of the tokens before each text.
          suffix: names of the tokens after each text.
          source: as for `Tokenizer`.
          files: texts of the files beside it that `save` keeps: its settings and chat template.
        """
        self._files = files
        inner.encode_special_tokens = True  # As text, despite the name.
        inner.no_truncation()
        inner.no_padding()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._saved = inner.to_str()
        self._inner = inner
        # It would cut spaces off the places of tokens.
        inner.post_processor = tokenizers.processors.Sequence([])
        self.eos_token, self.bos_token, self.source = eos, bos, source
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = vocabulary[eos]
        self.prefix = tuple(vocabulary[name] for name in prefix)
        self.suffix = tuple(vocabulary[name] for name in suffix)
        added = inner.get_added_tokens_decoder()
        self.special = {index: x.content for index, x in added.items() if x.special}
        self._loose = self._given_by_letters(added)
        begins = prefix[0] if prefix else None
        rules = json.dumps([self._saved, begins, eos, *(suffix and [suffix])])
        self.fingerprint = hashlib.sha256(rules.encode()).hexdigest()

    def _given_by_letters(self, added: Mapping[int, tokenizers.AddedToken]) -> frozenset[int]:
        """Returns the special tokens that not only their own names in a template may give.

        A name that is normalized has other spellings, and a model gives its pieces for any letters.
        """
        pieces = self._inner.get_vocab(with_added_tokens=False)
        normalized = {index for index in self.special if added[index].normalized}
        return frozenset(normalized | {pieces[x] for x in self.special.values() if x in pieces})

    @functools.cached_property
    def _unknown_id(self) -> int | None:
        """The id of letters that are not in the vocabulary, or None."""
        model = json.loads(self._saved)["model"]
        return model.get("unk_id", self._inner.token_to_id(model.get("unk_token") or ""))

    @property
    def base_size(self) -> int:
        """The largest id of the vocabulary without added tokens, plus one."""
        return max(self._inner.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast" leaves out the places of tokens in the text.
        with _in_one_line():
            encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            found = [one.ids for one in encoded]
            for i, ids in enumerate(found):
                if not self._loose.isdisjoint(ids):
                    found[i] = self._aliased[0].encode(texts[i], add_special_tokens=False).ids
        for ids in found:
            self.check(ids)
        return found

    def encode_marked(self, text: str) -> Encoded:
        if not is_marked(text):
            with _in_one_line():
                encoding = self._with_special.encode(text, add_special_tokens=False)
            if self._loose.isdisjoint(encoding.ids) or all(
                text[start:stop].strip() == self.special[index]
                for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
                if index in self._loose and index != self._unknown_id
            ):
                self.check(encoding.ids)
                return Encoded(encoding.ids, [end for _, end in encoding.offsets])
        inner, aliases = self._aliased
        letters, places, start = [], [], 0
        for part, is_token in split_marked(text, self._names):
            stop = start + len(part)
            if is_token:
                letters.append(aliases[part])
                places += [stop] * len(letters[-1])
            else:
                plain, ends = letters_of(part)
                if _ALIAS in plain:
                    raise ValueError("it holds the noncharacter U+FDE0 beside a mark: remove it")
                letters.append(plain)
                places += [start + end for end in ends]
            start = stop
        with _in_one_line():
            encoding = inner.encode("".join(letters), add_special_tokens=False)
        self.check(encoding.ids)
        ends = [places[end - 1] if end else 0 for _, end in encoding.offsets]
        return Encoded(encoding.ids, ends)

    @functools.cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        # A copy, since changing the setting would change it for other threads.
        inner = copy.deepcopy(self._inner)
        inner.encode_special_tokens = False
        return inner

    @functools.cached_property
    def _names(self):
        return pattern_of(self.special.values())

    @functools.cached_property
    def _aliased(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """A tokenizer with other names for the special tokens, and these names.

        So one text can hold a special token and the letters of its name, and no letters, in
        whatever spelling or as a piece of the vocabulary, are a special token.
        """
        aliases = {
            name: f"{_ALIAS}{number}{_ALIAS}" for number, name in enumerate(self.special.values())
        }
        state = json.loads(self._saved)
        state["post_processor"] = None  # It has the names too.
        for token in state["added_tokens"]:
            if token["content"] in aliases:
                token |= {"content": aliases[token["content"]], "normalized": False}
        _rename_pieces(state["model"], aliases)
        inner = tokenizers.Tokenizer.from_str(json.dumps(state))
        inner.no_truncation()
        inner.no_padding()
        return inner, aliases

    def shown(self, index: int) -> str:
        return f"{self._inner.id_to_token(index)} [{index}]"

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with _in_one_line():
            return self._inner.decode(list(map(int, ids)), skip_special_tokens=True)

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        inner = tokenizers.Tokenizer.from_str(self._saved)
        around = [[self.special[index] for index in ids] for ids in (self.prefix, self.suffix)]
        if any(around):
            inner.post_processor = _template(inner, *around)
        inner.save(str(directory / "tokenizer.json"))
        usual = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        names = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        config = {**usual, **json.loads(self._files.get(CONFIG, "{}")), **names}
        files = {**self._files, CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Turns errors of `tokenizers` into a `ValueError`, also panics, which are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer (`--tokenizer`, or of `--checkpoint`) fails on a text ({reason})"
        ) from error


def _rename_pieces(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Gives pieces of the vocabulary of a model other names, in place."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores.
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    if "merges" in model:
        pairs = [x.split(" ", 1) if isinstance(x, str) else x for x in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])
        ]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)


def _template(
    inner: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]
) -> tokenizers.processors.PostProcessor:
    """Returns the post-processor that adds tokens before and after each text."""
    single = " ".join([*before, "$A", *after])
    pair = f"{single} {' '.join([*before, '$B:1', *after])}"
    special = [(name, inner.token_to_id(name)) for name in dict.fromkeys([*before, *after])]
    return tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
