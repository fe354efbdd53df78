"""The programs of `train` in child processes, and the verdict on how one ended.

Children are forks of a server that has imported the programs, so that a start takes a few
milliseconds. They have limits of time and memory: a malformed input must not take the machine.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import math
import multiprocessing
import os
import pathlib
import re
import resource
import sys
import time
import traceback
from collections.abc import Sequence

MODULES = {name: f"train.{name}" for name in ("pretrain", "finetune", "evaluate", "plan")}
SECONDS = 60
"""Processor time of a program. On the clock it may take ten times as long, on a busy machine."""
_ADDRESSES = 24 * 2**30  # bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A malformed input of a program, and flags of which a message must name one.

    `certain` tells whether it must be refused: a random change may leave an input valid.
    """

    what: str
    program: str
    argv: tuple[str, ...]
    names: tuple[str, ...]
    certain: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a program ended: its exit code, None if it took too long, and what it printed."""

    code: int | None
    out: str
    err: str


def run(module: str, argv: Sequence[str], folder: pathlib.Path, seconds: int = SECONDS) -> Ending:
    """Runs `main` of a module in a folder. Its output goes to files beside the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*MODULES.values()])
    child = context.Process(target=_child, args=(module, tuple(argv), str(folder), seconds))
    child.start()
    child.join(10 * seconds)
    if child.exitcode is None:
        child.kill()
        child.join()
    code = None if child.exitcode in (-9, -24) else child.exitcode  # SIGKILL, SIGXCPU
    texts = [(folder.parent / name).read_text(errors="replace") for name in ("out", "err")]
    return Ending(code, *texts)


def _child(module: str, argv: tuple[str, ...], folder: str, seconds: int) -> None:
    code = 1
    try:
        os.chdir(folder)
        for number, name in ((1, "../out"), (2, "../err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2)
        )
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
        used = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (used, used + 5))
        sys.argv = [module, *argv]
        importlib.import_module(module).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns a hash of each file by path, but not of locks, where runs write their process."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def message_of(err: str) -> list[str]:
    """Returns the lines of the message at the end of stderr: one, or a box of tyro."""
    lines = [line for line in err.splitlines() if line.strip()]
    boxes = [i for i, line in enumerate(lines) if line.startswith("╭")]
    return lines[boxes[-1] :] if boxes and lines[-1].startswith("╰") else lines[-1:]


def faults(case: Case, end: Ending, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Returns what is wrong with the end of a program, from hashes of all files before and after.

    A program must refuse a malformed input: exit with 2 and one message that names a flag, without
    a traceback, and leave all files as they were. A valid input must run.
    """
    faults = ["prints a traceback"] if "Traceback (most recent" in end.out + end.err else []
    shown = " ".join(message_of(end.err))
    if end.code is None:
        return [*faults, "does not end in time"]
    if end.code == 0:
        return [*faults, *(["is accepted"] if case.certain else [])]
    if end.code == 1 and re.match(r"error: step \d+ is not finite", shown):
        return faults  # As documented.
    if end.code != 2:
        faults.append(f"exits with {end.code}")
    elif not shown.startswith(("error: ", "╭")):
        faults.append("the last line is not the error")
    elif not any(re.search(rf"{re.escape(name)}(?![\w-])", shown) for name in case.names):
        faults.append(f"does not name {' or '.join(case.names)}")
    changed = [name for name in before if after.get(name) != before[name]]
    return faults + ([f"changes {', '.join(changed[:3])}"] if changed else [])
