"""Names of special tokens in a text: those of a template are tokens, those of content are letters.

A chat template writes `<|im_end|>` and means the token. A user who writes it in a message means
these letters, or wants to end the turn of somebody else. Content is therefore marked before a
template gets it, and `Tokenizer.encode_marked` makes tokens of the names without a mark alone.
"""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "\ufdd0"
"""Stands after the first letter of a name that is content. Unicode keeps this code point, and the
next three, for the inside of programs; a text that holds one is refused."""
_KEPT = re.compile("[\ufdd0-\ufdd3]")


class Marker:
    """Marks content, and counts the names that it finds."""

    def __init__(self, names: Iterable[str]) -> None:
        """Takes the names of the special tokens of a tokenizer."""
        self._pattern = pattern_of(names)
        self.found: collections.Counter[str] = collections.Counter()
        self.records = 0
        """Calls of `mark` that found any."""

    def mark(self, content: Any) -> Any:
        """Returns text with a mark in each name; lists and dicts with their texts marked.

        Raises:
          ValueError: the text holds a code point of `MARK`.
        """
        before = self.found.total()
        marked = self._mark(content)
        self.records += self.found.total() > before
        return marked

    def _mark(self, content: Any) -> Any:
        if isinstance(content, dict):
            return {name: self._mark(value) for name, value in content.items()}
        if isinstance(content, list):
            return [self._mark(value) for value in content]
        if not isinstance(content, str):
            return content
        if kept := _KEPT.search(content):
            raise ValueError(
                f"it holds the noncharacter U+{ord(kept[0]):X}, which this program uses itself"
            )
        names = self._pattern.findall(content)
        if not names:
            return content
        self.found.update(names)
        return self._pattern.sub(lambda name: name[0][:1] + MARK + name[0][1:], content)

    def describe(self) -> str:
        """Returns a line about the names in content; "" if there are none."""
        if not self.found:
            return ""
        shown = ", ".join(f"{name} {count:,}" for name, count in self.found.most_common(3))
        return f"names of special tokens in {self.records:,} of them are read as letters: {shown}"


def unmarked(text: str) -> str:
    """Returns a text without its marks."""
    return text.replace(MARK, "")


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of any of the names, the longest first."""
    ordered = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def split_marked(text: str, pattern: re.Pattern[str]) -> Sequence[tuple[str, bool]]:
    """Returns the parts of a marked text, and whether each is the name of a token."""
    parts, start = [], 0
    for name in pattern.finditer(text):
        parts += [(text[start : name.start()], False), (name[0], True)]
        start = name.end()
    return [part for part in (*parts, (text[start:], False)) if part[0]]
