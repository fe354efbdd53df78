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


def in_parts(
    sections: tuple[str, ...], arguments: list[str], processes: int, folder: pathlib.Path
) -> dict[str, list[dict[str, Any]]]:
    """Runs sections in several processes, each a part of every section; returns all rows.

    A process that ends with an error leaves the rows that it has written.
    """
    running = []
    for i in range(processes):
        path = folder / f"part_{i}.json"
        path.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "benchmarks.gpu", *arguments, "--sections", *sections,
            "--part", str(i), str(processes), "--processes", "1", "--results", str(path),
        ]  # fmt: skip
        with open(folder / f"part_{i}.log", "w") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(folder)
            )
        running.append((child, path))
    found: dict[str, list[dict[str, Any]]] = {section: [] for section in sections}
    for i, (child, path) in enumerate(running):
        if child.wait() != 0:
            log = (folder / f"part_{i}.log").read_text()
            print(f"part {i} ended with {child.returncode}: {log[-1500:]}")
        content = json.loads(path.read_text()) if path.exists() else {}
        for section in sections:
            found[section] += content.get(section, [])
    return found
