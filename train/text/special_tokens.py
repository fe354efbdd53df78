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
"""Stands after each letter of a name that is content. Unicode keeps this code point and its
neighbors for the inside of programs; `Marker.mark` writes those of content in another form."""
_ESCAPE = "\ufdd1"
_KEPT = re.compile("[\ufdd0-\ufddf]")


class Marker:
    """Marks content, and counts the names that it finds."""

    def __init__(self, names: Iterable[str]) -> None:
        """Takes the names of the special tokens of a tokenizer."""
        self._pattern = pattern_of(names)
        self.found: collections.Counter[str] = collections.Counter()
        """How often each name occurred."""

    def mark(self, content: Any) -> Any:
        """Returns text with marks in each name; lists and dicts with their texts marked."""
        if isinstance(content, dict):
            return {name: self.mark(value) for name, value in content.items()}
        if isinstance(content, list):
            return [self.mark(value) for value in content]
        if not isinstance(content, str):
            return content
        content = _KEPT.sub(lambda kept: f"{_ESCAPE}{ord(kept[0]) - 0xFDD0:x}", content)
        if not self.count(content):
            return content
        return self._pattern.sub(lambda name: "".join(x + MARK for x in name[0]), content)

    def count(self, text: str) -> int:
        """Returns how many names a text has, and adds them to those that were found."""
        names = self._pattern.findall(text)
        self.found.update(names)
        return len(names)

    def describe(self, where: str) -> str:
        """Returns a line about the names in content, which is `where`; "" if there are none."""
        if not self.found:
            return ""
        shown = ", ".join(f"{name} {count:,}" for name, count in self.found.most_common(3))
        return (
            f"names of special tokens in {where} are read as letters: {shown}. If a program wrote"
            " them to be tokens, pass `--special-tokens parse`."
        )


def is_marked(text: str) -> bool:
    """Returns whether `letters_of` changes a text."""
    return MARK in text or _ESCAPE in text


def letters_of(text: str) -> tuple[str, list[int]]:
    """Returns a marked text as its author wrote it.

    Returns:
      The text; and for each of its letters the number of letters of the marked text up to its end.
    """
    letters, places, escaped = [], [], False
    for place, letter in enumerate(text, 1):
        if letter == MARK:
            continue
        if letter == _ESCAPE:
            escaped = True
            continue
        letters.append(chr(0xFDD0 + int(letter, 16)) if escaped else letter)
        places.append(place)
        escaped = False
    return "".join(letters), places


def unmarked(text: str) -> str:
    """Returns a marked text as its author wrote it."""
    return letters_of(text)[0]


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of any of the names, the longest first."""
    ordered = sorted(filter(None, names), key=len, reverse=True)
    either = "|".join(map(re.escape, ordered))
    # A name may be a single letter, which no mark divides.
    return re.compile(f"(?:{either})(?!{MARK})" if either else "(?!)")


def split_marked(text: str, pattern: re.Pattern[str]) -> Sequence[tuple[str, bool]]:
    """Returns the parts of a marked text, and whether each is the name of a token."""
    parts, start = [], 0
    for name in pattern.finditer(text):
        parts += [(text[start : name.start()], False), (name[0], True)]
        start = name.end()
    return [part for part in (*parts, (text[start:], False)) if part[0]]
