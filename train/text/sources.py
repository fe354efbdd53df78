"""Several files of a flag, each with the share that it has in training."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple


class Source(NamedTuple):
    """A file or folder, and its weight; None if none is given."""

    path: str
    weight: float | None = None


def sources_of(values: Sequence[str], flag: str) -> list[Source]:
    """Returns the files of a flag: `a.jsonl`, or `a.jsonl:0.7 b.jsonl:0.3` with weights.

    Raises:
      ValueError: no file, a weight that is not a positive number, or files with and without one.
    """
    sources = [_source(value, flag) for value in values]
    if not sources:
        raise ValueError(f"`{flag}` is missing: name a file.")
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError(
            f"`{flag}` {' '.join(values)}: some files have a weight and some have none: give each"
            " one, such as a.jsonl:0.7 b.jsonl:0.3, or none."
        )
    return sources


def _source(value: str, flag: str) -> Source:
    path, colon, text = value.rpartition(":")
    if not colon or pathlib.Path(value).expanduser().exists():
        return Source(value)
    try:
        weight = float(text)
    except ValueError:
        return Source(value)  # A colon in a name.
    if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"`{flag}` {value!r}: the weight {text} must be above 0.")
    return Source(path, weight)
