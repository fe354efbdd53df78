"""Several processes that train together: joining, agreeing, and what only one of them does.

All processes run the same program. A process tells the others here what it alone can know, such as
a signal or a file that it cannot read, so that none waits for a step that never comes.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

HEARTBEAT_SECONDS = 30
"""A process that gives no sign of life for this long is dead."""
JOIN_SECONDS = 120
"""How long processes wait for each other at the start."""

_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_BY_HAND = (
    f"Set {_ADDRESS}=HOST:PORT of the first process, {_COUNT}, and {_INDEX} from 0, in the"
    " environment of each process."
)
_MESSAGE_BYTES = 2**16
"""Longest text that processes tell each other; longer ones are cut."""


@contextlib.contextmanager
def joined(distributed: bool) -> Iterator[None]:
    """Joins the processes of a run, and leaves them at the end. Before JAX uses a device.

    Their number and addresses are those of Slurm, Open MPI, Kubernetes or a TPU pod, which
    `jax.distributed` finds, or of three variables of the environment.

    Args:
      distributed: whether there are several processes.

    Raises:
      ValueError: the environment does not tell them, or they do not come.
    """
    if not distributed:
        yield
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            **_from_environment(),
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"`--distributed`: the processes could not join: {str(error).rstrip('.')}. {_BY_HAND}"
        ) from error
    # JAX takes SIGTERM for itself, and the process would not end by it.
    signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    try:
        yield
    except (ValueError, OSError, ArithmeticError):
        # Bad settings or numbers, which all processes know of.
        jax.distributed.shutdown()
        raise
    # It waits for the others. After any other error they may never come.
    jax.distributed.shutdown()


def _from_environment() -> dict[str, Any]:
    """Returns what the variables of the environment tell; empty if a cluster tells it.

    Raises:
      ValueError: only some of them are set, they are no numbers, or nobody answers.
    """
    values = {name: os.environ.get(name, "") for name in (_ADDRESS, _COUNT, _INDEX)}
    address, count, index = values.values()
    if not count and not index:
        return {}
    if missing := [name for name, value in values.items() if not value]:
        raise ValueError(f"{', '.join(missing)} is not set in the environment")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"{_ADDRESS} must be HOST:PORT, got {address!r}")
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise ValueError(f"{_INDEX} must be from 0 to {_COUNT} - 1, got {index!r} of {count!r}")
    if int(index):
        # JAX ends the process, without an error to catch, if nobody answers.
        _await(host, int(port))
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        # JAX would otherwise look for a cluster, to find the devices of each process.
        "cluster_detection_method": "deactivate",
    }


def _await(host: str, port: int) -> None:
    """Waits until the first process listens."""
    until = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"no process answers at {host}:{port} after {JOIN_SECONDS} s ({error})"
                ) from error
            time.sleep(0.5)


def is_main() -> bool:
    """Returns whether this process writes the files of the run and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Context whose end all processes reach, with an error in all if there was one in any.

    Raises:
      ValueError: a `ValueError` or `OSError` of any process, whose number it tells.
    """
    error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    if jax.process_count() > 1:
        texts = _exchange("" if error is None else f"{error}" or type(error).__name__)
        failed = {i: text for i, text in enumerate(texts) if text}
        if failed:
            i, text = next(iter(failed.items()))
            which = f"process {i} of {len(texts)}: " if len(failed) < len(texts) else ""
            raise ValueError(f"{which}{text}") from error
    elif error is not None:
        raise error


def main_first(function: Callable[[], T]) -> T:
    """Returns what a function returns, in the first process before the others.

    So the others find files that it makes. Not within `failing_together`.

    Raises:
      ValueError: as for `failing_together`.
    """
    result: Any = None
    with failing_together():
        if is_main():
            result = function()
    if jax.process_count() > 1:
        with failing_together():
            if not is_main():
                result = function()
    return result


def check_equal(settings: Mapping[str, Any]) -> None:
    """Raises a `ValueError` in all processes if they differ in a setting, which it names."""
    if jax.process_count() == 1:
        return
    mine = {}
    for name, value in settings.items():
        text = json.dumps(value, sort_keys=True, default=str)
        mine[name] = hashlib.sha256(text.encode()).hexdigest()
    theirs = [json.loads(text) for text in _exchange(json.dumps(mine))]
    for name in dict.fromkeys(name for process in theirs for name in process):
        digests = [process.get(name) for process in theirs]
        if len(set(digests)) > 1:
            other = next(i for i, digest in enumerate(digests) if digest != digests[0])
            raise ValueError(
                f"the processes of this run differ in {name}: process {other} has another than"
                f" process 0. Start all with the same (here: {str(settings[name])[:200]})."
            )


def check_shared(folder: pathlib.Path) -> None:
    """Raises a `ValueError` in all processes unless all see the same folder."""
    if jax.process_count() == 1:
        return
    name = _exchange(f".shared-{uuid.uuid4().hex}")[0]
    with failing_together():
        if is_main():
            (folder / name).touch()
    with failing_together():
        if not (folder / name).exists():
            raise ValueError(
                f"`--out` {folder} is another folder than that of process 0: give all processes the"
                " same folder, on a file system that they share."
            )
    if is_main():
        (folder / name).unlink()


def _exchange(text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    padded = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    gathered: Any = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [bytes(x).rstrip(b"\0").decode(errors="replace") for x in gathered]


class Agreement:
    """Whether any process wants to stop, without waiting for the step that runs.

    Every process calls `any` once a step. The answer is about the flags of the step before, which
    are known by then, and it is the same in all processes.
    """

    def __init__(self) -> None:
        count = jax.process_count()
        self._pending: jax.Array | None = None
        if count > 1:
            first = {d.process_index: d for d in reversed(jax.devices())}
            mesh = Mesh(np.array([first[i] for i in range(count)]), ("process",))
            self._each = NamedSharding(mesh, PartitionSpec("process"))
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def any(self, flag: bool) -> bool:
        """Returns whether a process has set its flag."""
        if jax.process_count() == 1:
            return flag
        known = self._pending is not None and bool(self._pending)
        mine = np.asarray([flag], np.int32)
        flags = jax.make_array_from_process_local_data(self._each, mine)
        self._pending = self._largest(flags)
        return known


def place(x: Any, sharding: NamedSharding, parts: int = 1) -> jax.Array:
    """Returns an array over the devices of all processes.

    Args:
      x: the whole array; or the part of its leading axis that this process has.
      sharding: of the result.
      parts: how many equal parts the leading axis has.
    """
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    array = np.asarray(x)
    shape = array.shape if parts == 1 else (len(array) * parts, *array.shape[1:])
    return jax.make_array_from_process_local_data(sharding, array, shape)


def code_digest() -> str:
    """Returns a hash of the source of the program and its packages."""
    root, digest = pathlib.Path(__file__).parents[2], hashlib.sha256()
    for package in ("actjax", "models", "train"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
