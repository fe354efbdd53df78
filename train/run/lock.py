"""One run to a folder: a lock that the system releases when the process ends, however it ends."""

import errno
import fcntl
import os
import pathlib

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems without locks. A run there is not refused for it."""


class RunLock:
    """The right to write into the folder of a run. Two runs would remove each other's files."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Takes the lock.

        Args:
          folder: folder of the run, which exists.

        Raises:
          ValueError: another run has it.
          OSError: the folder cannot be written.
        """
        self._file = (folder / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise ValueError(
                f"`--out` {folder} is in use by another run (process {owner}): wait until it has"
                " ended or stop it, or pass another `--out`."
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def close(self) -> None:
        """Releases the lock. The file stays: to remove it would let two runs lock two files."""
        self._file.close()
