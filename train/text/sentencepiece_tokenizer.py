"""Tokenizers of the `sentencepiece` library."""

import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import sentencepiece
from sentencepiece.sentencepiece_pb2 import SentencePieceText  # type: ignore[attr-defined]

from train.text.special_tokens import letters_of, pattern_of, split_marked
from train.text.tokenizer import CONFIG, Encoded, Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of the `sentencepiece` library, such as Llama 2's.

    It restores a text exactly if its model neither normalizes nor lacks characters. Llama 2's model
    does neither: it falls back to bytes.
    """

    def __init__(
        self,
        model: bytes,
        *,
        add_bos: bool = True,
        add_eos: bool = False,
        legacy: bool = True,
        source: str = "",
    ) -> None:
        """Reads a model.

        Args:
          model: content of the file.
          add_bos: whether its token for beginnings, if there is one, begins each text.
          add_eos: whether its token for ends ends each text.
          legacy: whether a text after a special token begins with a space, as at the beginning.
          source: as for `Tokenizer`.
        """
        self._model, self._legacy, self.source = model, legacy, source
        self._rules = {"add_bos_token": add_bos, "add_eos_token": add_eos, "legacy": legacy}
        self._inner = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._inner.vocab_size()
        self.eos_id = self._inner.eos_id()
        bos = self._inner.bos_id()
        self.bos_token = None if bos < 0 else self._inner.id_to_piece(bos)
        if self.eos_id < 0:
            raise ValueError("its model has no end-of-sentence piece. Train it with one (eos_id).")
        self.prefix = (bos,) if add_bos and bos >= 0 else ()
        self.suffix = (self.eos_id,) if add_eos else ()
        self.eos_token = self._inner.id_to_piece(self.eos_id)
        control = filter(self._inner.is_control, range(self.vocab_size))
        self.special = {index: self._inner.id_to_piece(index) for index in control}
        self.fingerprint = hashlib.sha256(model).hexdigest()
        if not self.prefix or self.suffix:
            rules = json.dumps([self.fingerprint, self.prefix, self.suffix])
            self.fingerprint = hashlib.sha256(rules.encode()).hexdigest()

    @property
    def base_size(self) -> int:
        """The size of the vocabulary."""
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode(list(texts), out_type=int, num_threads=os.cpu_count())

    def encode_marked(self, text: str) -> Encoded:
        """Encodes the parts between special tokens one by one, as `transformers` does."""
        ids: list[int] = []
        ends: list[int] = []
        start, index_of = 0, {name: index for index, name in self.special.items()}
        for part, is_token in split_marked(text, pattern_of(index_of)):
            if is_token:
                new = Encoded([index_of[part]], [len(part)])
            else:
                new = self._encode_part(part, begins=not ids or self._legacy)
            ids += new.ids
            ends += [start + end for end in new.ends]
            start += len(part)
        return Encoded(ids, ends)

    def _encode_part(self, part: str, *, begins: bool) -> Encoded:
        (letters, places), ahead = letters_of(part), "" if begins else "\n"
        data = self._inner.encode(ahead + letters, out_type="serialized_proto")
        pieces = SentencePieceText.FromString(data).pieces
        # The places of pieces are bytes.
        bytes_until = itertools.accumulate(len(letter.encode()) for letter in ahead + letters)
        until = {0: 0} | {size: i + 1 for i, size in enumerate(bytes_until)}
        ids, ends, end = [], [], len(ahead + letters)
        for piece in reversed(pieces):
            if piece.end > piece.begin:  # Others are the first bytes of the letter that follows.
                end = until.get(piece.end, end)
            if end > len(ahead) or begins:
                ids.append(piece.id)
                ends.append(places[end - len(ahead) - 1] if end > len(ahead) else 0)
        return Encoded(ids[::-1], ends[::-1])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._inner.decode(list(map(int, ids)))

    def save(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.model").write_bytes(self._model)
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **self._rules,
        }
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
