"""Digests, which tell that files or tensors are not what was written.

A digest is XXH3 of 128 bits, by the package `xxhash`, which reads several gigabytes a second. It
tells a changed bit, and nothing about who changed it. A folder has the digests of its files in
`digests.json`; a file of safetensors has that of its tensors in its metadata, which other readers
ignore and other writers drop.
"""

import contextlib
import json
import mmap
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

from models.json_files import read_object

FILE = "digests.json"
BASE = "base_xxh3_128"
"""Entry of the metadata of an adapter: the digests of the tensors of its base, as JSON."""
_KIND, _OF_FILES = "xxh3_128", "digest"
_BLANK = xxhash.xxh3_128().digest_size * 2 * "0"


def write(folder: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Writes the digests of files of a folder, or of folders in it, into it: all or none."""
    named = {path.relative_to(folder).as_posix(): _of_file(path) for path in sorted(files)}
    unfinished = folder / f".{FILE}"
    text = json.dumps({_KIND: named, _OF_FILES: _of_entries(named)}, indent=1)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(folder / FILE)


def _read(folder: pathlib.Path) -> dict[str, str] | None:
    """Returns the digests of a folder by file; None if it has none.

    Raises:
      ValueError: they are damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    entries = read_object(path)
    named = entries.get(_KIND)
    if not isinstance(named, dict) or entries.get(_OF_FILES) != _of_entries(named):
        raise ValueError(f"{path} is damaged: it is not what was written.")
    return named


def differing(folder: pathlib.Path, part: tuple[int, int] = (0, 1)) -> list[str] | None:
    """Returns the files of a folder that are not what was written; None if it has no digests.

    Args:
      folder: the folder.
      part: i and n, to look at the i-th of n shares of the files alone.

    Raises:
      ValueError: the digests are damaged.
    """
    named = _read(folder)
    if named is None:
        return None
    i, count = part
    return [name for name in list(named)[i::count] if not _is(folder / name, named[name])]


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


def save_tensors(tensors: Mapping[str, np.ndarray], path: pathlib.Path, **metadata: str) -> None:
    """Writes a file of safetensors with its digest, and with further metadata."""
    metadata = {"format": "pt", **metadata, _KIND: _BLANK}
    safetensors.numpy.save_file(dict(tensors), path, metadata=metadata)
    path.chmod(0o644)
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        metadata[_KIND] = _of_content(path)
        # In order: the package writes metadata in a random one, and equal models have equal files.
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length  # Both write the same entries, without blanks.
        file.seek(8)
        file.write(text.ljust(length))


def check_tensors(path: pathlib.Path) -> bool:
    """Raises a `ValueError` if a file of safetensors is not what was written.

    Returns:
      Whether it has a digest, without which it is not checked.
    """
    expected = metadata_of(path).get(_KIND)
    if expected is not None and expected != _of_content(path):
        raise ValueError(f"{path} is damaged: its tensors are not what was written. Copy it again.")
    return expected is not None


def metadata_of(path: pathlib.Path) -> dict[str, str]:
    """Returns the metadata of a file of safetensors.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or damaged.") from error


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


def check_base(path: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Raises a `ValueError` unless a base has the tensors that an adapter was trained with.

    Args:
      path: the file of the adapter. Only `save_tensors` with `BASE` tells its base.
      files: files of the base.
    """
    known = metadata_of(path).get(BASE)
    if known is not None and (wrong := changed(json.loads(known), of_tensors(files))):
        raise ValueError(
            f"{path} was trained with other weights than those of the checkpoint: {wrong}. Pass the"
            " checkpoint that it was trained with; if the change was meant, save the adapter with"
            " PEFT, which drops the digests of the base."
        )


def _is(path: pathlib.Path, digest: str) -> bool:
    return path.is_file() and _of_file(path) == digest


def _of_file(path: pathlib.Path) -> str:
    with _bytes(path) as data:
        return xxhash.xxh3_128(data).hexdigest()


def _of_content(path: pathlib.Path) -> str:
    """Returns the digest of the tensors and the metadata of a file of safetensors."""
    others = {name: text for name, text in metadata_of(path).items() if name != _KIND}
    return _of_entries({**of_tensors([path]), **others})


def _of_entries(entries: Mapping[str, str]) -> str:
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
