"""A queue of measurements for a GPU that is there for minutes.

Each part runs in its own process within a time limit, and is written when it is done. Parts that
are done are skipped the next time, so that a killed run loses one part at most.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.gpu.steps import Rows, attempt

_LIMIT, _DRY_LIMIT = 1.5, 60.0
"""A part may take as many times the seconds that it is expected to take on a GPU."""


class Part(NamedTuple):
    """A measurement, by its name on the command line and in the results."""

    name: str
    seconds: float
    """The time that it is expected to take on a GPU."""
    measure: Callable[[bool], Rows]
    """`measure(dry)` returns rows. A dry run has no GPU; each row names under `checked` its
    checks."""
    memory_gib: float = 0
    """GiB that its allocator may take on a GPU; 0 for all."""


Command = Callable[[Part, pathlib.Path, bool], list[str]]
"""Returns a command that runs `run_part` in another process."""


def command_of(part: Part, path: pathlib.Path, dry: bool) -> list[str]:
    """Is the command of the queue."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--results", str(path)]
    return command + ["--dry-run"] * dry


def run_part(part: Part, path: pathlib.Path, dry: bool) -> None:
    """Measures a part, and writes its rows with the machine, or an error in one line."""
    measured = attempt(lambda: {"rows": part.measure(dry), "environment": record.environment()})
    record.save(path, measured)


def run(
    parts: Sequence[Part],
    results: pathlib.Path,
    *,
    minutes: float,
    again: Sequence[str] = (),
    command: Command = command_of,
) -> None:
    """Measures the parts that are not done, in their order; those that failed before come last.

    Args:
      parts: the measurements.
      results: the file of all parts: under `parts`, by name, the `rows` of a part with its
        `environment`, or its `failure`, and the `seconds` that it took.
      minutes: time for all. A part that needs more than what remains is left for the next time.
      again: names of parts to measure although they are done.
      command: the command of a part.
    """
    content: Any = {"environment": {}, "parts": {}}
    if results.exists():
        content = record.read(results)
    end, former = time.monotonic() + 60 * minutes, dict(content["parts"])
    for part in sorted(parts, key=lambda part: "failure" in former.get(part.name, {})):
        if "failure" not in former.get(part.name, {"failure": ""}) and part.name not in again:
            commit = former[part.name]["environment"]["commit"]
            print(f"{part.name}: done at {commit}; `--again {part.name}` measures it again")
            continue
        remaining = end - time.monotonic()
        if part.seconds > remaining:
            print(f"{part.name}: left for the next time, {remaining:.0f} of {part.seconds:g} s")
            continue
        result = _measured(part, min(_LIMIT * part.seconds, remaining), False, command)
        rows = result.get("rows", [])
        if rows and all("failure" in row for row in rows):
            result["failure"] = rows[0]["failure"]  # It is not done.
        content["parts"][part.name] = result
        content["environment"] = result.get("environment", content["environment"])
        record.save(results, content)
        failed = sum("failure" in row or not row.get("ok", True) for row in rows)
        times = [f"{x['name']} {1e3 * x['median']:.1f} ms" for x in rows if "median" in x]
        summary = "; ".join([f"{len(rows)} rows, {failed} of them failed", *times])
        outcome = result.get("failure", summary)
        print(f"{part.name}: {outcome}, {result['seconds']:.0f} s", flush=True)


def dry_run(parts: Sequence[Part], command: Command = command_of) -> bool:
    """Checks each part without a GPU, and prints a line for it; returns whether all is well."""
    failures = 0
    for part in parts:
        result = _measured(part, _DRY_LIMIT * part.seconds, True, command)
        checked = "; ".join(row["checked"] for row in result.get("rows", ()))
        outcome = f"{result.get('failure', checked)} [{result['seconds']:.0f} s here]"
        print(f"{part.name} ({part.seconds:g} s on a GPU): {outcome}", flush=True)
        failures += "failure" in result
    return failures == 0


def _measured(part: Part, limit: float, dry: bool, command: Command) -> dict[str, Any]:
    """Runs a part in another process; returns what it wrote, or an error, and its seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        path, log = pathlib.Path(name, "part.json"), pathlib.Path(name, "log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                command(part, path, dry), stdout=output, stderr=output,
                env=_environment(part, dry), start_new_session=True,
            )  # fmt: skip
        try:
            code = child.wait(timeout=limit)
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            why = " ".join([f"ended with {code}:", *last])[:300]
        except subprocess.TimeoutExpired:
            why = f"took more than {limit:.0f} seconds"
        finally:
            # With all that it started, also where this process is interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        # A part that wrote its rows and then died has rows.
        result = record.read(path) if path.exists() else {"failure": why}
    return result | {"seconds": time.monotonic() - begin}


def _environment(part: Part, dry: bool) -> dict[str, str]:
    """Returns the environment of a part. All parts share compiled programs, also the next time."""
    result = {
        "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(tempfile.gettempdir(), "actjax-programs")),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        **os.environ,
    }
    if dry:
        return result | {"JAX_PLATFORMS": "cpu"}
    if part.memory_gib:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        mebibytes = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        share = part.memory_gib * 1024 / float(mebibytes.split()[0])
        result["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.5f}"
    return result
