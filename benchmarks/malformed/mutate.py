"""Random changes of valid bytes and of valid JSON."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np

Random = np.random.Generator


def pick(rng: Random, items: Any) -> Any:
    """Returns one of several items."""
    items = list(items)
    return items[int(rng.integers(len(items)))]


def mutated(rng: Random, data: bytes) -> bytes:
    """Returns bytes with one random change at a random place."""
    return pick(rng, BYTES.values())(rng, data)


def _range(rng: Random, data: bytes) -> tuple[int, int]:
    start, end = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return start, end


def _flipped(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for place in rng.integers(0, max(1, len(data)), int(rng.integers(1, 9))):
        if data:
            changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _cut_off(rng: Random, data: bytes) -> bytes:
    return data[: int(rng.integers(0, max(1, len(data))))]


def _cut_out(rng: Random, data: bytes) -> bytes:
    start, end = _range(rng, data)
    return data[:start] + data[end:]


def _doubled(rng: Random, data: bytes) -> bytes:
    start, end = _range(rng, data)
    return data[:end] + data[start:]


def _inserted(rng: Random, data: bytes) -> bytes:
    place = int(rng.integers(0, len(data) + 1))
    return data[:place] + rng.bytes(int(rng.integers(1, 64))) + data[place:]


def _zeroed(rng: Random, data: bytes) -> bytes:
    start, end = _range(rng, data)
    return data[:start] + bytes(end - start) + data[end:]


BYTES: dict[str, Callable[[Random, bytes], bytes]] = {
    "flipped": _flipped,
    "cut off": _cut_off,
    "cut out": _cut_out,
    "doubled": _doubled,
    "inserted": _inserted,
    "zeroed": _zeroed,
    "emptied": lambda rng, data: b"",
    "replaced": lambda rng, data: rng.bytes(int(rng.integers(1, 2048))),
}
"""Changes of bytes, by name."""

WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 0.5, 7, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "a", "NaN", "\ud800", "\x00", [], [1], [[[]]], {}, {"a": {"b": [None]}},
)  # fmt: skip
"""Values in place of others in JSON."""


def mutated_tree(rng: Random, tree: Any) -> Any:
    """Returns a JSON value with one entry at a random place replaced, removed, added or renamed."""
    changed = copy.deepcopy(tree)
    places = list(_places(changed))
    if not places:
        return pick(rng, WRONG)
    parent, key = pick(rng, places)
    match pick(rng, ("replace", "replace", "replace", "remove", "rename", "nest", "whole")):
        case "replace":
            parent[key] = pick(rng, WRONG)
        case "remove":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[f"{key}_"] = parent.pop(key)
        case "nest":
            parent[key] = [parent[key]]
        case "whole":
            return pick(rng, WRONG)
        case _:
            parent.append(pick(rng, WRONG))
    return changed


def mutated_json(rng: Random, text: bytes) -> bytes:
    """Returns JSON text with a change of an entry, or of bytes."""
    if rng.random() < 0.4:
        return mutated(rng, text)
    return json.dumps(mutated_tree(rng, json.loads(text))).encode()


def _places(tree: Any) -> Any:
    """Yields each dictionary or list in a tree with each of its keys."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from _places(tree[key])
