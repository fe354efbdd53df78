"""SIGTERM, SIGHUP and Ctrl-C: before its first step they end a program, later they let it save."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending_on_ctrl_c() -> Iterator[None]:
    """Context in which Ctrl-C ends the process with 130.

    A `KeyboardInterrupt`, as Python raises it, may be lost in a callback of JAX.
    """
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, _: object) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    with contextlib.suppress(RuntimeError):  # It came while something was printed.
        sys.stdout.flush()
    os._exit(128 + number)


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

    def __enter__(self) -> "StopSignal":
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self._before = {s: signal.signal(s, self._note) for s in signals}
        return self

    def _note(self, number: int, _: object) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        with contextlib.suppress(OSError):  # Not `sys.stderr`, which in a notebook is no file.
            os.write(2, b"stopping after this step, then saving; a second signal ends at once\n")
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
