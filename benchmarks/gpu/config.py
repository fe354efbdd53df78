"""Settings of the measurements on a GPU."""

import dataclasses
import math
import pathlib
from typing import Literal, get_args

import jax

from actjax.kernels.dispatch import Kernel
from benchmarks import record
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.rivals import RIVALS
from benchmarks.variants import check_names
from models import preset

Section = Literal[
    "kernels", "operators", "determinism", "programs", "times", "updates", "steps"
]  # fmt: skip
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    sections: tuple[Section, ...] = SECTIONS
    """Sections to run. `programs` compiles what the later ones time, so that no program is compiled
    beside one that is timed."""
    only: tuple[str, ...] = tuple(KERNELS)
    """Kernels to check and time."""
    cases: tuple[str, ...] = ("",)
    """Only cases of kernels whose names have one of these parts."""
    models: tuple[str, ...] = ("llama_1b",)
    """Models whose whole steps are timed."""
    rivals: tuple[str, ...] = (
        "plain",
        "jax.checkpoint, dots",
        "jax.checkpoint, full",
        "jax.checkpoint, dots offloaded",
        "exact",
        "pamm",
        "low_rank 32",
        "subspace d/4",
        "subspace d/16",
        "gact, 4 bits",
        "quantized, 4 bits",
        "compressed_remat",
        "lean",
        "lean, 4-bit and factored",
        "lean, states on the host",
        "lean_subspace d/4",
    )
    """Rivals of `determinism` and `steps`, from `benchmarks.rivals`; ratios are to the first."""
    batch_size: int = 8
    """Sequences in a step."""
    seq_len: int = 1024
    """Tokens in a sequence."""
    warmup: int = 3
    """Steps that are not timed."""
    steps: int = 12
    """Timed steps of a rival in a round."""
    rounds: int = 1
    """Rounds over all rivals."""
    memory_gib: float = 0
    """GiB that a whole step may take; 0 for all. A step that runs within it needs no more."""
    seconds: float = 180
    """Longest time of a rival in a round, in seconds."""
    processes: int = 1
    """Processes that check, trace and compile at once. Only one of them is timed at a time."""
    part: tuple[int, int] | None = None
    """Which of how many parts of the checks and times to run, counted from 0; None for all."""
    add: bool = False
    """Keep what `--results` has: only what is missing or failed is run."""
    results: pathlib.Path = record.RESULTS / "gpu.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        check_names(self.only, tuple(KERNELS), "--only")
        check_names(self.rivals, RIVALS, "--rivals")
        for model in self.models:
            preset(model)
        names = [case.name for kernel in self.only for case in KERNELS[kernel].cases]
        if unknown := [x for x in self.cases if not any(x in name for name in names)]:
            raise ValueError(
                f"`--cases` {unknown} are in no name of a case of {', '.join(self.only)}. Some are:"
                f" {'; '.join(names[-3:])}."
            )
        if self.processes < 1:
            raise ValueError(f"`--processes` must be at least 1, got {self.processes}.")
        if not 0 <= self.memory_gib < math.inf:
            raise ValueError(f"`--memory-gib` must be 0 or more, got {self.memory_gib:g}.")
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            raise ValueError(
                "`--part` must be the number of a part, counted from 0, and the count of parts, got"
                f" {self.part[0]} {self.part[1]}."
            )


def case_units(config: Config) -> list[dict[str, str]]:
    """Returns kernels and cases; without a GPU those that the interpreter computes in seconds."""
    return [
        {"kernel": name, "case": case.name}
        for name in config.only
        for case in KERNELS[name].cases
        if any(part in case.name for part in config.cases) and (on_gpu() or case.small)
    ]


def find_case(unit: dict[str, str]) -> tuple[Kernel, Case]:
    """Returns the kernel and the case of a unit."""
    kernel, cases = KERNELS[unit["kernel"]]
    return kernel, next(case for case in cases if case.name == unit["case"])


def on_gpu() -> bool:
    """Returns whether this process computes on a GPU."""
    return jax.default_backend() == "gpu"


def takes_triton(kernel: Kernel, case: Case) -> bool:
    """Returns whether a second program of a kernel, written in Triton, can run a case here."""
    return on_gpu() and kernel.refusal("triton", case.shapes(), dict(case.options)) is None
