"""Checks and timings on a GPU; needs only JAX, flax, optax and tyro.

`python -m benchmarks.gpu --processes 12` checks every kernel against its definition in float64, on
random inputs and with poisoned results, then the gradients of the operators, and that two steps of
every method give the same bits. It times each kernel beside XLA's program for the definition and
beside a copy of as many bytes, the update of a layer by every optimizer, and whole steps of plain
JAX and of every method, each in a separate process, with the peak of the device's memory and the
loss. Each section is written as soon as it exists; `--add` runs what is missing or failed. Without
a GPU, kernels are interpreted on small shapes and nothing is timed.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tyro

from benchmarks import record, states
from benchmarks.device_time import medians
from benchmarks.gpu import checks, times
from benchmarks.gpu.config import SECTIONS, Config, Section, case_units, on_gpu
from benchmarks.gpu.parts import in_parts
from benchmarks.gpu.steps import compile_steps, step_cells, time_steps
from benchmarks.tables import print_table


class _Divided(NamedTuple):
    """A section whose units run in several processes.

    Attributes:
      units: from settings to the names of each unit, the first entries of its row.
      run: from settings and unit to the rest of the row.
    """

    units: Callable[[Config], list[dict[str, str]]]
    run: Callable[[Config, dict[str, str]], dict[str, Any]]


DIVIDED: dict[str, _Divided] = {
    "kernels": _Divided(case_units, checks.check_kernel),
    "operators": _Divided(checks.operator_units, checks.check_operator),
    "determinism": _Divided(checks.determinism_units, checks.check_determinism),
    "programs": _Divided(times.time_units, times.compile_kernel),
    "times": _Divided(times.time_units, times.time_kernel),
}
_TOGETHER = ("kernels", "operators", "determinism", "programs")
"""Sections that time nothing: they run at once."""

Found = dict[str, list[dict[str, Any]]]


def run(config: Config, arguments: list[str] | None = None) -> Found:
    """Runs the sections, and writes the rows of each as soon as they exist.

    Args:
      config: what to run.
      arguments: the command line, for processes that run parts.

    Returns:
      The rows, by section.
    """
    found = _former(config) if config.add else {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for group in _groups(config.sections):
            if set(group) <= DIVIDED.keys():
                compiling = "programs" in group and "steps" in config.sections
                with _beside(compile_steps, config, folder, doing=compiling):
                    _run_divided(config, group, found, arguments or [], folder)
            elif "updates" in group:
                found["updates"] = states.measure(states.Config()) if on_gpu() else []
            else:
                time_steps(config, folder, found.setdefault("steps", []))
            _write(config, found)
    return found


@contextlib.contextmanager
def _beside(work: Callable[..., Any], *args: Any, doing: bool) -> Iterator[None]:
    """Does work in a thread, and prints what it returns at the end, if there is anything."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, *args) if doing else None
        yield
        if future is not None and future.result():
            print(future.result())


def _groups(sections: tuple[Section, ...]) -> list[tuple[Section, ...]]:
    """Returns sections in order; those that time nothing are one group."""
    together: tuple[Section, ...] = tuple(x for x in sections if x in _TOGETHER)
    alone: list[tuple[Section, ...]] = [(x,) for x in SECTIONS if x in sections]
    return [together] * bool(together) + [x for x in alone if x[0] not in _TOGETHER]


def _run_divided(
    config: Config,
    sections: tuple[Section, ...],
    found: Found,
    arguments: list[str],
    folder: pathlib.Path,
) -> None:
    """Runs units of sections, in this process or divided over several."""
    for section in sections:
        found[section] = [row for row in found.get(section, []) if row.get("ok", True)]
    if config.processes > 1:
        former = {section: found[section] for section in sections}
        parts = in_parts(former, arguments, config.processes, folder)
        for section in sections:
            rows = found[section] + parts[section]
            found[section] = _in_order(DIVIDED[section].units(config), rows)
        return
    for section in sections:
        units = DIVIDED[section].units(config)
        if config.part is not None:
            units = units[config.part[0] :: config.part[1]]
        have = [_names(unit, row) for unit in units for row in found[section]]
        for unit in units:
            if unit in have:
                continue
            found[section].append(row := dict(unit))
            try:
                row |= DIVIDED[section].run(config, unit)
            except Exception as error:
                # One that fails must not lose the results of the others.
                row |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:800]}
            # A program that ends the process must not lose the results either.
            _write(config, found, say=False)


