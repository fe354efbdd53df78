"""All benchmarks that need no GPU, in one command, and a page with their tables.

`python -m benchmarks.all --quick` runs each in small, in about thirteen minutes on two cores, and
writes to `benchmarks/results/quick`. `--full` runs them as they are committed, which takes hours,
and writes to `benchmarks/results`. `--render` runs nothing. Each of them writes the page
`docs/results/tables.md` from the committed results. Where the code that a result measures has
changed since, the page says so.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import tyro

from benchmarks import command, record, staleness
from benchmarks.jobs import JOBS, Job
from benchmarks.ladder_figure import draw
from benchmarks.report import markdown
from benchmarks.tables import Cells, print_table

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results" / "tables.md"
QUICK = record.RESULTS / "quick"


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run each benchmark in small."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run each benchmark as its committed result was made."""
    render: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run nothing, and write the page."""
    only: tuple[str, ...] | None = None
    """Benchmarks to run, by the names of their results; all of them by default."""

    def __post_init__(self) -> None:
        if self.quick + self.full + self.render != 1:
            raise ValueError("give one of `--quick`, `--full` and `--render`.")
        if self.only is None:
            return
        known = {job.name: job for job in JOBS}
        names = f"Choose from {', '.join(known)}."
        if self.render or not self.only:
            problem = "is of no use with `--render`." if self.render else f"needs a name. {names}"
            raise ValueError(f"`--only` {problem}")
        for name in self.only:
            if name not in known:
                raise ValueError(f"`--only` has {name!r}, which is not a benchmark. {names}")
            if self.arguments(known[name]) is None:
                mode = "quick" if self.quick else "full"
                raise ValueError(
                    f"`--only` has {name!r}, which has no run with `--{mode}`:"
                    f" `python -m {known[name].module}` runs it."
                )

    def arguments(self, job: Job) -> Sequence[str] | None:
        """Returns the arguments of a benchmark; None if it is not among those to run."""
        if self.render or (self.only is not None and job.name not in self.only):
            return None
        return job.quick if self.quick else job.full


def run(job: Job, arguments: Sequence[str], folder: pathlib.Path) -> tuple[bool, float]:
    """Runs a benchmark in a new process; its output goes to the terminal.

    Returns:
      Whether it ended well, and its seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = ["--results", str(folder / f"{job.name}.json")]
    line = [sys.executable, "-m", job.module, *arguments, *results]
    print(f"\n{job.name}: {shlex.join(line[1:])}", flush=True)
    began = time.monotonic()
    done = subprocess.run(line, env=command.environment(), check=False)
    return done.returncode == 0, time.monotonic() - began


def page(folders: Sequence[tuple[str, pathlib.Path]]) -> str:
    """Returns the page of all tables.

    Args:
      folders: names of folders of results, and where they are.
    """
    parts = [
        "# Tables",
        "Written by `python -m benchmarks.all`. Raw results name machine, versions, settings and"
        "\ncommit. A result whose code has changed since is marked as stale.",
    ]
    for name, folder in folders:
        parts.append(f"## {name}")
        for job in JOBS:
            path = folder / f"{job.name}.json"
            if path.exists():
                parts += _section(job, record.read(path), path)
    return "\n\n".join(parts) + "\n"


def _section(job: Job, result: dict[str, Any], path: pathlib.Path) -> list[str]:
    where = result["environment"]
    relative = path.relative_to(record.RESULTS.parents[1])
    versions = f"JAX {where['versions']['jax']}, Python {where['python']}"
    made = (
        f"[{path.name}](../../{relative}): {where['device']}, {where['cores']} cores, {versions},"
        f" commit {where['commit']}, {where['date'][:10]}."
    )
    stale = staleness.note(result, job.sources)
    parts = [f"### {job.title}", made]
    if stale:
        parts.append(f"**{stale}**")
    if job.needs:
        parts.append(f"It needs {job.needs}.")
    parts.append(_markdown(job.table(result)))
    figure = path.with_suffix(".png")
    if job.name == "ladder":
        draw(result, figure)
        parts.append(f"![Memory, time and loss of each rung](../../{relative.with_suffix('.png')})")
    return parts


def _markdown(table: Cells) -> str:
    if not table:
        return "No rows."
    return markdown(list(table[0]), [list(row.values()) for row in table])


def main() -> None:
    """Reads the command line, runs, and writes the page. Exits with 1 if a benchmark failed."""
    config = tyro.cli(Config, description=__doc__)
    done = []
    for job in JOBS:
        if (arguments := config.arguments(job)) is None:
            continue
        well, seconds = run(job, arguments, QUICK if config.quick else record.RESULTS)
        done.append((job.name, "done" if well else "failed", f"{seconds:.0f}"))
    PAGE.write_text(page([("Full runs", record.RESULTS), ("Quick runs", QUICK)]), encoding="utf-8")
    if done:
        total = sum(float(seconds) for *_, seconds in done)
        print_table(f"{total / 60:.1f} minutes", ("benchmark", "", "s"), done)
    print(f"wrote {PAGE}")
    sys.exit(any(state == "failed" for _, state, _ in done))


if __name__ == "__main__":
    main()
