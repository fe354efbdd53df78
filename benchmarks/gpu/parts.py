"""Work divided over processes: units of sections, and a lock for what is timed."""

import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_LOCK, CACHE = "ACTJAX_GPU_LOCK", "JAX_COMPILATION_CACHE_DIR"


_held: list[Any] = []


def wait_to_be_alone() -> None:
    """Waits until no other process of this measurement is timed; the others then wait for this."""
    path = os.environ.get(_LOCK)
    if path is not None and not _held:
        _held.append(open(path, "w"))  # noqa: SIM115
        fcntl.flock(_held[0], fcntl.LOCK_EX)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits as `wait_to_be_alone`, and lets the others go on at the end."""
    wait_to_be_alone()
    try:
        yield
    finally:
        while _held:
            _held.pop().close()


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment of processes that share a folder with a lock and compiled programs.

    Everything that a process compiles is kept, so that another one need not compile it.
    """
    return {
        **os.environ,
        _LOCK: str(folder / "lock"),
        CACHE: os.environ.get(CACHE, str(folder / "programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # The memory of the device is shared.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


Rows = dict[str, list[dict[str, Any]]]


def in_parts(former: Rows, arguments: list[str], processes: int, folder: pathlib.Path) -> Rows:
    """Runs sections in several processes, each a part of every section; returns the new rows.

    A process that ends with an error leaves the rows that it has written.

    Args:
      former: by section, rows that need not be computed again.
      arguments: the command line.
      processes: the number of processes.
      folder: where programs and the lock are shared.
    """
    sections = tuple(former)
    running = []
    for i in range(processes):
        path = folder / f"part_{i}.json"
        path.write_text(json.dumps({**former, "rows": []}))
        command = [
            sys.executable, "-m", "benchmarks.gpu", *arguments, "--sections", *sections,
            "--part", str(i), str(processes), "--processes", "1", "--add", "--results", str(path),
        ]  # fmt: skip
        with open(folder / f"part_{i}.log", "w") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(folder)
            )
        running.append((child, path))
    found: Rows = {section: [] for section in sections}
    for i, (child, path) in enumerate(running):
        if child.wait() != 0:
            log = (folder / f"part_{i}.log").read_text()
            print(f"part {i} ended with {child.returncode}: {log[-1500:]}")
        content = json.loads(path.read_text())
        for section in sections:
            found[section] += [row for row in content[section] if row not in former[section]]
    return found