def _names(unit: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in unit}


def _in_order(units: list[dict[str, str]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows in the order of the units, then all others; one without a row has failed."""
    lost = {"ok": False, "failure": "its process ended before it did"}
    found, others = [], list(rows)
    for unit in units:
        row = next((row for row in others if _names(unit, row) == unit), None)
        if row is not None:
            others.remove(row)
        found.append(row or unit | lost)
    return found + others


def _former(config: Config) -> Found:
    content = record.read(config.results) if config.results.exists() else {}
    steps = content.pop("rows", [])
    return {name: content[name] for name in SECTIONS if name in content} | {"steps": steps}


def _write(config: Config, found: Found, say: bool = True) -> None:
    others: dict[str, Any] = {k: x for k, x in found.items() if k not in ("steps", "programs")}
    record.write(config, found.get("steps", []), say=say, **others)


# Tables.


def show(found: Found) -> None:
    """Prints a table for each section."""
    if found.get("kernels") or found.get("times"):
        _show_kernels(found.get("kernels", []), found.get("times", []))
    if found.get("operators"):
        print_table(
            "Gradients of operators in bfloat16, against float64",
            ("operator", "ok", "error"),
            [_cells(row, "operator", "error") for row in found["operators"]],
        )
    if found.get("determinism"):
        print_table(
            "A step of llama_3m, with kernels",
            ("rival", "same bits twice", "from the step without kernels, of the step"),
            [_cells(row, "rival", "apart") for row in found["determinism"]],
        )
    if found.get("updates"):
        states.show(states.Config(), found["updates"])
    headers = ("rival", "ms", "tokens/s", "/ first", "peak GiB", "compiled GiB", "TFLOP/s", "loss")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found.get("steps", []):
        sizes = (row["model"], row["batch_size"], row["seq_len"], row["memory_gib"])
        groups.setdefault(sizes, []).append(row)
    for (model, batch_size, seq_len, limit), rows in groups.items():
        within = f", within {limit:g} GiB" if limit else ""
        print_table(f"{model}, {batch_size} x {seq_len}{within}", headers, step_cells(rows))


def _cells(row: dict[str, Any], name: str, figure: str) -> tuple[str, str, str]:
    said = row["failure"][:60] if "failure" in row else f"{row[figure]:.1e}"
    return row[name], str(row["ok"]), said


def _show_kernels(checked: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    headers = ("kernel, case", "ok", "error", "differing", "us", "TB/s", "of a copy", "of XLA's")
    rows: dict[str, dict[str, Any]] = {}
    for row in (*checked, *timed):
        name = f"{row['kernel']}, {row['case']}"
        rows[name] = rows.get(name, {}) | row
    cells = []
    for name, row in rows.items():
        has_time = "seconds" in row
        middle = medians(row["seconds"])["kernel"] if has_time else 0
        cells.append(
            (
                name,
                str(row.get("ok", "")) if "failure" not in row else row["failure"][:60],
                f"{row.get('error', 0):.1e}",
                f"{row.get('differing', 0):.1e}",
                f"{middle * 1e6:,.1f}" if has_time else "",
                f"{row['bandwidth'] / 1e12:.2f}" if has_time else "",
                f"{row['share_of_copy']:.2f}" if has_time else "",
                f"{row['of_xla']:.2f}" if has_time else "",
            )
        )
    how = "compiled" if on_gpu() else "interpreted, without a GPU"
    print_table(f"Kernels, {how}, against float64", headers, cells)


def main() -> None:
    """Runs what the command line asks for."""
    # The processes that run parts and steps need the memory of the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config = tyro.cli(
        Config,
        prog="python -m benchmarks.gpu",
        description=__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    found = run(config, sys.argv[1:])
    if config.part is None:
        show(found)


if __name__ == "__main__":
    main()
