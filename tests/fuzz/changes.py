"""Strategies that damage valid bytes, valid JSON and valid files."""

import copy
import json
import os
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
    flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[start : start + 8])
    added = draw(st.binary(min_size=1, max_size=64))
    return one_of(
        draw,
        data[:start] + flipped + data[start + 8 :],
        data[:start],
        data[:start] + data[end:],
        data[:end] + data[start:],
        data[:start] + added + data[start:],
        data[:start] + bytes(end - start) + data[end:],
        added,
    )


WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 0.5, 7, 10**7, 2**31 - 1, 10**30, -(10**30), 1e308, float("nan"),
    float("inf"), "", "a", "NaN", "\ud800", "\x00", [], [1], [[[]]], {}, {"a": {"b": [None]}},
)  # fmt: skip
"""Values in place of others in JSON."""


def damaged_tree(draw: Draw, tree: Any) -> Any:
    """Returns a JSON value with an entry at any place replaced, removed, renamed or nested."""
    root = {"": copy.deepcopy(tree)}
    parent, key = one_of(draw, *_places(root))
    match one_of(draw, "replace", "replace", "replace", "remove", "rename", "nest"):
        case "remove" if parent is not root:
            del parent[key]
        case "rename" if isinstance(parent, dict) and parent is not root:
            parent[f"{key}_"] = parent.pop(key)
        case "nest":
            parent[key] = [parent[key]]
        case _:
            parent[key] = one_of(draw, *WRONG)
    return root[""]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns each dictionary or list in a tree with each of its keys."""
    if not isinstance(tree, dict | list):
        return []
    keys = [*tree] if isinstance(tree, dict) else range(len(tree))
    return [place for key in keys for place in [(tree, key), *_places(tree[key])]]


def spoil(draw: Draw, path: pathlib.Path) -> str:
    """Replaces a file by nothing, another kind of file, or blanks. Returns what it is then."""
    what = one_of(draw, "missing", "a folder", "a broken link", "a pipe", "empty", "blank")
    path.unlink()
    if what == "a folder":
        path.mkdir()
    elif what == "a broken link":
        path.symlink_to("nowhere")
    elif what == "a pipe":
        os.mkfifo(path)
    elif what != "missing":
        path.write_bytes(b"" if what == "empty" else one_of(draw, b"\n", b" \t\n", b"\xef\xbb\xbf"))
    return what


def damage(draw: Draw, path: pathlib.Path) -> str:
    """Spoils a file or changes its content, JSON by entries too. Returns what it is then."""
    if one_of(draw, *range(4)) == 0:
        return spoil(draw, path)
    data = path.read_bytes()
    if path.suffix == ".json" and draw(st.booleans()):
        path.write_bytes(json.dumps(damaged_tree(draw, json.loads(data))).encode())
    else:
        path.write_bytes(damaged_bytes(draw, data))
    return "changed"
