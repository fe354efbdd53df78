"""How a program prints and ends: an output that may go away, and errors in a line."""

import contextlib
import errno
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console

from train.run.signals import ending_on_ctrl_c

T = TypeVar("T")

_LIMITS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files (`ulimit -f`)",
    errno.EMFILE: "allow more open files (`ulimit -n`)",
    errno.ENFILE: "close other programs, which have too many open files",
}
_ADVICE = {
    **_LIMITS,
    errno.EACCES: "make its folder writable",
    errno.EPERM: "make its folder writable",
    errno.EROFS: "make its file system writable",
}
"""The cure for each error of the machine, by its number."""


class BadRunError(ValueError):
    """A run cannot begin: bad settings, text or checkpoint."""

    exit_code = 2


class NonFiniteError(ArithmeticError):
    """The loss or the gradient of a step is NaN or infinite."""

    exit_code = 1


class LostProcessError(RuntimeError):
    """Another process of a run has ended, or cannot be reached."""

    exit_code = 1


class MachineError(RuntimeError):
    """The machine cannot go on with a run: a full disk, a limit, no memory."""

    exit_code = 1


class _Output:
    """A text stream whose reader may go away, as that of `| head` does.

    It then drops its lines and says so on stderr, so that the run goes on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Passes on what was written."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # Also for what is in its buffer.
        os.close(nowhere)
        say_error(f"the output cannot be written ({reason(error)}): going on without it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_console() -> Console:
    """Returns a console as wide as the terminal, or wide enough for the tables without one.

    It prints what the encoding of the output lacks as escapes, and nothing once the output is
    closed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # pytest's and notebooks' are others.
    width = None if sys.stdout.isatty() else 140
    return Console(file=cast(TextIO, _Output(sys.stdout)), width=width)


def run_program(program: Callable[[], Any]) -> None:
    """Runs a program. On an error prints one line and exits: 2 for bad settings, 1 for later ones.

    Ctrl-C ends it with 130.
    """
    try:
        with ending_on_ctrl_c():
            program()
    except (BadRunError, NonFiniteError, LostProcessError, MachineError) as error:
        say_error(f"error: {error}")
        _Output(sys.stdout).flush()
        # Exits at once: threads that still read a damaged checkpoint would bury the message.
        os._exit(error.exit_code)


def say_error(text: str) -> None:
    """Prints a line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def reporting_errors(program: Callable[[], T]) -> T:
    """Returns the result of a program. Errors of settings and files become a `BadRunError`."""
    try:
        return program()
    except (ValueError, OSError) as error:
        raise BadRunError(described(error)) from error


@contextlib.contextmanager
def writing_into(folder: pathlib.Path) -> Iterator[None]:
    """Context whose errors of the machine name a folder: those of a full disk name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(folder)
        raise


def described(error: ValueError | OSError) -> str:
    """Returns the text of an error of settings and files; of a limit with what to do about it."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"{reason(error)}: {advice(error)}."
    return str(error)


def reason(error: OSError) -> str:
    """Returns what is wrong, and with which file."""
    text = error.strerror or str(error) or type(error).__name__
    return text if error.filename is None else f"{text}: {error.filename}"


def advice(error: BaseException) -> str:
    """Returns what to do about an error of the machine."""
    if isinstance(error, MemoryError):
        return "make `--batch-size` or `--seq-len` smaller"
    code = error.errno if isinstance(error, OSError) else None
    return _ADVICE.get(code or 0, "look at the machine")
