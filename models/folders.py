"""Writing a folder completely or not at all."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

_LOCK = "in-progress.lock"
"""File of a scratch folder that its process has locked."""


def check_free(folder: pathlib.Path) -> None:
    """Raises a `FileExistsError` if a folder to be written exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"'{folder}' exists and is not empty: name another folder.")


@contextlib.contextmanager
def atomic_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to write into, and renames it to `folder` at the end.

    After an error the temporary folder is removed.

    Raises:
      FileExistsError: `folder` exists and is not empty.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, f".{folder.name}-") as scratch:
        unfinished = scratch / folder.name
        unfinished.mkdir()
        yield unfinished
        if folder.exists():
            folder.rmdir()
        os.rename(unfinished, folder)


@contextlib.contextmanager
def scratch_folder(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Makes a folder that is removed at the end, and removes the folders of killed processes.

    A folder has a lock, which the system releases when its process ends, for whatever reason. The
    folder of a running process is therefore left alone.

    Args:
      parent: where to make it.
      prefix: beginning of its name; the end is random. Folders with such a name and a lock are
        scratch folders.
    """
    # `mkdtemp` adds no "-" to a name, so a folder of ".a-b-" is not mistaken for one of ".a-".
    named = re.compile(re.escape(prefix) + "[a-z0-9_]+")
    for sibling in list(parent.iterdir()):
        if named.fullmatch(sibling.name):
            with contextlib.suppress(OSError):  # At work, of another user, or removed meanwhile.
                _remove_left(sibling)
    folder, lock = _locked(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _remove_left(folder: pathlib.Path) -> None:
    """Removes the folder of a killed process. Raises an `OSError` for any other folder."""
    lock = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(lock)


def _locked(parent: pathlib.Path, prefix: str) -> tuple[pathlib.Path, int]:
    """Makes a folder with a lock."""
    while True:
        folder = pathlib.Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # Another process takes it for one of a killed process.
            os.close(lock)
            continue
        except OSError:  # The file system has no locks.
            return folder, lock
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)


def _remove(folder: pathlib.Path) -> None:
    """Removes a scratch folder, its lock last: after a kill the remains are still recognized."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
