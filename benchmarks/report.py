"""Tables in Markdown and a plot, from raw results.

`python -m benchmarks.report benchmarks/results/kernels.json benchmarks/results/gpu.json` prints the
resources of kernels as the compiler reports them, with time and share of the bandwidth where a GPU
measured them; the checks, failures first; and whole steps with ratios to the first rival. `--figure
gpu.png` draws the whole steps.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import tyro

from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    """Results to read."""

    files: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    """Results of `benchmarks.kernels` and of `benchmarks.gpu`."""
    figure: pathlib.Path | None = None
    """File for a plot of tokens per second against peak memory, if a GPU measured steps."""

    def __post_init__(self) -> None:
        for path in self.files:
            if not path.is_file():
                raise ValueError(f"`files`: {path} is not a file.")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernel_table(compiled: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    """Returns the table of kernels, and of functions without a kernel.

    Args:
      compiled: rows of `benchmarks.kernels`.
      measured: rows `times` of `benchmarks.gpu`; may be empty.
    """
    times = {(row["kernel"], row["case"]): row for row in measured if "seconds" in row}
    rows = []
    for row in compiled:
        one = times.get((row["kernel"], row["case"]))
        rows.append(
            (
                f"`{row['kernel']}`" if row["kernel"] else "no kernel",
                row["case"],
                f"{row['bytes'] / 1e6:,.1f}",
                f"{row['bound_us']:,.1f}",
                *(str(row.get(name, "")) for name in ("registers", "spilled", "shared")),
                f"{row['moved'] / row['bytes']:.2f}" if row["moved"] else "",
                f"{row['xla_moved'] / row['bytes']:.2f}" if "xla_moved" in row else "",
                f"{one['bandwidth'] / 1e12:.2f}" if one else "",
                f"{one['share_of_copy']:.2f}" if one else "",
                f"{one['of_xla']:.2f}" if one else "",
            )
        )
    headers = (
        "kernel",
        "case",
        "MB",
        "bound, us",
        "registers",
        "spilled",
        "shared",
        "moved, of the least",
        "moved by XLA's form",
        "TB/s",
        "of a copy",
        "time, of XLA's form",
    )
    # A figure that was not measured has no column.
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return markdown([headers[i] for i in used], [[row[i] for i in used] for row in rows])


def check_table(kernels: list[dict[str, Any]], operators: list[dict[str, Any]]) -> str:
    """Returns the table of comparisons with definitions, failures first.

    Args:
      kernels: kernel rows of `benchmarks.gpu`.
      operators: operator rows of `benchmarks.gpu`.
    """
    rows = []
    for row in sorted([*kernels, *operators], key=lambda row: row["ok"]):
        name = f"`{row['kernel']}`, {row['case']}" if "kernel" in row else row["operator"]
        says = row.get("failure") or ("yes" if row["ok"] else "NO")
        timed = "bandwidth" in row
        rows.append(
            (
                name,
                says,
                f"{row['error']:.1e}" if "error" in row else "",
                f"{row['bandwidth'] / 1e12:.2f}" if timed else "",
                f"{row['share_of_copy']:.2f}" if timed else "",
                f"{row['of_xla']:.2f}" if timed else "",
            )
        )
    headers = ("", "as in float64", "error", "TB/s", "of a copy", "time, of XLA's form")
    return markdown(headers, rows)


def determinism_table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of steps that were run twice.

    Args:
      rows: determinism rows of `benchmarks.gpu`.
    """
    cells = [
        (row["rival"], "yes" if row["same_bits"] else "NO", f"{row['apart']:.1e}") for row in rows
    ]
    return markdown(("", "same bits twice", "from the step without kernels"), cells)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the last of several rounds of a rival, with medians; None if a round failed.

    Args:
      rounds: rows of whole steps in `gpu.json`, or dictionaries with `failure`.

    Returns:
      The last result, where `seconds` is the median over all steps of all rounds, `memory` is the
      peak (the planned peak if the device reports none), and `loss` is the last loss.
    """
    if not rounds or any("failure" in x for x in rounds):
        return None
    last = rounds[-1]
    return {
        **last,
        "seconds": statistics.median(s for x in rounds for s in x["seconds"]),
        "memory": last["peak"] or last["planned_peak"],
        "loss": last["losses"][-1],
    }


def step_table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of whole steps.

    Args:
      rows: step rows of `benchmarks.gpu`, of one model and size.
    """
    found = [(row, summary(row["rounds"])) for row in rows]
    first = next((one for _, one in found if one is not None), None)
    cells = []
    for row, one in found:
        if one is None or first is None:
            cells.append((row["rival"], "failed", *[""] * 4))
            continue
        tokens = row["batch_size"] * row["seq_len"]
        cells.append(
            (
                row["rival"],
                f"{tokens / one['seconds']:,.0f}",
                f"{first['seconds'] / one['seconds']:.3f}",
                f"{one['memory'] / 2**30:.2f}",
                f"{one['memory'] / first['memory']:.3f}",
                f"{one['loss']:.3f}",
            )
        )
    headers = ("", "tokens/s", "of the first", "peak, GiB", "of the first", "last loss")
    return markdown(headers, cells)


def draw(steps: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Draws tokens per second against the peak, one plot for each title."""
    figure, axes = plt.subplots(1, len(steps), figsize=(6 * len(steps), 5), squeeze=False)
    for axis, (title, rows) in zip(axes[0], steps.items(), strict=True):
        for row in rows:
            one = summary(row["rounds"])
            if one is not None:
                tokens = row["batch_size"] * row["seq_len"]
                place = one["memory"] / 2**30, tokens / one["seconds"]
                axis.plot(*place, "o")
                axis.annotate(row["rival"], place, fontsize=7)
        axis.set(title=title, xlabel="peak, GiB", ylabel="tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    results = [record.read(path) for path in config.files]
    measured = [row for result in results for row in result.get("times", [])]
    for result in results:
        if any("bound_us" in row for row in result["rows"]):
            print(kernel_table(result["rows"], measured))
        kernels, operators = result.get("kernels", []), result.get("operators", [])
        if kernels or operators:
            print(f"\n{check_table(kernels, operators)}")
        if result.get("determinism"):
            print(f"\n{determinism_table(result['determinism'])}")
        steps: dict[str, list[dict[str, Any]]] = {}
        for row in result["rows"]:
            if "rounds" in row:
                steps.setdefault(title_of(row), []).append(row)
        for title, rows in steps.items():
            print(f"\n{title}\n\n{step_table(rows)}")
        if steps and config.figure is not None:
            draw(steps, config.figure)


def title_of(row: dict[str, Any]) -> str:
    within = f", within {row['memory_gib']:g} GiB" if row["memory_gib"] else ""
    return f"{row['model']}, {row['batch_size']} x {row['seq_len']}{within}"


if __name__ == "__main__":
    main()
