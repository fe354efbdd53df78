"""Measurements on a GPU, in a queue; needs no grain and no TensorFlow.

`python -m benchmarks.gpu --queue` measures, in ten minutes, what is missing in `--results`: each
part in its own process, within a time limit, written when it is done and skipped the next time.
First come checks of every kernel in Triton against its definition, steps and a profile, then blocks
of programs, times of kernels, and questions that were measured once. `--queue --dry-run` needs no
GPU: it compiles the steps for an H100 (extra `compile`), interprets kernels on small shapes, and
profiles a small model.
"""

import dataclasses
import math
import pathlib
import shutil
import sys
from typing import Any

import tyro

from benchmarks import record
from benchmarks.gpu import queue
from benchmarks.gpu.parts import PARTS
from benchmarks.variants import check_names

NAMES = tuple(part.name for part in PARTS)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    queue: bool = False
    """Measure the parts that are not done."""
    dry_run: bool = False
    """Check each part as far as a machine without a GPU can; nothing is written."""
    minutes: float = 10
    """Time for all parts. One that needs more than what remains is left for the next time."""
    only: tuple[str, ...] = NAMES
    """Parts to measure."""
    again: tuple[str, ...] = ()
    """Parts to measure although they are done."""
    part: str = ""
    """Measure one part in this process, and write it to `--results`: the queue starts this."""
    results: pathlib.Path = record.RESULTS / "gpu_queue.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        for flag in ("only", "again"):
            check_names(getattr(self, flag), NAMES, f"--{flag}")
        check_names((self.part,), ("", *NAMES), "--part")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"`--minutes` must be above 0, got {self.minutes:g}.")
        if not (self.queue or self.part):
            raise ValueError("give `--queue`, with `--dry-run` where there is no GPU.")


def run(config: Config) -> bool:
    """Does what the settings ask for; returns whether all is well."""
    parts = [part for part in PARTS if part.name in config.only]
    if config.part:
        queue.run_part(PARTS[NAMES.index(config.part)], config.results, config.dry_run)
    elif config.dry_run:
        return queue.dry_run(parts)
    elif shutil.which("nvidia-smi") is None:
        sys.exit("error: there is no NVIDIA GPU here (`nvidia-smi`): add `--dry-run`.")
    else:
        queue.run(parts, config.results, minutes=config.minutes, again=config.again)
    return True


def main() -> None:
    """Runs what the command line asks for."""
    options: Any = {"description": __doc__, "config": (tyro.conf.OmitArgPrefixes,)}
    config = tyro.cli(Config, prog="python -m benchmarks.gpu", **options)
    sys.exit(0 if run(config) else 1)


if __name__ == "__main__":
    main()
