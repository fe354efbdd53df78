"""Raw results: a JSON file with the machine, the versions and the commit beside the figures."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Returns what the figures were measured on and with."""
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
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    here = pathlib.Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write(path: pathlib.Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes one result file.

    Args:
      path: where to.
      settings: shapes, dtypes and options of the measurement.
      rows: one entry a rival.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    print(f"wrote {path}")
