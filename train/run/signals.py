"""SIGTERM, SIGHUP and Ctrl-C: before its first step they end a program, later they let it save.

Python calls a handler between two bytecodes. It therefore waits while XLA compiles or a step runs,
which can take minutes. A thread reads the signals from a pipe, which the system fills at once.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

_SAME_TIME = 0.02
"""Seconds in which equal signals count once."""

_reactions: dict[int, Callable[[int], None]] = {}
"""What the thread does on a signal, by number."""


@contextlib.contextmanager
def _reacting(reactions: Mapping[signal.Signals, Callable[[int], None]]) -> Iterator[None]:
    """Context in which a thread reacts to signals within a moment, whatever the program does."""
    former = dict(_reactions)
    _reactions.update({int(number): react for number, react in reactions.items()})
    handlers = {number: signal.signal(number, lambda *_: None) for number in reactions}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    pipe = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=_watch, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe)
        os.close(writer)
        thread.join()
        os.close(reader)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _reactions.clear()
        _reactions.update(former)


def _watch(reader: int) -> None:
    """Reacts to each signal that a pipe tells, until the pipe is closed."""
    while numbers := _read(reader):
        for number in dict.fromkeys(numbers):
            if number in _reactions:
                _reactions[number](number)


def _read(reader: int) -> bytes:
    """Returns the signals that came at the same time; none once the pipe is closed.

    `timeout` and others send one to a process, and again to its group.
    """
    select.select([reader], [], [])
    time.sleep(_SAME_TIME)
    return os.read(reader, 64)


@contextlib.contextmanager
def ending_on_ctrl_c() -> Iterator[None]:
    """Context in which Ctrl-C ends the process with 130."""
    with _reacting({signal.SIGINT: _end}):
        yield


def _end(number: int) -> None:
    _say(b"interrupted\n")
    os._exit(128 + number)


def _say(line: bytes) -> None:
    with contextlib.suppress(OSError):  # Not `sys.stderr`, which in a notebook is no file.
        os.write(2, line)


class StopSignal:
    """Context that records a signal to stop, so that the run can be saved. A second one kills.

    Signals are SIGTERM, SIGINT (Ctrl-C), and SIGHUP, which comes when a terminal goes away, unless
    the run was started to outlive it (`nohup`).

    Attributes:
      requested: whether a signal came.
      name: its name.
    """

    def __init__(self) -> None:
        self.requested, self.name = False, ""
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "StopSignal":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._context.enter_context(_reacting(dict.fromkeys(numbers, self._note)))
        return self

    def _note(self, number: int) -> None:
        if self.requested:
            _end(number)
        self.requested, self.name = True, signal.Signals(number).name
        _say(b"stopping after this step, then saving; a second signal ends at once, unsaved\n")

    def __exit__(self, *_: object) -> None:
        self._context.close()
