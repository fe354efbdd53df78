"""The results as Markdown."""

from typing import Any

MIB = 2**20
_WAYS = ("plain", "remat", "dots_saveable", "4 bits", "compress")


def markdown(rows: dict[str, Any], device: str) -> str:
    """Returns tables of memory, of gradient errors, of times and of what failed."""
    memory, errors, times, failures = [], [], [], []
    for name, row in rows.items():
        if not row.get("ways"):
            failures.append(f"- `{name}` did not run: {row.get('reason', 'unknown')}")
            continue
        ways = {way: row["ways"].get(way, {}) for way in _WAYS}
        memory.append(
            [
                name,
                *(_mib(ways[w].get("kept")) for w in ("plain", "4 bits", "compress")),
                *(_mib(ways[w].get("temporaries")) for w in _WAYS),
                *(_mib(ways[w].get(device)) for w in _WAYS),
            ]
        )
        found = row.get("gradient_error", {})
        errors.append(
            [
                name,
                *(_percent(found.get(w)) for w in ("Exact", "8 bits", "4 bits", "2 bits")),
                _percent(found.get("compress")),
                _number(ways["plain"].get("first_loss"), ".4f"),
                *(
                    _number(ways[w].get("final_loss"), ".4f")
                    for w in ("plain", "4 bits", "compress")
                ),
            ]
        )
        times.append(
            [
                name,
                *(
                    _number(ways[w].get(what), ".2f")
                    for what in ("trace_s", "compile_s", "seconds")
                    for w in ("plain", "remat", "4 bits", "compress")
                ),
            ]
        )
        failures += [f"- `{name}`: {failure}" for failure in row.get("failures", ())]
        if row.get("reason"):
            failures.append(f"- `{name}` ended early: {row['reason']}")
    short = ("plain", "remat", "dots", "4 bits", "compress")
    few = ("plain", "remat", "4 bits", "compress")
    return (
        "\n\n".join(
            [
                "MiB kept for the backward pass, and of temporaries of the compiled gradient:",
                _table(
                    [
                        "case",
                        *(f"kept, {w}" for w in ("plain", "4 bits", "compress")),
                        *(f"CPU, {w}" for w in short),
                        *(f"{device}, {w}" for w in short),
                    ],
                    memory,
                ),
                "Relative error of the gradient, and mean loss of the batches:",
                _table(
                    [
                        "case",
                        "Exact()",
                        "8 bits",
                        "4 bits",
                        "2 bits",
                        "compress",
                        "loss at the start",
                    ]
                    + [f"after training, {w}" for w in ("plain", "4 bits", "compress")],
                    errors,
                ),
                "Seconds to trace, to compile and to run a gradient:",
                _table(
                    [
                        "case",
                        *(f"{what}, {w}" for what in ("trace", "compile", "run") for w in few),
                    ],
                    times,
                ),
                "What failed:",
                "\n".join(failures) or "Nothing.",
            ]
        )
        + "\n"
    )


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mib(x: float | None) -> str:
    return "" if x is None else f"{x / MIB:.1f}"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.2g}%"


def _number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)
