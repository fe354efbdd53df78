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
def written_whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to write into, and renames it to `folder` at the end.

    After an error nothing is left.

    Raises:
      FileExistsError: `folder` exists and is not empty.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, f".{folder.name}-") as scratch:
        whole = scratch / folder.name
        whole.mkdir()
        yield whole
        if folder.exists():
            folder.rmdir()
        os.rename(whole, folder)


@contextlib.contextmanager
def scratch_folder(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Makes a folder that is removed at the end, with those that killed processes have left.

    A folder has a lock, which the system releases when its process ends, however it ends. So the
    folder of a process that is still at work is left alone.

    Args:
      parent: where to make it.
      prefix: its name, but for the random end. Folders of such a name with a lock are scratch
        folders.
    """
    # The end that `mkdtemp` gives has no "-": ".a-" is no beginning of a folder of ".a-b-".
    named = re.compile(re.escape(prefix) + "[a-z0-9_]+")
    for other in filter(lambda path: named.fullmatch(path.name), list(parent.iterdir())):
        if (other / _LOCK).exists() and (lock := _lock(other)) is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)
    folder = pathlib.Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    # Another process may have taken it for one of a killed process.
    while (lock := _lock(folder, without=True)) is None:
        folder = pathlib.Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: pathlib.Path, without: bool = False) -> int | None:
    """Takes the lock of a folder; None if another process has it, or removes the folder.

    Args:
      folder: the folder.
      without: whether to go on without a lock where the file system has none.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        if without:
            return lock
        os.close(lock)
        return None
    if (folder / _LOCK).exists():
        return lock
    os.close(lock)
    return None
