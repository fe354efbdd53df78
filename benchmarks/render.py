"""Writes the page of tables, the pictures and the marks in the docs from raw results.

`python -m benchmarks.render` writes `docs/results/tables.md`, and the end of
`docs/guides/recipes.md`, from the committed results, says where the code that a result measures has
changed since, draws the pictures whose results have changed, and marks links to the results of
deleted studies in the documentation as historical, with the commit that made them and can repeat
them.
"""

import math
import pathlib
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import ladder, memory, pictures, recipes, record, soak, start
from benchmarks.anybody import errors, measuring
from benchmarks.record import RESULTS
from benchmarks.tables import Cells, cell, markdown

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "tables.md"
RECIPES_PAGE = ROOT / "docs" / "guides" / "recipes.md"
HISTORICAL = {
    "anybody": "`compress` on models of twelve other libraries",
    "all_reduce": "bytes that data-parallel devices exchange",
    "bits": "bits chosen for each site, and the error of the gradient",
    "controller": "what the controller of bits chooses, and what it costs",
    "malformed": "1,000 malformed inputs of the programs; `tests/fuzz` draws them now",
    "moment_rounding": "rounding errors of first moments in 4 bits",
    "others": "`compress_residuals` on code of other libraries",
    "random_arrays": "10,000 arrays through every codec; `tests/fuzz` draws them now",
    "refresh": "cost of a refresh of the subspace",
    "state_memory": "whole steps with small optimizer states",
    "subspace_loops": "subspaces in the loops of optax",
    "weight_rounding": "roundings of bfloat16 weights",
}
"""Results whose programs are gone, with their subjects. They cannot become stale."""


class Section(NamedTuple):
    """A table of the page."""

    title: str
    table: Callable[[list[dict[str, Any]]], Cells]
    sources: tuple[str, ...]
    """Files and folders whose code the result measures."""
    needs: str = ""
    """Hardware or packages of a full run that not every machine has."""


def _gpu(rows: list[dict[str, Any]]) -> Cells:
    cells = []
    for row in rows:
        for first in row.get("rounds", ())[:1]:
            seconds = statistics.median(t for x in row["rounds"] for t in x["seconds"])
            tokens = row["batch_size"] * row["seq_len"]
            cells.append(
                {
                    "model": row["model"],
                    "step": ladder.RUNGS.get(row["rival"], row["rival"]),
                    "tokens": f"{row['batch_size']} x {row['seq_len']}",
                    "ms": f"{seconds * 1e3:,.0f}",
                    "tokens/s": f"{tokens / seconds:,.0f}",
                    "matmul TFLOP/s": f"{first['matmul_flops'] / seconds / 1e12:.0f}",
                    "peak, GiB: device": cell(first["peak"], ".2f", 2**30),
                    "compiler": cell(first["planned_peak"], ".2f", 2**30),
                }
            )
    return cells


_STEP = ("actjax", "models", "train", "benchmarks/memory.py", "benchmarks/training_steps.py",
         "benchmarks/variants.py", "benchmarks/plain_jax.py")  # fmt: skip
_COMPILES = "`pip install -e '.[programs,compile]'`"
SECTIONS = {
    "ladder": Section(
        "One change at a time", ladder.table, (*_STEP, "benchmarks/ladder.py"), _COMPILES
    ),
    "memory_h100": Section(
        "A step of `llama_1b`, compiled for an H100", memory.table, _STEP, _COMPILES
    ),
    "gpu": Section(
        "Steps on a GPU", _gpu, _STEP,
        "an NVIDIA GPU, and `python -m benchmarks.gpu --queue`",
    ),
    "soak": Section("A run under random kills", soak.table, ("actjax", "models", "train")),
    "start": Section(
        "The first minutes of `llama_1b`, and its memory in GiB against the plan", start.table,
        ("actjax", "models", "train", "benchmarks/start.py"),
    ),
    "sensitive_programs": Section(
        "Programs that are sensitive to codes", errors.table,
        ("actjax/residuals", "actjax/codecs", "benchmarks/anybody"),
    ),
    "trainers": Section(
        "Trainers of other libraries", measuring.table,
        ("actjax/residuals", "actjax/choosing", "actjax/codecs", "benchmarks/anybody"),
        "the library of each script in `benchmarks/anybody`; for the column H100, `TARGET_CONFIG`",
    ),
}  # fmt: skip
"""By the names of their results, in the order of the page."""
RECIPES = Section(
    "Memory of each recipe", recipes.table,
    ("actjax", "models", "train", "benchmarks/recipes.py"), "`pip install -e '.[programs,gpu]'`",
)  # fmt: skip
"""The end of the page of recipes."""


