"""Programs in forked processes, which have everything imported already."""

import contextlib
import ctypes
import dataclasses
import fcntl
import math
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

_PATIENCE = 20
"""Seconds on the clock for each second of processor time, on a busy machine."""
_MEMORY = 24 * 2**30
"""Bytes of addresses: numbers that are too large must not take the memory of the machine."""
_CAPABILITIES = 0x20080522
"""Version of the header of `capset`, for two words of capabilities."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
      code: its exit code; negative for a signal, None if it took too long and was killed.
      out: what it wrote to stdout.
      err: what it wrote to stderr.
      seconds: how long it ran.
    """

    code: int | None
    out: str
    err: str
    seconds: float


class Child:
    """A running process."""

    def __init__(self, pid: int, folder: pathlib.Path, name: str, limit: float) -> None:
        self._pid, self._began, self._limit = pid, time.monotonic(), limit
        self._folder, self._name = folder, name

    def poll(self) -> Ending | None:
        """Returns how the process ended; None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._began
        if not pid and seconds > self._limit * _PATIENCE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return Ending(None, self._text("out"), self._text("err"), seconds)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        code = None if code == -signal.SIGXCPU else code
        return Ending(code, self._text("out"), self._text("err"), seconds)

    def wait(self) -> Ending:
        """Returns how the process ended."""
        while (ending := self.poll()) is None:
            time.sleep(0.02)
        return ending

    def _text(self, stream: str) -> str:
        return (self._folder / f"{self._name}.{stream}").read_text(errors="replace")


def start(
    main: Callable[[], None],
    argv: Sequence[str],
    folder: pathlib.Path,
    name: str,
    limit: float,
    locked: str | None = None,
) -> Child:
    """Starts a program in a folder.

    This process must not have used a device of JAX: its threads do not live on in a fork.

    Args:
      main: the program. It reads `sys.argv`.
      argv: its command line.
      folder: where it runs.
      name: of the files in the parent folder that receive its output.
      limit: seconds of processor time after which it is killed.
      locked: a folder of a run to lock before.
    """
    return Child(_fork(main, argv, folder, name, limit, locked), folder.parent, name, limit)


def _fork(
    main: Callable[[], None],
    argv: Sequence[str],
    folder: pathlib.Path,
    name: str,
    limit: float,
    locked: str | None,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number, stream in ((1, "out"), (2, "err")):
            path = folder.parent / f"{name}.{stream}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2)
        )
        os.chdir(folder)
        _obey_modes()
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        used = math.ceil(time.process_time() + limit)
        resource.setrlimit(resource.RLIMIT_CPU, (used, used + 5))
        sys.argv = [name, *argv]
        held = None if locked is None else (folder / locked / "lock").open("a+")
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _obey_modes() -> None:
    """Takes from root the right to read and write files whatever their mode."""
    if os.geteuid() == 0 and sys.platform == "linux":
        words = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
        if ctypes.CDLL(None, use_errno=True).capset(words, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "capset")
