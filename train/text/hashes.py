"""Hashes of text: which of it is held out, and whether a run resumes on the same."""

import hashlib
from collections.abc import Iterable

HELD_OUT = 0.02
"""Share of the documents to hold out of text without a validation split."""


def unit_hash(data: bytes) -> float:
    """Returns a number in [0, 1) that depends only on `data`."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48


def digest_of(texts: Iterable[str]) -> str:
    """Returns a hash of the texts and their lengths."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
