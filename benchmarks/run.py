"""Benchmarks that need no GPU in one command, and whether their results have become worse.

`python -m benchmarks.run --quick` runs each in small, in about ten minutes on two cores, and writes
to `benchmarks/results/quick`. `--full` runs them as they are committed, which takes hours, and
writes to `benchmarks/results`. Both write the page of tables, as `benchmarks.render` does.

`--compare` compares the quick results with those of the last commit, row by row, and exits with 1
if a peak, a temporary memory, the traffic of a step, a loss or a number of operations is more than
2% larger or missing, if there are new faults, or if a result is missing or has other settings.
Times are not compared: machines differ.
"""

import collections
import dataclasses
import json
import math
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import tyro

from benchmarks import command, record, render
from benchmarks.record import RESULTS
from benchmarks.tables import print_cells
from benchmarks.variants import check_names

QUICK = RESULTS / "quick"
_MOST = 0.02
"""Largest growth that is not a loss."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments of a benchmark in a quick and in a full run; None if it has no such run."""

    module: str
    quick: tuple[str, ...] | None = None
    full: tuple[str, ...] | None = ()


JOBS = {
    "ladder": Job(
        "benchmarks.ladder",
        ("--steps", "40", "--batch-size", "4", "--evaluations", "4", "--eval-batches", "2"),
    ),
    "memory": Job(
        "benchmarks.memory",
        ("--only", "plain", "jax.checkpoint, full", "exact", "lean", "lean, 4-bit and factored"),
    ),
    "memory_h100": Job(
        "benchmarks.memory",
        full=("--model", "llama_1b", "--batch-size", "8", "--seq-len", "1024", "--weight-dtype",
              "bfloat16", "--compute-dtype", "bfloat16", "--device", "h100"),
    ),
    "traffic": Job(
        "benchmarks.traffic",
        ("--only", "exact", "remat, 8-bit states, in backward", "lean", "lean_subspace d/4"),
    ),
    "triton_kernels": Job(
        "benchmarks.triton_kernels",
        ("--cases", "llama_1b block input, 4 bits, normal levels, balanced, rotated"),
    ),
    "soak": Job(
        "benchmarks.soak",
        ("--steps", "200", "--kills", "3", "--save-every", "20", "--vocab-size", "512"),
    ),
    "start": Job("benchmarks.start"),
}  # fmt: skip
"""By the names of their results. Runs that take hours are not among them: their commands stand
next to their tables in `docs/results/quality.md`."""

COMPARED = {
    "memory": ("peak", "forward_and_backward", "matmul_flops"),
    "ladder": ("peak", "matmul_flops", "loss"),
    "soak": ("faults",),
    "traffic": ("moved",),
}
"""Values of the rows of each result: less is better. Lists count by their length."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run each benchmark in small."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run each benchmark as its committed result was made."""
    compare: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare the quick results with those of the last commit."""
    only: tuple[str, ...] = tuple(JOBS)
    """Benchmarks to run, by the names of their results."""

    def __post_init__(self) -> None:
        if self.quick + self.full + self.compare != 1:
            raise ValueError("give one of `--quick`, `--full` and `--compare`.")
        check_names(self.only, tuple(JOBS), "--only")


def run(config: Config) -> list[dict[str, str]]:
    """Runs the benchmarks, each in a new process, and returns how they ended."""
    folder = QUICK if config.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    ended = []
    for name in config.only:
        arguments = JOBS[name].quick if config.quick else JOBS[name].full
        if arguments is None:
            continue
        line = ["-m", JOBS[name].module, *arguments, "--results", str(folder / f"{name}.json")]
        print(f"\n{name}: {shlex.join(line)}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, *line], env=command.environment(), check=False)
        state = "failed" if done.returncode else "done"
        ended.append({"benchmark": name, "": state, "s": f"{time.monotonic() - began:.0f}"})
    return ended


class Change(NamedTuple):
    """A value before and now; infinite if it is missing. Any growth of a count is a loss."""

    place: str
    before: float
    now: float
    is_count: bool = False

    def is_worse(self) -> bool:
        """Whether it grew by more than 2%."""
        # Not `>`, which holds for no NaN.
        return not self.now <= self.before * (1 if self.is_count else 1 + _MOST)


def changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Yields the values of a committed result with those of a new one, and faults of new rows."""
    rows_before, rows_now = (
        {str(row.get("rival", row.get("processes"))): row for row in result["rows"]}
        for result in (before, now)
    )
    for key in rows_before | rows_now:
        for value in COMPARED[name]:
            a, b = rows_before.get(key, {}).get(value), rows_now.get(key, {}).get(value)
            place = f"{name}: {key}, {value}"
            if isinstance(a, list) or isinstance(b, list):
                # A fault that another one replaces is new.
                known, present = (collections.Counter(map(str, x or ())) for x in (a, b))
                count = math.inf if b is None else present.total()
                yield Change(place, (known & present).total(), count, True)
            elif a is not None:
                yield Change(place, float(a), math.inf if b is None else float(b))


def compare(folder: pathlib.Path = QUICK) -> bool:
    """Prints the values that are worse than in a commit.

    Returns:
      Whether a value is worse, or a result cannot be compared.

    Raises:
      ValueError: the last commit has no result of the folder.
    """
    compared: list[Change] = []
    is_skipped = False
    for name in COMPARED:
        path = folder / f"{name}.json"
        show = ["git", "-C", str(folder), "show", f"HEAD:./{path.name}"]
        done = subprocess.run(show, capture_output=True, text=True, check=False)
        if done.returncode:
            continue
        before, now = json.loads(done.stdout), record.read(path) if path.exists() else {}
        # Whether rows were added to others changes no row.
        settings = [x.get("settings", {}) | {"add": None} for x in (before, now)]
        if settings[0] != settings[1]:
            print(f"{name}: missing, or with other settings than those of the last commit")
            is_skipped = True
            continue
        if before["environment"]["versions"] != now["environment"]["versions"]:
            print(f"{name}: other versions of JAX or its companions than in the last commit")
        compared += changes(name, before, now)
    if not compared and not is_skipped:
        raise ValueError(f"the last commit has no result in {folder}.")
    worse = [change for change in compared if change.is_worse()]
    if worse:
        cells = [{"value": x.place, "before": f"{x.before:,.4g}", "now": f"{x.now:,.4g}"}
                 for x in worse]  # fmt: skip
        print_cells(f"worse by more than {_MOST:.0%}", cells)
    print(f"{len(compared)} values compared with the last commit, {len(worse)} worse")
    return bool(worse) or is_skipped


def main() -> None:
    """Runs or compares. Exits with 1 if something failed or is worse."""
    config = tyro.cli(Config, description=__doc__)
    if config.compare:
        try:
            sys.exit(compare())
        except ValueError as error:
            sys.exit(f"error: {error}")
    ended = run(config)
    print_cells("benchmarks", ended)
    render.main()
    sys.exit(any(row[""] == "failed" for row in ended))


if __name__ == "__main__":
    main()