def page(folder: pathlib.Path) -> str:
    """Returns the page of all tables."""
    parts = [
        "# Tables",
        "Written by `python -m benchmarks.render`. Raw results name machine, versions, settings and"
        "\ncommit. A result whose code has changed since is marked as stale.",
    ]
    for name, section in SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            parts += _section(section, record.read(path), path)
    parts += [
        "## Historical results",
        "Their programs are gone; the commit of each has them. Pages that cite them say so.",
        markdown(
            [
                {"result": f"[{name}.json](../../benchmarks/results/{name}.json)", "of": subject,
                 "made by": commit_of(name)}
                for name, subject in HISTORICAL.items()
            ]
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _section(section: Section, result: dict[str, Any], path: pathlib.Path) -> list[str]:
    where = result["environment"]
    relative = path.relative_to(ROOT)
    parts = [
        f"## {section.title}",
        f"[{path.name}](../../{relative}): {where['device']}, {where['cores']} cores,"
        f" JAX {where['versions']['jax']}, Python {where['python']}, commit {where['commit']},"
        f" {where['date'][:10]}.",
    ]
    if stale := staleness(result, section.sources):
        parts.append(f"**{stale}**")
    if section.needs:
        parts.append(f"It needs {section.needs}.")
    parts.append(markdown(section.table(result["rows"])))
    picture = path.with_suffix(".png")
    if picture.name in pictures.PICTURES:
        parts.append(f"![{section.title}](../../{relative.with_suffix('.png')})")
    return parts


def page_of_recipes(text: str, folder: pathlib.Path) -> str:
    """Returns the page of recipes with its last section written again."""
    path = folder / "recipes.json"
    section = _section(RECIPES, record.read(path), path)
    return text.partition(f"## {RECIPES.title}\n")[0] + "\n\n".join(section) + "\n"


def commit_of(name: str) -> str:
    """Returns the commit that made a historical result, or those that made its parts."""
    result = record.read(RESULTS / f"{name}.json")
    parts = [result] if "environment" in result else result.values()
    commits = sorted({part["environment"]["commit"] for part in parts})
    return f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}"


_LINK = re.compile(r"(\]\([./]*benchmarks/results/(\w+)\.json\))( \(historical, commits? [^)]*\))?")


def marked(text: str) -> str:
    """Returns a page whose links to historical results are marked, and no others."""

    def mark(match: re.Match[str]) -> str:
        name = match[2]
        return match[1] + (f" (historical, {commit_of(name)})" if name in HISTORICAL else "")

    return _LINK.sub(mark, text)


def staleness(result: dict[str, Any], sources: Sequence[str], root: pathlib.Path = ROOT) -> str:
    """Returns a fault in the age of a result; nothing if its code has not changed since.

    Args:
      result: content of a result file, with the commit in its `environment`, or in each row where
        several calls made them. The commit with the most changes since counts.
      sources: files and folders whose code the result measures, from the root of the repository.
      root: the repository.
    """
    of_file = result.get("environment", {}).get("commit", "unknown")
    commits = {str(row.get("commit", of_file)) for row in result.get("rows", ())} or {str(of_file)}
    notes = (_staleness(commit, sources, root) for commit in sorted(commits))
    return max(notes, key=lambda note: note[0])[1]


def _staleness(commit: str, sources: Sequence[str], root: pathlib.Path) -> tuple[float, str]:
    """Returns the number of changes since a commit, infinite if it is not known, and the note."""
    clean = commit.removesuffix("-dirty")
    changes = _git(root, "log", "--format=%h", f"{clean}..HEAD", "--", *sources)
    if changes is None:
        return math.inf, f"Its commit, {commit}, is not known here: it may be older than the code."
    if commit != clean:
        note = f"Measured at {clean} with changes that no commit has: it may be of other code."
        return math.inf, note
    if _git(root, "status", "--porcelain", "--", *sources):
        return math.inf, f"Stale: measured at {clean}; its code has changes without a commit."
    count = len(changes.split())
    commits = "one commit has" if count == 1 else f"{count} commits have"
    return count, f"Stale: measured at {clean}; {commits} changed its code since." if count else ""


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """Returns what git prints; None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Writes pictures, page and marks."""
    pictures.draw_all([RESULTS, RESULTS / "quick"])
    PAGE.write_text(page(RESULTS), encoding="utf-8")
    text = page_of_recipes(RECIPES_PAGE.read_text(encoding="utf-8"), RESULTS)
    RECIPES_PAGE.write_text(text, encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path != PAGE and (text := path.read_text(encoding="utf-8")) != marked(text):
            path.write_text(marked(text), encoding="utf-8")
            print(f"marked {path.relative_to(ROOT)}")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
