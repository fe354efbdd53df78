"""Plants known bugs one at a time and checks that the tests catch them.

`python -m benchmarks.planted_bugs` copies the repository for each bug of `planted_bugs.toml`,
plants the bug in the copy and runs the tests that should fail. A bug survives if these tests pass:
then no test covers that behavior, or only a test that the table does not name. `--clean` runs the
same tests without a bug. Bugs whose result is in `--out` are not run again.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import tyro

from benchmarks import command, record
from benchmarks.tables import print_cells
from benchmarks.variants import check_names

TABLE = pathlib.Path(__file__).with_suffix(".toml")
_SOURCES = ("actjax", "models", "train")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "*.egg-info", "results")
_CLEAN = "clean"
"""First word of the names of rows without a bug."""
_TIMEOUT = 1200
"""Seconds after which a bug counts as caught: a bug can make a test wait forever."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Which bugs to plant, and how to run the tests."""

    only: tuple[str, ...] = ()
    """Names of bugs; all bugs by default."""
    clean: bool = False
    """Run the tests of each area once, without a bug: all must pass."""
    root: pathlib.Path = pathlib.Path(".")
    """Checkout of this repository to copy."""
    results: Annotated[pathlib.Path, tyro.conf.arg(name="out")] = (
        record.RESULTS / "planted_bugs.json"
    )
    """File of results. Rows that it already has are kept."""


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change of a source file that tests should catch."""

    name: str
    area: str
    """The part of the package that it affects."""
    file: str
    """Path of the source file. If it does not exist, the file that contains `old` is used."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Targets of pytest that should fail."""
    effect: str
    """The symptom that a user would see."""


def read_table(path: pathlib.Path = TABLE) -> tuple[list[Bug], dict[str, list[str]]]:
    """Returns the bugs, and the tests of each area.

    Raises:
      ValueError: two bugs have the same name, or the area of a bug is not in the table.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    bugs = [Bug(**{**row, "tests": tuple(row["tests"])}) for row in table["bugs"]]
    for i, bug in enumerate(bugs):
        if bug.name in (former.name for former in bugs[:i]):
            raise ValueError(f"{path}: two bugs have the name {bug.name!r}.")
        if bug.area not in table["areas"]:
            raise ValueError(f"{path}: the area {bug.area!r} of {bug.name!r} is not in `areas`.")
    return bugs, table["areas"]


def find(bug: Bug, tree: pathlib.Path) -> pathlib.Path:
    """Returns the file that a bug changes.

    Raises:
      ValueError: the text does not occur exactly once.
    """
    files = [tree / bug.file]
    if not files[0].exists():
        sources = (p for name in _SOURCES for p in sorted((tree / name).rglob("*.py")))
        files = [p for p in sources if bug.old in p.read_text(encoding="utf-8")]
    count = sum(file.read_text(encoding="utf-8").count(bug.old) for file in files)
    if len(files) != 1 or count != 1:
        raise ValueError(
            f"the bug {bug.name!r} replaces {bug.old!r}, which occurs {count} times in"
            f" {len(files)} file(s) of {tree} instead of once: correct its row."
        )
    return files[0]


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each bug, or for each area with `--clean`."""
    # The tests run on the CPU, so the results describe it.
    jax.config.update("jax_platforms", "cpu")
    table, areas = read_table()
    check_names(config.only, tuple(bug.name for bug in table), "--only")
    bugs = [bug for bug in table if bug.name in (config.only or (bug.name,))]
    for bug in bugs:
        find(bug, config.root)
    tasks = list(_tasks(bugs, config))
    known = [*(bug.name for bug in table), *(f"{_CLEAN} {area}" for area in areas)]
    former = record.read(config.results)["rows"] if config.results.exists() else []
    done = {row["name"]: row for row in former if row["name"] in known}
    waiting = [task for task in tasks if not task.items() <= done.get(task["name"], {}).items()]
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as scratch:
        for task in waiting:
            row = _run(task, config, pathlib.Path(scratch))
            done[row["name"]] = row
            print(f"{row['verdict']:9} {row['seconds']:6.1f} s  {row['name']}", flush=True)
            record.write(config, [done[name] for name in known if name in done])
    return [done[name] for name in known if name in done]


def _tasks(bugs: Sequence[Bug], config: Config) -> Iterator[dict[str, Any]]:
    """Yields the first entries of each row: the bug and the tests."""
    if not config.clean:
        for bug in bugs:
            yield dataclasses.asdict(bug) | {"tests": list(bug.tests)}
        return
    for area in dict.fromkeys(bug.area for bug in bugs):
        tests = sorted({test for bug in bugs if bug.area == area for test in bug.tests})
        yield {"name": f"{_CLEAN} {area}", "area": area, "tests": tests}


def _run(task: dict[str, Any], config: Config, scratch: pathlib.Path) -> dict[str, Any]:
    """Runs the tests in a copy of the tree and returns the row."""
    start, clean = time.monotonic(), "old" not in task
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(config.root, tree, ignore=_LEFT_OUT)
        if not clean:
            bug = Bug(**task)
            file = find(bug, tree)
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        failing = _failing(task["tests"], tree, scratch / "cache", stop=not clean)
    verdicts = ("passed", "failed") if clean else ("survived", "caught")
    seconds = round(time.monotonic() - start, 1)
    return {**task, "verdict": verdicts[bool(failing)], "failing": failing, "seconds": seconds}


def _failing(
    tests: Sequence[str], tree: pathlib.Path, cache: pathlib.Path, *, stop: bool
) -> list[str]:
    """Returns the tests that fail in a tree; only the first one if `stop`.

    Raises:
      RuntimeError: pytest does not find the tests or does not run.
    """
    options = ["-q", "-n0", "-rfE", "--tb=short", "-p", "no:cacheprovider", *["-x"] * stop]
    if all("::" in test for test in tests):
        options += ["-m", "slow or not slow"]  # A test that is named runs.
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree, env=environment, capture_output=True, text=True, check=False,
            timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"timeout after {_TIMEOUT} s"]
    failing = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    # A negative code is a signal, such as a segmentation fault.
    if done.returncode in (1, 2) or done.returncode < 0:
        return failing or [f"pytest ended with {done.returncode}"]
    if done.returncode != 0:
        raise RuntimeError(
            f"pytest ended with {done.returncode} on {' '.join(tests)}:\n{done.stdout[-2000:]}"
            f"{done.stderr[-2000:]}"
        )
    return []


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the number of bugs that are caught in each area, and all other rows."""
    counts = []
    for area in dict.fromkeys(row["area"] for row in rows):
        planted = [row for row in rows if row["area"] == area and "old" in row]
        caught = sum(row["verdict"] == "caught" for row in planted)
        counts.append({"area": area, "caught": f"{caught} of {len(planted)}"})
    print_cells(f"Planted bugs in {config.root}", counts)
    for row in rows:
        if row["verdict"] in ("survived", "failed"):
            print(f"{row['verdict']}: {row['name']} {row['failing']}: {row.get('effect', '')}")


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
