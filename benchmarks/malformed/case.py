"""A malformed input of a program, and the correct commands that it changes."""

import dataclasses
import pathlib
from collections.abc import Callable

from benchmarks.malformed.mutate import Random

Flags = dict[str, str | None]
"""Values by flag; None for a switch."""

PRETRAIN: Flags = {
    "--model": "model",
    "--tokenizer": "model",
    "--data": "text.txt",
    "--data-dir": "cache",
    "--method": "exact",
    "--steps": "2",
    "--batch-size": "2",
    "--seq-len": "16",
    "--eval-batches": "1",
    "--out": "new",
}
FINETUNE: Flags = {
    "--checkpoint": "model",
    "--data": "records.jsonl",
    "--method": "lora",
    "--lora-rank": "2",
    "--steps": "2",
    "--batch-size": "2",
    "--seq-len": "32",
    "--eval-batches": "1",
    "--out": "new",
}
PERPLEXITY: Flags = {
    "--checkpoint": "model",
    "--data": "text.txt",
    "--whole": None,
    "--seq-len": "16",
    "--batch-size": "2",
    "--eval-batches": "1",
}
ANSWERS: Flags = {
    "--checkpoint": "model",
    "--task": "gsm8k",
    "--questions": "sums.jsonl",
    "--max-new-tokens": "2",
    "--batch-size": "2",
}
WRITING: Flags = {"--checkpoint": "model", "--generate": "one", "--max-new-tokens": "2"}
PLAN: Flags = {
    "--checkpoint": "model",
    "--method": "exact",
    "--batch-size": "2",
    "--seq-len": "16",
}
CORRECT: dict[str, tuple[Flags, ...]] = {
    "pretrain": (PRETRAIN,),
    "finetune": (FINETUNE,),
    "evaluate": (PERPLEXITY, ANSWERS, WRITING),
    "plan": (PLAN,),
}
"""Commands that succeed on the inputs of `inputs.write`, by program."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A malformed input.

    Attributes:
      what: what is malformed.
      program: "pretrain", "finetune", "evaluate" or "plan".
      argv: its command line.
      names: flags. A message must name one of them.
      certain: whether it must be refused. A random change may leave an input valid.
      new: folder that a run would make, if it is new.
      locked: folder of a run that another process is in, if there is one.
    """

    what: str
    program: str
    argv: tuple[str, ...]
    names: tuple[str, ...]
    certain: bool = False
    new: str | None = None
    locked: str | None = None


Draw = Callable[[Random, pathlib.Path], Case]
"""From random numbers and a folder of valid inputs, which it changes, to a case."""


def words(flags: Flags) -> tuple[str, ...]:
    """Returns the command line of flags."""
    return tuple(w for flag, value in flags.items() for w in (flag, value) if w is not None)


def case_of(
    what: str,
    program: str,
    flags: Flags,
    names: tuple[str, ...],
    *,
    more: tuple[str, ...] = (),
    certain: bool = False,
    locked: str | None = None,
) -> Case:
    """Returns a case of flags.

    Args:
      what: as in `Case`.
      program: as in `Case`.
      flags: the command line.
      names: as in `Case`.
      more: further words of the command line.
      certain: as in `Case`.
      locked: as in `Case`.
    """
    new = "new" if flags.get("--out") == "new" else None
    return Case(what, program, (*words(flags), *more), names, certain, new, locked)
