"""A tokenizer for tests: one token a byte."""

from train.text.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """A tokenizer of bytes with a separate token at the beginning of a document."""

    vocab_size, bos_id, eos_id, fingerprint = 258, 256, 257, "bytes"

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, directory):
        raise NotImplementedError
