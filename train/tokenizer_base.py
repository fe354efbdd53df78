"""The interface of every tokenizer."""

import abc
import pathlib
from collections.abc import Sequence

import numpy as np


class Tokenizer(abc.ABC):
    """What every tokenizer does. Calls are safe from several threads.

    Attributes:
      vocab_size: every id is below it. (Ids may have gaps: this is the largest id plus one.)
      bos_id: put in front of each document, or `None` where the vocabulary has no such token.
      eos_id: put after each document.
      bos_token: the name of `bos_id`, which templates write; or `None`.
      eos_token: the name of `eos_id`.
      fingerprint: hexadecimal; the same vocabulary and rules give the same one.
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

    def encode_with_special(self, text: str) -> list[int]:
        """Returns the ids of `text`, in which the name of a special token stands for that token.

        Only for text whose author means them so, such as a chat template.
        """
        raise NotImplementedError(f"{type(self).__name__} has no names for special tokens.")

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`. Special tokens give nothing, half a character gives U+FFFD."""

    @abc.abstractmethod
    def save(self, directory: pathlib.Path) -> None:
        """Writes what `load_tokenizer(directory)` needs."""
