"""Whether a result is older than the code that it measures."""

import math
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]


def note(result: dict[str, Any], sources: Sequence[str], root: pathlib.Path = ROOT) -> str:
    """Returns what is wrong with the age of a result; nothing if its code has not changed since.

    Args:
      result: content of a result file, with the commit in its `environment`, or in each row where
        several calls made them. The commit with the most changes since counts.
      sources: files and folders whose code the result measures, from the root of the repository.
      root: the repository.
    """
    of_file = result.get("environment", {}).get("commit", "unknown")
    commits = {str(row.get("commit", of_file)) for row in result.get("rows", ())} or {str(of_file)}
    return max((_note(commit, sources, root) for commit in sorted(commits)), key=lambda x: x[0])[1]


def _note(given: str, sources: Sequence[str], root: pathlib.Path) -> tuple[float, str]:
    """Returns the number of changes since a commit, infinite if it is not known, and the note."""
    commit = given.removesuffix("-dirty")
    changes = _git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *sources)
    if changes is None:
        text = f"Its commit, {given}, is not known here: it may be older than the code."
        return math.inf, text
    if given != commit:
        text = f"Measured at {commit} with changes that no commit has: it may be of other code."
        return math.inf, text
    if _git(root, "status", "--porcelain", "--", *sources):
        text = f"Stale: measured at {commit}; what it measures has changes without a commit."
        return math.inf, text
    if not changes:
        return 0, ""
    count = len(changes.split())
    commits = "one commit has" if count == 1 else f"{count} commits have"
    return count, f"Stale: measured at {commit}; {commits} changed what it measures since."


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """Returns what git prints; None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
