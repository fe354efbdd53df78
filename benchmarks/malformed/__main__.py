"""Malformed inputs of the four programs, drawn at random: each must be refused in one line.

`python -m benchmarks.malformed --count 500 --seed 0` changes valid flags, texts, records,
tokenizers, checkpoints, adapters, meshes and folders of runs at random places. Each program must
exit with 2 and one line that names a flag, without a traceback, and leave all files as they were.
An input that a change leaves valid must run. A run that diverges exits with 1, as documented. The
programs run in forks of this process, which has imported them. It takes about 15 minutes on two
cores, and exits with 1 if there is a fault. `--first 17 --count 1 --keep FOLDER` repeats a case.
"""

import collections
import dataclasses
import functools
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import command, record
from benchmarks.malformed import checkpoints, files, flags, inputs, runs, tokenizers
from benchmarks.malformed.case import CORRECT, FINETUNE, PRETRAIN, Case, Draw, words
from benchmarks.malformed.forks import Child, Ending, start
from benchmarks.malformed.judge import (
    FAULT,
    NOT_FINITE,
    REFUSED,
    VALID,
    digests,
    faults_of,
    is_left,
    message_of,
    verdict,
)
from benchmarks.tables import print_table
from train import evaluate, finetune, plan, pretrain

Programs = Mapping[str, Callable[[], None]]
PROGRAMS: Programs = {
    "pretrain": pretrain.main,
    "finetune": finetune.main,
    "evaluate": evaluate.main,
    "plan": plan.main,
}
KINDS: dict[str, tuple[Draw, ...]] = {
    "flags": flags.DRAWS,
    "texts and records": files.DRAWS,
    "tokenizers": tokenizers.DRAWS,
    "checkpoints": checkpoints.DRAWS,
    "adapters": (checkpoints.adapter,),
    "meshes": runs.MESHES,
    "run folders": runs.RUNS,
}
_XLA_FLAGS = (
    f"--xla_force_host_platform_device_count={runs.DEVICES}",
    # Compilation takes most of the time of a valid run, and its speed does not matter.
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How many inputs to draw."""

    count: int = 500
    """Number of inputs."""
    seed: int = 0
    """Seed of the inputs."""
    first: int = 0
    """Number of the first input: each depends on the seed and its own number alone."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of inputs to draw."""
    check: bool = True
    """Run all correct commands first. Folders of runs need it: a finished run is an input."""
    jobs: int = os.cpu_count() or 1
    """Programs that run at a time."""
    limit: float = 120
    """Seconds of processor time after which a program is killed, which is a fault."""
    keep: pathlib.Path | None = None
    """A new folder to keep all files in. By default a temporary one."""
    results: pathlib.Path = record.RESULTS / "malformed.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("seed", 0), ("first", 0), ("jobs", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`--{name}` must be at least {least}, got {getattr(self, name)}.")
        if not self.limit > 0:
            raise ValueError(f"`--limit` must be above 0, got {self.limit}.")
        unknown = [repr(kind) for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ValueError(
                f"`--kinds` has {unknown[0] if unknown else 'no name'}: choose from"
                f" {', '.join(map(repr, KINDS))}."
            )
        if self.keep is not None and os.path.lexists(self.keep):
            raise ValueError(f"`--keep` {self.keep} exists already: name a new folder.")
        if not self.check and "run folders" in self.kinds:
            raise ValueError("`--no-check` leaves out the runs of the kind 'run folders'.")


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each input."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = (config.keep or pathlib.Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        _set_up_jax(folder / "programs")
        valid = folder / "valid"
        _prepare(valid, config)
        rows = list(run_all(config, PROGRAMS, folder, valid))
    return sorted(rows, key=lambda row: row["number"])


def _set_up_jax(cache: pathlib.Path) -> None:
    """Gives the forks of this process devices, and a common cache of compiled programs."""
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS))
    os.environ.setdefault("NPROC", "8")
    jax.config.update("jax_platforms", "cpu")  # Forks cannot share a GPU, and need none.
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _prepare(valid: pathlib.Path, config: Config) -> None:
    """Writes valid inputs, and runs all correct commands on them."""
    valid.mkdir()
    begin = functools.partial(start, folder=valid, limit=10 * config.limit)
    _succeed(begin(functools.partial(inputs.write, valid), (), name="inputs"), "the inputs")
    if not config.check:
        return
    for program, one, run in (("pretrain", PRETRAIN, "run"), ("finetune", FINETUNE, "tuned")):
        argv = words(one | {"--out": run})
        _succeed(begin(PROGRAMS[program], argv, name=run), shlex.join(argv))
    for program in ("evaluate", "plan"):
        for i, one in enumerate(CORRECT[program]):
            child = begin(PROGRAMS[program], words(one), name=f"{program}-{i}")
            _succeed(child, shlex.join(words(one)))


