"""A benchmark as a command: reads settings, then measures, prints and writes rows."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

from benchmarks import record

T = TypeVar("T")


def run(
    config_type: type,
    description: str | None,
    measure: Callable[[Any], list[dict[str, Any]]],
    show: Callable[[Any, list[dict[str, Any]]], None],
) -> None:
    """Runs a benchmark with the settings of the command line."""
    config = settings(config_type, description)
    rows = measure(config)
    record.write(config, rows)
    show(config, rows)


def settings(config_type: type[T], description: str | None) -> T:
    """Returns the settings of the command line. Exits with 2 if the results cannot be written."""
    config: Any = tyro.cli(
        config_type, description=description, config=(tyro.conf.OmitArgPrefixes,)
    )
    path = config.results
    if path.is_dir():
        _fail(f"`--results` {path} is a folder: name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"`--results` {path} cannot be written: {error.strerror}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        _fail(f"`--results` {path} cannot be written: permission denied.")
    return config


def environment() -> dict[str, str]:
    """Returns the environment of a program that a benchmark starts.

    On a machine without an NVIDIA GPU it says so: otherwise JAX's plugin for GPUs, where it is
    installed, prints a traceback.
    """
    variables = dict(os.environ)
    if not os.path.exists("/dev/nvidia0"):
        variables.setdefault("JAX_PLATFORMS", "cpu")
    return variables


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
