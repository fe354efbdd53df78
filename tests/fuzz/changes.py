"""Strategies that damage valid bytes, valid JSON and valid files."""

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy], Any]


def one_of(draw: Draw, *items: Any) -> Any:
    """Returns one of several items."""
    return draw(st.sampled_from(items))


def damaged_bytes(draw: Draw, data: bytes) -> bytes:
    """Returns bytes with one change at any place."""
    place = st.integers(0, len(data))
    start, end = sorted((draw(place), draw(place)))
    match one_of(draw, "flip", "cut off", "cut out", "double", "insert", "zero", "replace"):
        case "flip":
            changed = bytearray(data)
            for i in draw(st.lists(st.integers(0, max(0, len(data) - 1)), min_size=1, max_size=8)):
                if data:
                    changed[i] ^= 1 << draw(st.integers(0, 7))
            return bytes(changed)
        case "cut off":
            return data[:start]
        case "cut out":
            return data[:start] + data[end:]
        case "double":
            return data[:end] + data[start:]
        case "insert":
            return data[:start] + draw(st.binary(min_size=1, max_size=64)) + data[start:]
        case "zero":
            return data[:start] + bytes(end - start) + data[end:]
    return draw(st.binary(max_size=256))


WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 0.5, 7, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "a", "NaN", "\ud800", "\x00", [], [1], [[[]]], {}, {"a": {"b": [None]}},
)  # fmt: skip
"""Values in place of others in JSON."""


def damaged_tree(draw: Draw, tree: Any) -> Any:
    """Returns a JSON value with an entry at any place replaced, removed, renamed or nested."""
    tree = copy.deepcopy(tree)
    parent, key = one_of(draw, *(_places(tree) or [({"": tree}, "")]))
    match one_of(draw, "replace", "replace", "replace", "remove", "rename", "nest", "all"):
        case "remove":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[f"{key}_"] = parent.pop(key)
        case "nest":
            parent[key] = [parent[key]]
        case "all":
            return one_of(draw, *WRONG)
        case _:
            parent[key] = one_of(draw, *WRONG)
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns each dictionary or list in a tree with each of its keys."""
    if not isinstance(tree, dict | list):
        return []
    keys = [*tree] if isinstance(tree, dict) else range(len(tree))
    return [place for key in keys for place in [(tree, key), *_places(tree[key])]]


def damaged_json(draw: Draw, text: bytes) -> bytes:
    """Returns JSON text with a change of an entry, or of bytes."""
    if draw(st.booleans()):
        return damaged_bytes(draw, text)
    return json.dumps(damaged_tree(draw, json.loads(text))).encode()


def spoil(draw: Draw, path: pathlib.Path) -> str:
    """Replaces a file by nothing, a folder, a broken link, or a file without content.

    Returns:
      What it is.
    """
    what = one_of(draw, "missing", "a folder", "a broken link", "empty", "blank")
    path.unlink()
    if what == "a folder":
        path.mkdir()
    elif what == "a broken link":
        path.symlink_to("nowhere")
    elif what != "missing":
        path.write_bytes(b"" if what == "empty" else one_of(draw, b"\n", b" \t\n", b"\xef\xbb\xbf"))
    return what
