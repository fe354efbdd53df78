"""Digests, which tell that files or tensors are not what was written.

A folder gets a `digests.json` with the digest of each file: XXH3 of 128 bits, by the package
`xxhash`, which reads several gigabytes a second. Programs that do not know this file ignore it. A
digest tells a changed bit, and nothing about who changed it.
"""

import contextlib
import json
import mmap
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from models.json_files import read_object

FILE = "digests.json"
_FILES, _OF_FILES = "xxh3_128", "digest"


def write(folder: pathlib.Path, files: Iterable[pathlib.Path], **others: Any) -> None:
    """Writes the digests of files of a folder into it, all or none.

    Args:
      folder: the folder.
      files: files in it or in folders of it.
      **others: further entries, plain JSON.
    """
    named = {path.relative_to(folder).as_posix(): _of_file(path) for path in sorted(files)}
    entries = {_FILES: named, **others}
    unfinished = folder / f".{FILE}"
    text = json.dumps({**entries, _OF_FILES: _of_entries(entries)}, indent=1)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(folder / FILE)


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the entries of the digests of a folder; None if it has none.

    Raises:
      ValueError: they are damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    entries = read_object(path)
    own = entries.pop(_OF_FILES, None)
    files = entries.get(_FILES)
    if own != _of_entries(entries) or not isinstance(files, dict):
        raise ValueError(f"{path} is damaged: it is not what was written.")
    return entries


def differing(folder: pathlib.Path, part: tuple[int, int] = (0, 1)) -> list[str] | None:
    """Returns the files of a folder that are not what was written; None if it has no digests.

    Args:
      folder: the folder.
      part: i and n, to look at the i-th of n shares of the files alone.

    Raises:
      ValueError: the digests are damaged.
    """
    entries = read(folder)
    if entries is None:
        return None
    i, count = part
    names = list(entries[_FILES].items())[i::count]
    return [name for name, digest in names if not _is(folder / name, digest)]


def check(folder: pathlib.Path) -> bool:
    """Raises a `ValueError` if a file of a folder is not what was written, which it names.

    Returns:
      Whether the folder has digests, without which it is not checked.
    """
    if wrong := (found := differing(folder)):
        raise ValueError(
            f"{folder / wrong[0]} is damaged, or another program has written it: it is not what"
            f" {FILE} says. Copy it again; if the change was meant, remove {folder / FILE}."
        )
    return found is not None


def of_tensors(files: Iterable[pathlib.Path]) -> dict[str, str]:
    """Returns the digest of each tensor in files of safetensors, by name.

    A digest is of the bytes, the shape and the dtype.
    """
    found: dict[str, str] = {}
    for path in sorted(files):
        with _bytes(path) as data:
            for name, entry, begin, end in _tensors(data):
                kind = f"{entry['dtype']} {entry['shape']}".encode()
                digest = xxhash.xxh3_128(kind)
                with memoryview(data) as view, view[begin:end] as tensor:
                    digest.update(tensor)
                found[name] = digest.hexdigest()
    return found


def changed(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Returns which tensors are others than expected, as a text; "" if all are the same."""
    names = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
    if not names:
        return ""
    more = f" and {len(names) - 1} more of {len(expected)} tensors" if len(names) > 1 else ""
    return f"{names[0]}{more} changed"


def _is(path: pathlib.Path, digest: str) -> bool:
    return path.is_file() and _of_file(path) == digest


def _of_file(path: pathlib.Path) -> str:
    with _bytes(path) as data:
        return xxhash.xxh3_128(data).hexdigest()


def _of_entries(entries: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _bytes(path: pathlib.Path) -> Iterator[Any]:
    """Yields the content of a file, of which no copy is made."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:  # Such a file cannot be mapped.
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _tensors(data: Any) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """Yields name, entry, begin and end of each tensor of a file whose header has been checked.

    A file begins with the length of a JSON object, 8 bytes, which has the place of each tensor in
    the bytes after it.
    """
    (length,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + x for x in entry["data_offsets"])
            yield name, entry, begin, end
