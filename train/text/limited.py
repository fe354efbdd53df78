"""Functions of strangers' files in a process of their own, with limits of time and memory.

Templates and tokenizers come with a model. They can loop for days, take all memory, or end their
process, and no exception tells it. So a module answers requests in another process (`serve`), and
the program asks it (`Limited`), which ends it at a limit.
"""

import atexit
import contextlib
import json
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any


class AtLimitError(Exception):
    """What a request did, after "it": "takes more than 10 s".

    Attributes:
      is_slow: whether it took too long, which it would do again.
    """

    def __init__(self, text: str, is_slow: bool = False) -> None:
        super().__init__(text)
        self.is_slow = is_slow


_PATIENCE = 60
"""Seconds on the clock for a start; and ten times the processor time of a request is enough on a
busy machine."""


class Limited:
    """A process that answers requests. It starts at its first, and again after one at a limit."""

    def __init__(self, module: str, *, seconds: float, gib: int) -> None:
        """Takes the limits.

        Args:
          module: a module that calls `serve` when it is run.
          seconds: longest processor time of a request.
          gib: GiB of addresses that the process may take.
        """
        self._module, self.seconds, self._gib = module, seconds, gib
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Any) -> Any:
        """Returns the answer to a request, which is pickled; answers are JSON.

        Raises:
          AtLimitError: it is at a limit, or ended the process.
          OSError: the process does not start.
          ValueError: the request cannot be pickled.
        """
        try:
            sent = pickle.dumps((self.seconds, request))
        except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
            raise ValueError(f"a value cannot be passed on ({error})") from error
        with self._lock:
            process = self._process or self._start()
            try:
                _write(_pipe(process.stdin), sent)
                answer = _read(_pipe(process.stdout), 10 * self.seconds)
            except OSError as error:
                code = self._end()
                if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                    raise AtLimitError(f"takes more than {self.seconds:g} s", True) from None
                name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise AtLimitError(f"ends the process that tries it ({name})") from None
            except BaseException:  # Such as Ctrl-C: the answer would be that of the next request.
                self._end()
                raise
        answer = json.loads(answer)
        if "answer" not in answer:
            raise AtLimitError(f"needs more than {self._gib} GiB")
        return answer["answer"]

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(self._gib)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Signals to all processes of a run let it save first.
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        atexit.register(self._end)
        try:
            _read(_pipe(self._process.stdout), _PATIENCE)
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise OSError(f"`python -m {self._module}` does not start ({error})") from error
            raise
        return self._process

    def _end(self) -> int:
        """Ends the process, and returns its exit code, or the negative number of its signal."""
        atexit.unregister(self._end)
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                _pipe(stream).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)  # It ends by itself if it is idle, or has ended.
        process.kill()
        return process.wait()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answers requests from stdin on stdout until stdin is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, int(sys.argv[1]) * 2**30)
    _limit(resource.RLIMIT_CORE, 0)
    requests, answers = os.fdopen(0, "rb", buffering=0), os.fdopen(1, "wb")
    with contextlib.suppress(OSError):
        _write(answers, b"ready")
        while True:
            seconds, request = pickle.loads(_read(requests))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # Its signal ends the process.
            try:
                result = json.dumps({"answer": answer(request)}).encode()
            except MemoryError:
                result = b"{}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, result)


def _limit(kind: int, value: int) -> None:
    """Lowers a limit of this process, where the system has it."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes], seconds: float | None = None) -> bytes:
    """Reads what `_write` wrote, within some seconds.

    Raises:
      OSError: the other side ended.
      TimeoutError: nothing came in time.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = struct.unpack("<Q", _exactly(stream, 8, deadline))
    return _exactly(stream, size, deadline)


def _exactly(stream: IO[bytes], size: int, deadline: float | None) -> bytes:
    parts, missing = [], size
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while missing:
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            if not poll.poll(1000 * left):
                raise TimeoutError
        part = os.read(stream.fileno(), min(missing, 2**20))
        if not part:
            raise OSError("the other side ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
