"""The tokenizer of llama2.c (Karpathy, 2023): pieces and scores of sentencepiece, in one file.

It merges by scores over the whole text, where sentencepiece has rules of its own about words.
"""

import hashlib
import heapq
import pathlib
import re
import struct
from collections.abc import Sequence

import numpy as np

from train.tokenizer_base import Tokenizer

_BOS, _EOS = 1, 2
_FIRST_BYTE = 3
"""Id of the byte 0. The 256 bytes follow the three special pieces."""
_FIRST_PIECE = _FIRST_BYTE + 256
_RECORD = struct.Struct("<fi")


class Llama2cTokenizer(Tokenizer):
    """Byte-pair encoding of llama2.c's `run.c`.

    A space is put before the text, characters that are no piece become their bytes, and of all
    neighbours that are a piece together the pair of the highest score is merged, the first of
    equals, until there is none.
    """

    def __init__(self, data: bytes) -> None:
        """Reads a file.

        Args:
          data: a `tokenizer.bin`.

        Raises:
          ValueError: no such file, or one that is cut off.
        """
        self._data = data
        self._pieces, self._scores = _read(data)
        # What text can become: no special piece, nor a byte by its name. Of equals the first.
        ordinary = range(_FIRST_PIECE, len(self._pieces))
        self._ids = {self._pieces[i]: i for i in reversed(ordinary)}
        if b" " not in self._ids:
            raise ValueError("it has no piece for a space, which is put before each text.")
        self.vocab_size = len(self._pieces)
        self.bos_id, self.eos_id = _BOS, _EOS
        # As sentencepiece names them: the file has line breaks around them.
        self.bos_token, self.eos_token = "<s>", "</s>"
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        ids = [self._ids[b" "]]
        for character in text:
            piece = character.encode()
            # A C string ends at a zero byte: as a byte it is kept.
            known = self._ids.get(piece)
            ids += [byte + _FIRST_BYTE for byte in piece] if known is None else [known]
        return self._merged(ids)

    def encode_with_special(self, text: str) -> list[int]:
        # What is between two of them is encoded as a text of its own, as Llama 2's own code does.
        ids = []
        for part in re.split("(</?s>)", text):
            ids += {"<s>": [_BOS], "</s>": [_EOS]}.get(part) or self.encode(part)
        return ids

    def _merged(self, ids: list[int]) -> list[int]:
        """Returns ids after all merges, in n log n steps where `run.c` looks at all pairs anew."""
        end = len(ids)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))
        waiting: list[tuple[float, int, int, int, int]] = []

        def consider(i: int) -> None:
            """Puts the pair that begins at a place in line, if it is a piece together."""
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
            # One of the two may have been merged in the meantime: -1 is what is gone.
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
            # The space that was put before the text.
            text += piece.removeprefix(b" ") if begins else piece
            begins = False
        return text.decode(errors="replace")

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.bin").write_bytes(self._data)


def _read(data: bytes) -> tuple[list[bytes], list[float]]:
    """Returns the pieces, in the order of their ids, and their scores."""
    if len(data) < 4:
        raise ValueError(f"it has {len(data)} bytes: no tokenizer of llama2.c.")
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
                f"it is cut off at piece {len(pieces)}, or no tokenizer of llama2.c: copy it again."
            )
        pieces.append(data[offset : offset + size])
        offset += size
    names = [b"<0x%02X>" % byte for byte in range(256)]
    if pieces[_FIRST_BYTE:_FIRST_PIECE] != names:
        raise ValueError(
            f"its pieces {_FIRST_BYTE} to {_FIRST_PIECE - 1} are not the 256 bytes: no tokenizer of"
            " llama2.c."
        )
    return pieces, scores
