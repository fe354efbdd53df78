"""Tries a tokenizer.json in a separate process with limits of time and memory.

The library `tokenizers` panics on some files, loops on others, and allocates any memory. That
process runs this module.
"""

import contextlib
import json
import pathlib
from typing import Any

import tokenizers

from train.text.limited import AtLimitError, Limited, serve

_TEXTS = (
    "".join(map(chr, range(32, 127))) + "\n\n\t  \r\n",
    "a" * 2_000,
    "The quick brown fox. " * 50,
    "0123456789 " * 50,
    "é ß ﬁ Ǆ e\u0301 Ω Ж ש ا ह ไ 語 한 😀 👩\u200d👩\u200d👧 \u200b \ufeff \u3000 \ufffd",
    "",
)


_TRIAL = Limited("train.text.tokenizer_trial", seconds=10, gib=4)


def wrong_with(path: pathlib.Path) -> str:
    """Returns why this process would not survive a tokenizer.json, after "it"; "" if it would.

    Letters without a token are accepted: a text that has them is refused when it is encoded.
    """
    try:
        reason = _TRIAL.ask(str(path.absolute()))
    except AtLimitError as error:
        return str(error)
    return reason and f"cannot be read ({reason}). It may be truncated or of another kind"


def _answer(path: str) -> str:
    """Returns the error that a tokenizer.json raises on some texts; "" for none."""
    try:
        inner = tokenizers.Tokenizer.from_file(path)
        inner.no_truncation()
        inner.no_padding()
        inner.to_str()  # It looks at every id below the largest one.
        for text in (*_TEXTS, *_patterns(json.loads(pathlib.Path(path).read_text("utf-8")))):
            # With what the post-processor adds, and without.
            for adds in (True, False):
                _pass(inner, text, adds)
    except MemoryError:
        raise
    except BaseException as error:  # A panic is no `Exception`.
        return " ".join(f"{error}".split()) or type(error).__name__
    return ""


def _pass(inner: tokenizers.Tokenizer, text: str, adds: bool) -> None:
    """Encodes a text and decodes it again."""
    with contextlib.suppress(Exception):
        inner.decode(inner.encode(text, add_special_tokens=adds).ids)


def _patterns(state: Any) -> list[str]:
    """Returns texts that parts of a tokenizer replace."""
    if isinstance(state, list):
        return [x for part in state for x in _patterns(part)]
    if not isinstance(state, dict):
        return []
    pattern = state.get("pattern")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    names = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")
    inner = [x for name in names for x in _patterns(state.get(name))]
    return [found, *inner] if isinstance(found, str) else inner


if __name__ == "__main__":
    serve(_answer)
