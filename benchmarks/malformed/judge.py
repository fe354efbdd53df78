"""The verdict on how a program ended."""

import hashlib
import os
import pathlib
import re

from benchmarks.malformed.case import Case
from benchmarks.malformed.forks import Ending

REFUSED, VALID, NOT_FINITE, FAULT = "refused", "valid", "not finite", "fault"
Digests = dict[str, str]


def digests(folder: pathlib.Path) -> Digests:
    """Returns a hash of each file under a folder, by path.

    The locks of runs are left out: each run writes the number of its process there.
    """
    return {
        str(path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.name != "lock"
    }


def _digest(path: pathlib.Path) -> str:
    if path.is_symlink() or path.is_dir():
        return "link" if path.is_symlink() else "folder"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except PermissionError:
        return "unreadable"


def message_of(err: str) -> list[str]:
    """Returns the lines of the message at the end of stderr: one, or a box of tyro."""
    lines = [line for line in err.splitlines() if line.strip()]
    boxes = [i for i, line in enumerate(lines) if line.startswith("╭")]
    if lines and lines[-1].startswith("╰") and boxes:
        return lines[boxes[-1] :]
    return lines[-1:]


def faults_of(case: Case, ending: Ending, before: Digests, after: Digests) -> list[str]:
    """Returns what is wrong with the end of a program on a malformed input; nothing if all is well.

    Args:
      case: the input.
      ending: how the program ended.
      before: the hashes of all files before.
      after: the hashes afterwards.
    """
    text = ending.out + ending.err
    faults = []
    if "Traceback (most recent call last)" in text:
        faults.append("prints a traceback")
    if ending.code is None:
        return [*faults, "does not end in time"]
    if ending.code == 0:
        return [*faults, *(["is accepted"] if case.certain else [])]
    message = message_of(ending.err)
    shown = " ".join(message)
    if _is_not_finite(ending):
        return faults
    if ending.code != 2:
        faults.append(f"exits with {ending.code}")
    elif not message:
        faults.append("says nothing")
    elif not (shown.startswith(("error: ", "╭"))):
        faults.append("the last line is not the error")
    elif not any(re.search(rf"{re.escape(name)}(?![\w-])", shown) for name in case.names):
        faults.append(f"does not name {' or '.join(case.names)}")
    changed = [name for name in before if after.get(name) != before[name]]
    return faults + ([f"changes {', '.join(changed[:3])}"] if changed else [])


def _is_not_finite(ending: Ending) -> bool:
    """Returns whether a run said that a step is not finite, as the programs document."""
    last = " ".join(message_of(ending.err))
    return ending.code == 1 and bool(re.match(r"error: step \d+ is not finite", last))


def verdict(ending: Ending, faults: list[str]) -> str:
    """Returns the verdict on a case."""
    if faults:
        return FAULT
    if ending.code == 0:
        return VALID
    return NOT_FINITE if _is_not_finite(ending) else REFUSED


def is_left(folder: pathlib.Path) -> bool:
    """Returns whether a refused run left anything where its folder would be."""
    return os.path.lexists(folder)
