"""Whether memory or results have become worse than those of the last commit.

`python -m benchmarks.all --quick`, then `python -m benchmarks.regression`: it compares the files in
`benchmarks/results/quick` with their committed form, row by row, and exits with 1 if a peak, a
temporary memory, a loss or a number of operations is more than 2% larger, or if there are new
faults. Times are not compared: machines differ.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import tyro

from benchmarks.record import RESULTS
from benchmarks.tables import print_table

COMPARED = {
    "memory": ("peak", "forward_and_backward", "matmul_flops"),
    "ladder": ("peak", "matmul_flops", "loss"),
    "random_arrays": ("faults",),
    "malformed": ("faults",),
    "soak": ("differences", "leftovers", "faults"),
}
"""Values of the rows of each result: less is better. Lists count by their length."""
_NAMES = ("rival", "kind", "content", "what", "number", "processes")
"""Fields that tell which rows belong together."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare."""

    folder: pathlib.Path = RESULTS / "quick"
    """Results to judge."""
    against: str = "HEAD"
    """Commit of the results to compare with."""
    most: float = 0.02
    """Largest growth that is not a loss."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ValueError(
                f"`--folder` {self.folder} is no folder: run `benchmarks.all --quick`."
            )
        if not self.most >= 0:
            raise ValueError(f"`--most` must not be negative, got {self.most}.")


@dataclasses.dataclass(frozen=True)
class Change:
    """A value before and now.

    Attributes:
      place: result, row and value.
      before: as committed.
      now: as measured.
    """

    place: str
    before: float
    now: float

    @property
    def growth(self) -> float:
        """The growth as a share; infinite from nothing to something."""
        if self.before:
            return self.now / self.before - 1
        return float("inf") if self.now else 0.0


def changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Yields the values that two results of one benchmark have in common.

    Args:
      name: name of the result.
      before: content of the committed file.
      now: content of the new one.
    """
    known = {_key(row): row for row in before["rows"]}
    for row in now["rows"]:
        former = known.get(_key(row))
        for value in COMPARED[name] if former else ():
            pair = (_size(former.get(value)), _size(row.get(value)))  # type: ignore[union-attr]
            if None not in pair:
                yield Change(f"{name}: {' '.join(_key(row))}, {value}", *pair)  # type: ignore[arg-type]


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in _NAMES if name in row)


def _size(value: Any) -> float | None:
    return None if value is None else float(len(value) if isinstance(value, list) else value)


def committed(path: pathlib.Path, commit: str) -> dict[str, Any] | None:
    """Returns a result file as a commit has it; None if it has none."""
    here = path.resolve()
    command = ["git", "-C", str(here.parent), "show", f"{commit}:./{here.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def judge(config: Config) -> None:
    """Compares and prints. Exits with 1 if something is worse, with 2 if nothing is compared."""
    found: list[Change] = []
    for name in COMPARED:
        path = config.folder / f"{name}.json"
        before = committed(path, config.against) if path.exists() else None
        if before is None:
            continue
        now = json.loads(path.read_text())
        if before["settings"] != now["settings"]:
            print(f"{name}: other settings than those of {config.against}: not compared")
            continue
        if before["environment"]["versions"] != now["environment"]["versions"]:
            print(f"{name}: other versions of JAX or its companions than in {config.against}")
        found += changes(name, before, now)
    if not found:
        print(f"nothing to compare: no result of {config.folder} is in {config.against}")
        sys.exit(2)
    # Not `growth > most`, which holds for no NaN.
    worse = [change for change in found if not change.growth <= config.most]
    if worse:
        print_table(
            f"worse by more than {config.most:.0%}",
            ("value", "before", "now", "growth"),
            ((c.place, f"{c.before:,.4g}", f"{c.now:,.4g}", f"{c.growth:+.1%}") for c in worse),
        )
    print(f"{len(found)} values compared with {config.against}, {len(worse)} worse")
    sys.exit(int(bool(worse)))


if __name__ == "__main__":
    judge(tyro.cli(Config, description=__doc__))