def _succeed(child: Child, what: str) -> None:
    ending = child.wait()
    if ending.code != 0:
        raise SystemExit(f"{what} failed ({ending.code}):\n{ending.out}\n{ending.err}")


@dataclasses.dataclass
class _Running:
    """A case whose program runs."""

    number: int
    kind: str
    case: Case
    folder: pathlib.Path
    before: dict[str, str]
    child: Child


def draw(config: Config, number: int, folder: pathlib.Path) -> tuple[str, Case]:
    """Returns the kind and the case of a number; changes the inputs in a folder.

    Args:
      config: seed and kinds.
      number: of the case.
      folder: a copy of the valid inputs.
    """
    rng = np.random.default_rng([config.seed, number])
    kind = config.kinds[number % len(config.kinds)]
    draws = KINDS[kind]
    return kind, draws[int(rng.integers(len(draws)))](rng, folder)


def run_all(
    config: Config, programs: Programs, folder: pathlib.Path, valid: pathlib.Path
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all cases, some of which run at a time.

    Args:
      config: what to draw.
      programs: the programs, by name.
      folder: where the cases are.
      valid: the valid inputs.
    """
    left = list(range(config.first, config.first + config.count))[::-1]
    running: list[_Running] = []
    while left or running:
        while left and len(running) < config.jobs:
            number = left.pop()
            place = folder / "cases" / f"{number}" / "folder"
            shutil.copytree(valid, place, symlinks=True)
            kind, case = draw(config, number, place)
            before = digests(place)
            main = programs[case.program]
            child = start(main, case.argv, place, case.program, config.limit, case.locked)
            running.append(_Running(number, kind, case, place, before, child))
        for one in list(running):
            if (ending := one.child.poll()) is not None:
                running.remove(one)
                yield _row(config, programs, valid, one, ending)
        time.sleep(0.02)


def _row(
    config: Config, programs: Programs, valid: pathlib.Path, one: _Running, ending: Ending
) -> dict[str, Any]:
    case, folder = one.case, one.folder
    faults = faults_of(case, ending, one.before, digests(folder))
    if ending.code == 2 and case.new and is_left(folder / case.new):
        faults += _later(programs[case.program], case, valid, folder, config.limit)
    found = verdict(ending, faults)
    if config.keep is None:
        _remove(folder.parent)
    message = message_of(ending.err)
    row = {
        "number": one.number,
        "kind": one.kind,
        "what": case.what,
        "program": case.program,
        "argv": shlex.join(case.argv),
        "code": ending.code,
        "last": "\n".join(message if found != FAULT else ending.err.splitlines()[-12:])[-2000:],
        "verdict": found,
        "faults": faults,
        "seconds": round(ending.seconds, 1),
    }
    if found == FAULT:
        print(f"{one.number} {case.what}: {'; '.join(faults)}\n  {row['argv']}\n  {row['last']}")
    return row


def _later(
    main: Callable[[], None], case: Case, valid: pathlib.Path, folder: pathlib.Path, limit: float
) -> list[str]:
    """Returns a fault if what a refused run left keeps a correct one from its folder."""
    again = folder.parent / "again"
    shutil.copytree(valid, again, symlinks=True)
    assert case.new is not None
    argv = words(CORRECT[case.program][0] | {"--out": str(folder / case.new)})
    ending = start(main, argv, again, "later", limit).wait()
    if ending.code == 0:
        return []
    return [f"leaves files that keep a correct run from its folder: {ending.err[-300:]}"]


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder with what cannot be written in it."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the counts of verdicts by kind, and the faults."""
    counts = collections.Counter((row["kind"], row["verdict"]) for row in rows)
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    columns = (REFUSED, VALID, NOT_FINITE, FAULT)
    cells = [(kind, *(str(counts[kind, column]) for column in columns)) for kind in kinds]
    total = collections.Counter(row["verdict"] for row in rows)
    cells.append(("all", *(str(total[column]) for column in columns)))
    print_table(f"{len(rows)} malformed inputs", ("kind", *columns), cells)
    for row in rows:
        if row["verdict"] == FAULT:
            print(f"{row['number']} {row['what']}: {'; '.join(row['faults'])}")
            print(f"  python -m train.{row['program']} {row['argv']}")


def main() -> None:
    """Draws inputs, runs the programs, and exits with 1 if there is a fault."""
    config = command.settings(Config, __doc__)
    rows = measure(config)
    record.write(config, rows)
    show(rows)
    sys.exit(any(row["verdict"] == FAULT for row in rows))


if __name__ == "__main__":
    main()
