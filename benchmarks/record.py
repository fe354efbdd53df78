"""Raw results: JSON files with figures, machine, versions and commit."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Returns the machine, versions, flags of XLA and commit of a measurement."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "platform": device.platform,
        "device": device.device_kind,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _commit() -> str:
    """Returns the commit, with "-dirty" if files other than results differ from it."""

    def git(*command: str) -> str:
        here = pathlib.Path(__file__).parent
        run = subprocess.run(
            ["git", *command], cwd=here, capture_output=True, text=True, check=False
        )
        return run.stdout.strip()

    name = git("describe", "--always")
    changed = git("status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)benchmarks/results")
    return f"{name}-dirty" if name and changed else name or "unknown"


def write(config: Any, rows: list[dict[str, Any]], **extra: Any) -> None:
    """Writes a result file to `config.results`.

    Args:
      config: settings of the measurement, a dataclass.
      rows: an entry for each step, case or run.
      **extra: other results.
    """
    settings = dataclasses.asdict(config)
    path = settings.pop("results")
    save(path, {"environment": environment(), "settings": settings, **extra, "rows": rows})
    print(f"wrote {path}")


def save(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file of JSON whole or not at all: a kill must not lose its former content."""
    text = json.dumps(_plain(content), indent=2, default=str, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content of a result file."""
    return json.loads(path.read_text())


def rows_to_keep(path: pathlib.Path, add: bool) -> list[dict[str, Any]]:
    """Returns the rows of a result file, each with its commit; none without `add` or a file."""
    if not add or not path.exists():
        return []
    former = read(path)
    return [{"commit": former["environment"]["commit"]} | row for row in former["rows"]]


def _plain(x: Any) -> Any:
    """Returns data as JSON can have it: infinities and NaN as strings, paths as their last name.

    The folders of a machine say nothing about a result.
    """
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, pathlib.Path):
        return x.name
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
