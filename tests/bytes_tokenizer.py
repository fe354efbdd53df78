"""A tokenizer for tests: one token a byte."""

from train.text.special_tokens import letters_of
from train.text.tokenizer import Encoded, Tokenizer


class Bytes(Tokenizer):
    """A tokenizer of bytes with a separate token at the beginning of a document."""

    vocab_size, prefix, eos_id, fingerprint = 258, (256,), 257, "bytes"

    def encode(self, text):
        return list(text.encode())

    def encode_marked(self, text):
        text, places = letters_of(text)
        ends = [end for letter, end in zip(text, places, strict=True) for _ in letter.encode()]
        return Encoded(self.encode(text), ends)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, directory):
        raise NotImplementedError
