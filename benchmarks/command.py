"""A benchmark as a command: reads settings, then measures, prints and writes rows."""

from collections.abc import Callable
from typing import Any

import tyro

from benchmarks import record


def run(
    config_type: type,
    description: str | None,
    measure: Callable[[Any], list[dict[str, Any]]],
    show: Callable[[Any, list[dict[str, Any]]], None],
) -> None:
    """Runs a benchmark with the settings of the command line.

    Args:
      config_type: a dataclass of settings, with the path `results`.
      description: first lines of `--help`.
      measure: a function from settings to rows.
      show: prints the rows.
    """
    config = tyro.cli(config_type, description=description, config=(tyro.conf.OmitArgPrefixes,))
    rows = measure(config)
    record.write(config, rows)
    show(config, rows)
