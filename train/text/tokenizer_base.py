"""The interface of every tokenizer."""

import abc
import pathlib
from collections.abc import Sequence

import numpy as np


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
