"""Texts to the ids that a model learns or continues: the same function in every program.

A prompt and its completion are encoded as one text, as they are in use. A token that holds letters
of both belongs to the completion.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.settings.data import SpecialTokens
from train.text.special_tokens import Marker
from train.text.tokenizer import Encoded, Tokenizer


class Written(NamedTuple):
    """A text to encode.

    Attributes:
      text: the text, with marks in names of special tokens that are content.
      learned: places in it that are learned, each from a letter up to another.
      is_chat: whether a chat template wrote it, which writes special tokens at both ends too.
    """

    text: str
    learned: Sequence[tuple[int, int]]
    is_chat: bool = False


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


class Encoder:
    """Encodes texts with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text") -> None:
        """Takes the tokenizer, and how special tokens in content are read."""
        self.tokenizer = tokenizer
        self.marker = Marker(tokenizer.special.values() if special_tokens == "text" else ())
        """Marks content; texts of templates are not given to it."""

    def prompt(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Returns the ids of a text to continue.

        Raises:
          ValueError: there are none.
        """
        before = () if is_chat else self.tokenizer.prefix
        ids = [*before, *self._marked(text).ids]
        if not ids:
            raise ValueError(
                "the prompt is empty, and the tokenizer has no start token: give some text."
            )
        return ids

    def continued(self, prompt: str, ending: str, *, is_chat: bool = False) -> tuple[list, list]:
        """Returns the ids of a prompt, and those of the ending after it, as `example` divides them.

        Raises:
          ValueError: there is no token before the ending.
        """
        written = Written(prompt + ending, [(len(prompt), len(prompt + ending))], is_chat)
        tokens, counted = self._encode(written)
        start = next((i for i, counts in enumerate(counted) if counts), len(tokens))
        if not 0 < start < len(tokens):
            raise ValueError("there is no token before the options: give a `--prompt-template`")
        return tokens[:start], tokens[start:]

    def example(self, written: Written, *, learn_all: bool = False) -> Example:
        """Returns a text as an example. Its end is learned too, unless it is a chat.

        Args:
          written: the text.
          learn_all: whether the whole text is learned.
        """
        tokens, counted = self._encode(written)
        if not written.is_chat:
            tokens = self._without_end(tokens)
            counted = counted[: len(tokens)]
            after = self.tokenizer.between[1]
            tokens += after
            counted += [True] + [False] * (len(after) - 1)
        mask = np.asarray(counted, np.bool_)
        if learn_all:
            mask = ~np.isin(tokens, self.tokenizer.dictated)
        mask[:1] = False
        return Example(np.asarray(tokens, np.int32), mask)

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Returns tokens without the one that ends the text, and spaces after it, if it is there.

        Texts that a template wrote may have their end, and one is added.
        """
        end = self.tokenizer.between[1][0]
        last = len(tokens) - 1 - tokens[::-1].index(end) if end in tokens else len(tokens)
        after = tokens[last + 1 :]
        is_space = not self.tokenizer.decode(after).strip()
        is_end = last > 0 and is_space and self.tokenizer.special.keys().isdisjoint(after)
        return tokens[:last] if is_end else tokens

    def _marked(self, text: str) -> Encoded:
        text.encode()  # Raises for lone surrogates, which some tokenizers accept.
        return self.tokenizer.encode_marked(text)

    def _encode(self, written: Written) -> tuple[list[int], list[bool]]:
        encoded = self._marked(written.text)
        before = [] if written.is_chat else list(self.tokenizer.prefix)
        ends = np.asarray(encoded.ends, np.int64)
        # Several tokens of one letter end, and so begin, at the same place.
        begins = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1] if len(ends) else ends
        for i in np.flatnonzero(ends[1:] == ends[:-1]) + 1:
            begins[i] = begins[i - 1]
        counted = np.zeros(len(ends), np.bool_)
        for start, stop in written.learned:
            counted |= (ends > start) & (begins < stop)
        return [*before, *encoded.ids], [False] * len(before) + counted.tolist()
