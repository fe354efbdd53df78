"""One run to a folder: a lock that the system releases when the process ends, however it ends."""

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterator

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems without locks. A run there is not refused for it."""


@contextlib.contextmanager
def run_lock(folder: pathlib.Path) -> Iterator[None]:
    """Context with the right to write into the folder of a run, which exists.

    Two runs would remove each other's files. The lock file stays: to remove it would let two runs
    lock two files.

    Raises:
      ValueError: another run has it.
      OSError: the folder cannot be written.
    """
    with (folder / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ValueError(
                f"`--out` {folder} is in use by another run (process {owner}): wait until it has"
                " ended or stop it, or pass another `--out`."
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
