"""Digests, which tell that files or tensors are not what was written.

A digest is XXH3 of 128 bits, by the package `xxhash`, which reads several gigabytes a second. It
tells a changed bit, and nothing about who changed it. A folder has the digests of its files in
`digests.json`; a file of safetensors has that of its tensors in its metadata, which other readers
ignore and other writers drop.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import safetensors.numpy
import xxhash

from models.json_files import read_object

FILE = "digests.json"
BASE = "base_xxh3_128"
"""Entry of the metadata of an adapter: the digests of the tensors of its base, as JSON."""
_KIND, _OF_FILES = "xxh3_128", "digest"
_BLANK = xxhash.xxh3_128().digest_size * 2 * "0"
_CHUNK = 2**20
"""Bytes that are read at a time: a mapped file would count as memory of the process."""
_THREADS = min(4, os.cpu_count() or 1)
_INTERVAL = 0.2
"""Seconds between two looks for files that are written meanwhile, and since one was written: more
than a file system's clock needs to tell two times."""


class Ahead:
    """Computes the digests of files in a thread, while others, or they, are being written."""

    def __init__(self, files: Callable[[], Iterable[pathlib.Path]]):
        """Begins.

        Args:
          files: returns the files of the folder so far, complete or not.
        """
        self._files, self._found = files, dict[tuple[int, ...], str]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="digests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what it has found stays."""
        self._stopped.set()
        self._thread.join()

    def digest(self, path: pathlib.Path) -> str:
        """Returns the digest of a file, which is read unless the thread has read it as it is."""
        return self._found.get(_version(path)) or _of_file(path)

    def _run(self) -> None:
        took = 0.0
        while not self._stopped.wait(max(_INTERVAL, 10 * took)):  # A slow file system is let be.
            began = time.monotonic()
            with contextlib.suppress(OSError):  # A file that went away, as temporary ones do.
                for path in self._files():
                    version = *_, written = _version(path)
                    is_quiet = time.time_ns() - written > _INTERVAL * 1e9
                    if is_quiet and version not in self._found and not self._stopped.is_set():
                        self._found[version] = _of_file(path)
            took = time.monotonic() - began


def write(
    folder: pathlib.Path, files: Iterable[pathlib.Path], *, ahead: Ahead | None = None
) -> None:
    """Writes the digests of files of a folder, or of folders in it, into it: all or none.

    Args:
      folder: the folder.
      files: the files.
      ahead: digests that were computed before, of some of the files; stopped.
    """
    paths = sorted(files)
    with _pool() as pool:
        found = pool.map(ahead.digest if ahead else _of_file, paths)
    named = dict(zip((path.relative_to(folder).as_posix() for path in paths), found, strict=True))
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
    names = list(named)[i::count]
    with _pool() as pool:
        are = pool.map(lambda name: _is(folder / name, named[name]), names)
    return [name for name, is_same in zip(names, are, strict=True) if not is_same]


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
    with _pool() as pool:
        for path in sorted(files):
            parts = _parts(path)
            found |= zip(
                parts, pool.map(functools.partial(_of_part, path), parts.values()), strict=True
            )
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


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads, of which several read and compute at once."""
    return concurrent.futures.ThreadPoolExecutor(_THREADS)


def _version(path: pathlib.Path) -> tuple[int, ...]:
    """Returns numbers that a file keeps in another folder, and loses if it is written again."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _of_file(path: pathlib.Path) -> str:
    return _of_part(path, (b"", 0, path.stat().st_size))


def _of_part(path: pathlib.Path, part: tuple[bytes, int, int]) -> str:
    """Returns the digest of some bytes, and of those of a file from a begin to an end."""
    prefix, begin, end = part
    digest, chunk = xxhash.xxh3_128(prefix), memoryview(bytearray(min(_CHUNK, end - begin)))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (count := file.readinto(chunk[: end - begin])):
            digest.update(chunk[:count])
            begin += count
    return digest.hexdigest()


def _of_content(path: pathlib.Path) -> str:
    """Returns the digest of the tensors and the metadata of a file of safetensors."""
    others = {name: text for name, text in metadata_of(path).items() if name != _KIND}
    return _of_entries({**of_tensors([path]), **others})


def _of_entries(entries: Mapping[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _parts(path: pathlib.Path) -> dict[str, tuple[bytes, int, int]]:
    """Returns dtype and shape, begin and end of each tensor of a file, whose header is sound.

    A file begins with the length of a JSON object, 8 bytes, which has the place of each tensor in
    the bytes after it.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: (
            f"{entry['dtype']} {entry['shape']}".encode(),
            *(8 + length + x for x in entry["data_offsets"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
