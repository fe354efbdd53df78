"""The tokenizer of llama2.c (Karpathy, 2023): pieces and scores of sentencepiece in one file.

It merges over the whole text; sentencepiece has further rules about words.
"""

import hashlib
import heapq
import pathlib
import re
import struct
from collections.abc import Sequence

import numpy as np

from train.text.tokenizer_base import Tokenizer

_BOS, _EOS = 1, 2
_FIRST_BYTE = 3
"""Id of the byte 0. The 256 bytes follow the three special pieces."""
_FIRST_PIECE = _FIRST_BYTE + 256
_RECORD = struct.Struct("<fi")


class Llama2cTokenizer(Tokenizer):
    """Byte-pair encoding of llama2.c's `run.c`.

    Adds a space before the text, and replaces characters outside the vocabulary by their bytes.
    Then it merges, until no merge is possible, the two neighbouring pieces whose union is the piece
    with the highest score; the first of equal pairs.
    """

    def __init__(self, data: bytes) -> None:
        """Reads a file.

        Args:
          data: contents of a `tokenizer.bin`.

        Raises:
          ValueError: another format, or a truncated file.
        """
        self._data = data
        self._pieces, self._scores = _read(data)
        # Text never becomes a special piece, nor a byte by its name. The first of equals counts.
        ordinary = range(_FIRST_PIECE, len(self._pieces))
        self._ids = {self._pieces[i]: i for i in reversed(ordinary)}
        if b" " not in self._ids:
            raise ValueError("it has no piece for a space, which comes before each text.")
        self.vocab_size = len(self._pieces)
        self.bos_id, self.eos_id = _BOS, _EOS
        # The names of sentencepiece. In the file they have line breaks around them.
        self.bos_token, self.eos_token = "<s>", "</s>"
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        ids = [self._ids[b" "]]
        for character in text:
            piece = character.encode()
            # In C a string ends at a zero byte. Here it becomes a byte like others.
            known = self._ids.get(piece)
            ids += [byte + _FIRST_BYTE for byte in piece] if known is None else [known]
        return self._merged(ids)

    def encode_with_special(self, text: str) -> list[int]:
        # The parts between special tokens are encoded one by one, as in Llama 2's code.
        ids = []
        for part in re.split("(</?s>)", text):
            ids += {"<s>": [_BOS], "</s>": [_EOS]}.get(part) or self.encode(part)
        return ids

    def _merged(self, ids: list[int]) -> list[int]:
        """Returns ids after all merges, in O(n log n); `run.c` scans all pairs for each merge."""
        end = len(ids)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))
        waiting: list[tuple[float, int, int, int, int]] = []

        def consider(i: int) -> None:
            """Queues the pair that begins at a place, if their union is a piece."""
            if i < 0 or after[i] == end:
                return
            left, right = ids[i], ids[after[i]]
            merged = self._ids.get(self._pieces[left] + self._pieces[right])
            if merged is not None:
                heapq.heappush(waiting, (-self._scores[merged], i, left, right, merged))

        for i in range(end - 1):
            consider(i)
        while waiting:
            _, i, left, right, merged = heapq.heappop(waiting)
            j = after[i]
            # One of the two may have been merged since; -1 marks a piece that is gone.
            if ids[i] != left or j == end or ids[j] != right:
                continue
            ids[i], ids[j] = merged, -1
            after[i] = after[j]
            if after[i] < end:
                before[after[i]] = i
            consider(before[i])
            consider(i)
        return [index for index in ids if index >= 0]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        text, begins = bytearray(), True
        for index in map(int, ids):
            if index < _FIRST_BYTE:
                begins = begins or index == _BOS
                continue
            piece = self._pieces[index]
            if index < _FIRST_PIECE:
                piece = bytes([index - _FIRST_BYTE])
            # Remove the space before the text.
            text += piece.removeprefix(b" ") if begins else piece
            begins = False
        return text.decode(errors="replace")

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.bin").write_bytes(self._data)


def _read(data: bytes) -> tuple[list[bytes], list[float]]:
    """Returns the pieces, in the order of their ids, and their scores."""
    if len(data) < 4:
        raise ValueError(f"it has {len(data)} bytes: not a tokenizer of llama2.c.")
    longest = struct.unpack_from("<i", data)[0]
    pieces, scores, offset = [], [], 4
    while offset < len(data):
        size = -1
        if offset + _RECORD.size <= len(data):
            score, size = _RECORD.unpack_from(data, offset)
            scores.append(score)
        offset += _RECORD.size
        if not 0 <= size <= longest or offset + size > len(data):
            raise ValueError(
                f"it ends within piece {len(pieces)}, or is not a tokenizer of llama2.c: copy it"
                " again."
            )
        pieces.append(data[offset : offset + size])
        offset += size
    names = [b"<0x%02X>" % byte for byte in range(256)]
    if pieces[_FIRST_BYTE:_FIRST_PIECE] != names:
        raise ValueError(
            f"its pieces {_FIRST_BYTE} to {_FIRST_PIECE - 1} are not the 256 bytes: not a tokenizer"
            " of llama2.c."
        )
    return pieces, scores
