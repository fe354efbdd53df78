"""Runs untrusted templates and tokenizers in a separate process, with limits of time and memory.

Templates and tokenizers come with a model. A damaged or hostile one can loop for days, allocate all
memory, or abort its process, where Python raises no exception. A module that reads them answers
requests in another process (`serve`). The program sends requests to it (`Limited`), and ends it
when it exceeds a limit.
"""

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


class AtLimitError(Exception):
    """A request exceeded a limit or ended the process: "takes more than 10 s".

    Attributes:
      is_slow: whether the request took too long; the same request would again.
    """

    def __init__(self, text: str, is_slow: bool = False) -> None:
        super().__init__(text)
        self.is_slow = is_slow


_START_SECONDS = 60
"""Longest time of a start."""
_BUSY = 10
"""A request has so many times its processor time on the clock, for a busy machine."""


class Limited:
    """A process that answers requests.

    It starts at the first request, and starts again after a request that ended it.
    """

    def __init__(self, module: str, *, seconds: float, gib: int) -> None:
        """Takes the limits.

        Args:
          module: a module that calls `serve` when it runs.
          seconds: longest processor time of a request.
          gib: GiB of addresses that the process may take.
        """
        self._module, self.seconds, self._gib = module, seconds, gib
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def ask(self, request: Any) -> Any:
        """Returns the answer to a request. Requests are pickled, answers are JSON.

        Raises:
          AtLimitError: the request exceeded a limit or ended the process.
          OSError: the process does not start.
          ValueError: the request cannot be pickled.
        """
        try:
            sent = pickle.dumps((self.seconds, request))
        except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
            raise ValueError(f"a value cannot be passed on ({error})") from error
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send_bytes(sent)
                answer = _received(connection, _BUSY * self.seconds)
            except (EOFError, OSError) as error:
                code = self._end()
                if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                    raise AtLimitError(f"takes more than {self.seconds:g} s", True) from None
                name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise AtLimitError(f"ends the process that tries it ({name})") from None
            except BaseException:  # Such as Ctrl-C: the next request would get this answer.
                self._end()
                raise
        answer = json.loads(answer)
        if "answer" not in answer:
            raise AtLimitError(f"needs more than {self._gib} GiB")
        return answer["answer"]

    def _start(self) -> Connection:
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), str(self._gib)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # A signal to the group of a run lets the run save first.
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
        atexit.register(self._end)
        try:
            _received(self._connection, _START_SECONDS)
        except (EOFError, OSError) as error:
            self._end()
            raise OSError(f"`python -m {self._module}` does not start") from error
        except BaseException:
            self._end()
            raise
        return self._connection

    def _end(self) -> int:
        """Ends the process, and returns its exit code, or the negative number of its signal."""
        atexit.unregister(self._end)
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)  # An idle process ends when the connection closes.
        process.kill()
        return process.wait()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answers requests until the connection closes, whose descriptor is an argument."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, int(sys.argv[2]) * 2**30)
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(EOFError, OSError), Connection(int(sys.argv[1])) as connection:
        connection.send_bytes(b"ready")
        while True:
            seconds, request = pickle.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)  # Its signal ends the process.
            try:
                result = json.dumps({"answer": answer(request)}).encode()
            except MemoryError:
                result = b"{}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(result)


def _received(connection: Connection, seconds: float) -> bytes:
    """Receives a message.

    Raises:
      EOFError: the other side ended.
      TimeoutError: no message came in time.
    """
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv_bytes()


def _limit(kind: int, value: int) -> None:
    """Lowers a limit of this process, if the system has it."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))
