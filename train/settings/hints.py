"""Nearest names, for errors."""

import difflib
from collections.abc import Iterable


def near_hint(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Returns " Did you mean X?" for the nearest known name; "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""
