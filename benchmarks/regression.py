"""Whether memory or results have become worse than those of the last commit.

`python -m benchmarks.all --quick`, then `python -m benchmarks.regression`: it compares the files in
`benchmarks/results/quick` with their committed form, row by row, and exits with 1 if a peak, a
temporary memory, a loss or a number of operations is more than 2% larger or missing, if there are
new faults, or if a result is missing or has other settings than the committed one. Times are not
compared: machines differ.
"""

import collections
import dataclasses
import json
import math
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
_WITHOUT_INFLUENCE = ("add", "folder", "jobs", "keep")
"""Settings that change no row."""
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
                f"`--folder` {self.folder} is not a folder: run `benchmarks.all --quick`."
            )
        if not self.most >= 0:
            raise ValueError(f"`--most` must not be negative, got {self.most}.")
        commit = f"{self.against}^{{commit}}"
        command = ["git", "-C", str(self.folder), "rev-parse", "--quiet", "--verify", commit]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise ValueError(f"`--against` {self.against!r} is not a commit of this repository.")


@dataclasses.dataclass(frozen=True)
class Change:
    """A value before and now.

    Attributes:
      place: result, row and value.
      before: as committed.
      now: as measured; None if it is missing.
      counted: whether it is a number of faults.
    """

    place: str
    before: float
    now: float | None
    counted: bool = False

    def is_worse(self, most: float) -> bool:
        """Whether it grew by more than a share; of what is counted, whether it grew at all."""
        # Not `growth > most`, which holds for no NaN.
        return not self.growth <= (0 if self.counted else most)

    @property
    def growth(self) -> float:
        """The growth as a share; infinite from nothing to something and for a missing value."""
        if self.now is None:
            return math.inf
        if self.before:
            return self.now / self.before - 1
        return math.inf if self.now else 0.0


def changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Yields the values of a committed result with those of a new one, and faults of new rows.

    Args:
      name: name of the result.
      before: content of the committed file.
      now: content of the new one.
    """
    rows = {_key(row): row for row in now["rows"]}
    former_rows = {_key(row): row for row in before["rows"]}
    for key in former_rows | rows:
        row, former = rows.get(key, {}), former_rows.get(key, {})
        for value in COMPARED[name]:
            pair = _sizes(former.get(value), row.get(value))
            if pair is not None:
                counted = isinstance(row.get(value), list)
                yield Change(f"{name}: {' '.join(key)}, {value}", *pair, counted)


def _settings(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result["settings"].items() if k not in _WITHOUT_INFLUENCE}


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in _NAMES if name in row)


def _sizes(before: Any, now: Any) -> tuple[float, float | None] | None:
    """Returns what is compared of two values; None if the first says nothing about the second.

    Of lists: how many entries both have, and how many the second has. A fault that another one
    replaces is new.
    """
    if isinstance(now, list):
        known = collections.Counter(map(str, before or ()))
        return float((known & collections.Counter(map(str, now))).total()), float(len(now))
    if before is None:
        return None
    if isinstance(before, list):
        return float(len(before)), None
    return _size(before), None if now is None else _size(now)


def _size(x: Any) -> float:
    """Returns a number of a result, which has NaN and infinity as strings.

    Raises:
      ValueError: it is something else, or negative.
    """
    number = float(x) if x in ("nan", "inf") or type(x) in (int, float) else -1.0
    if number < 0:
        raise ValueError(f"{x!r} is not a number of at least zero")
    return number


def committed(path: pathlib.Path, commit: str) -> dict[str, Any] | None:
    """Returns a result file as a commit has it; None if it has none."""
    here = path.resolve()
    command = ["git", "-C", str(here.parent), "show", f"{commit}:./{here.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return _content(done.stdout, f"{path} of {commit}") if done.returncode == 0 else None


def _content(text: str, where: str) -> dict[str, Any]:
    """Returns the content of a result file. Raises a `ValueError` if it is not one."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: it is not JSON ({error}).") from error
    try:
        _ = content["settings"].items(), content["environment"]["versions"]
        # A list has no `keys`, and is refused here.
        keys = [_key(row) for row in content["rows"] if row.keys()]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: it is not a result of a benchmark.") from error
    twice = [key for key, count in collections.Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{where}: it has two rows of {' '.join(twice[0])!r}.")
    return content


def judge(config: Config) -> None:
    """Compares and prints. Exits with 1 if something is worse or cannot be compared.

    Exits with 2 if there is nothing to compare with.

    Raises:
      ValueError: a file is not a result of a benchmark.
      OSError: a file cannot be read.
    """
    found: list[Change] = []
    skipped = False
    for name in COMPARED:
        path = config.folder / f"{name}.json"
        before = committed(path, config.against)
        if before is None:
            continue
        if not path.exists():
            print(f"{name}: {config.against} has it, {config.folder} does not: not compared")
            skipped = True
            continue
        now = _content(path.read_text(encoding="utf-8", errors="replace"), str(path))
        if _settings(before) != _settings(now):
            print(f"{name}: other settings than those of {config.against}: not compared")
            skipped = True
            continue
        if before["environment"]["versions"] != now["environment"]["versions"]:
            print(f"{name}: other versions of JAX or its companions than in {config.against}")
        try:
            found += changes(name, before, now)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: a value is not a number ({error}).") from error
    if not found and not skipped:
        print(f"nothing compared: {config.against} has no result in {config.folder}")
        sys.exit(2)
    worse = [change for change in found if change.is_worse(config.most)]
    if worse:
        print_table(
            f"worse by more than {config.most:.0%}",
            ("value", "before", "now", "growth"),
            (
                (
                    change.place,
                    f"{change.before:,.4g}",
                    "missing" if change.now is None else f"{change.now:,.4g}",
                    "" if change.now is None else f"{change.growth:+.1%}",
                )
                for change in worse
            ),
        )
    print(f"{len(found)} values compared with {config.against}, {len(worse)} worse")
    sys.exit(int(bool(worse) or skipped))


def main() -> None:
    """Reads the command line and compares. Exits with 2 on a file that is not a result."""
    try:
        judge(tyro.cli(Config, description=__doc__))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
