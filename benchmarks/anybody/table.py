"""The results as Markdown."""

from collections.abc import Sequence
from typing import Any

MIB = 2**20
_WAYS = ("plain", "remat", "dots_saveable", "4 bits", "compress")
_SHORT = ("plain", "remat", "dots", "4 bits", "compress")
_MEMORY, _ERROR, _TRACE, _COMPILE = 1.05, 0.06, 2.5, 1.6
GOALS = (
    f"A star marks what `compress` misses: memory of at most {_MEMORY} times the better of plain"
    " and the rematerialisation of the library, a gradient error of at most"
    f" {100 * _ERROR:g}%, at most {_TRACE} times the processor time of plain to trace and"
    f" {_COMPILE} times to compile."
)


def markdown(rows: dict[str, Any], device: str) -> str:
    """Returns tables of memory, and of errors, times and losses, and a list of what failed."""
    memory, rest, failures = [], [], []
    for name, row in rows.items():
        failures += [f"- `{name}`: {failure}" for failure in row.get("failures", ())]
        if not row.get("ways"):
            failures.append(f"- `{name}` did not run: {row.get('reason', 'unknown')}")
            continue
        if row.get("reason"):
            failures.append(f"- `{name}` ended early: {row['reason']}")
        here, there = _memories(row, "temporaries"), _memories(row, device)
        others = _others(row)
        cells = [_choice(row), *here, *there]
        star = "*" if "*" in "".join((*cells, *others)) else ""
        memory.append([name + star, *cells])
        rest.append([name + star, *others])
    parts = [
        GOALS,
        "What `compress` chose for the CPU, and MiB of temporaries of the gradient, compiled for a"
        f" CPU and for {device}. For {device} `compress` chose by the memory there:",
        _table(["case", "choice", *(f"{p}, {w}" for p in ("CPU", device) for w in _SHORT)], memory),
        "Relative error of the gradient, processor time as a multiple of plain, and the mean loss"
        " of the batches at the start and after training:",
        _table(
            ["case", "error, compress", "8 bits", "4 bits", "2 bits", "`Exact()`"]
            + [f"{what}, {w}" for what in ("trace", "compile") for w in ("compress", "4 bits")]
            + ["loss at the start", *(f"loss, {w}" for w in ("plain", "4 bits", "compress"))],
            rest,
        ),
        "What failed:",
        "\n".join(failures) or "Nothing.",
    ]
    return "\n\n".join(parts) + "\n"


def _choice(row: dict[str, Any]) -> str:
    """Returns the chosen way, and how many arrays are in how many bits; a star if it failed."""
    choice = row.get("choice")
    if choice is None:
        return "none*"
    bits = sorted(n for n in choice["bits"].values() if n)
    exact = len(choice["bits"]) - len(bits)
    words = [f"{bits.count(n)} in {n} bits" for n in sorted(set(bits))]
    words += [f"{exact} exact"] if exact else []
    return choice["name"] + (f": {', '.join(words)}" if words else "")


def _memories(row: dict[str, Any], what: str) -> list[str]:
    """Returns a cell for each way."""
    found = [row["ways"].get(way, {}).get(what) for way in _WAYS]
    best = [x for x in found[:2] if x is not None]
    cells = ["" if x is None else f"{x / MIB:.1f}" for x in found]
    if best and found[-1] is not None:
        cells[-1] += _star(found[-1] / max(min(best), 1), _MEMORY)
    return cells


def _others(row: dict[str, Any]) -> list[str]:
    """Returns cells of errors, times and losses."""
    ways = row["ways"]
    errors = {way: found.get("gradient_error") for way, found in ways.items()}
    errors |= row.get("gradient_error", {})
    names = ("compress", "8 bits", "4 bits", "2 bits", "Exact")
    cells = ["" if errors.get(n) is None else f"{100 * errors[n]:.2g}%" for n in names]
    if errors.get("compress") is not None:
        cells[0] += _star(errors["compress"], _ERROR)
    for what, goal in (("trace_s", _TRACE), ("compile_s", _COMPILE)):
        for way in ("compress", "4 bits"):
            ratio = _ratio(ways, way, what)
            cells.append("" if ratio is None else f"{ratio:.2f}")
            if ratio is not None and way == "compress":
                cells[-1] += _star(ratio, goal)
    losses = [ways.get("plain", {}).get("first_loss")]
    losses += [ways.get(w, {}).get("final_loss") for w in ("plain", "4 bits", "compress")]
    return cells + ["" if x is None else f"{x:.4f}" for x in losses]


def _ratio(ways: dict[str, Any], way: str, what: str) -> float | None:
    """Returns a time as a multiple of that of plain."""
    times = [ways.get(w, {}).get(what) for w in (way, "plain")]
    return None if None in times else times[0] / times[1]


def _star(found: float, goal: float) -> str:
    """Returns a mark of a goal that is missed. A number that is not one misses it."""
    return "" if found <= goal else "*"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
