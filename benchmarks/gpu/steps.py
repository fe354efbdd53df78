"""Whole steps of rivals, each in a separate process: a device reports the peak of a process."""

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

from benchmarks.gpu.config import Config, on_gpu
from benchmarks.gpu.parts import environment
from benchmarks.whole_step import Job, summary


def time_steps(config: Config, folder: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Runs the rivals in rounds, and appends each result to the rows, which it extends.

    A rival is traced while another one runs.

    Args:
      config: models, rivals and rounds.
      folder: where programs and the lock are shared.
      rows: rows with `model`, `rival`, sizes and `rounds`.
    """
    todo = []
    for unit in _units(config):
        row = next((row for row in rows if unit.items() <= row.items()), None)
        if row is None:
            rows.append(row := {**unit, "rounds": []})
        row["rounds"] = [one for one in row["rounds"] if "failure" not in one]
        todo += [(turn, row) for turn in range(len(row["rounds"]), config.rounds)]
    todo.sort(key=lambda one: one[0])
    run = functools.partial(_run, config, folder)
    with concurrent.futures.ThreadPoolExecutor(min(3, config.processes)) as pool:
        results = pool.map(run, [row for _, row in todo])
        for (_, row), result in zip(todo, results, strict=True):
            row["rounds"].append(result)


def _units(config: Config) -> list[dict[str, Any]]:
    """Returns what a row is of: with `--add`, rows of other sizes are other rows."""
    sizes = {name: getattr(config, name) for name in ("batch_size", "seq_len", "memory_gib")}
    return [
        {"model": model, "rival": name, **sizes}
        for model in config.models
        for name in config.rivals
    ]


def compile_steps(config: Config, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Compiles what `time_steps` runs; returns the rivals that failed."""
    rows = _units(config)
    run = functools.partial(_run, config, folder, only_compile=True)
    with concurrent.futures.ThreadPoolExecutor(config.processes) as pool:
        results = list(pool.map(run, rows))
    return [row | result for row, result in zip(rows, results, strict=True) if result]


def _run(
    config: Config, folder: pathlib.Path, row: dict[str, Any], only_compile: bool = False
) -> dict[str, Any]:
    """Runs a rival in a separate process; returns what it printed, or why it failed."""
    job = Job(
        rival=row["rival"],
        model=row["model"],
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        dtype="bfloat16" if on_gpu() else "float32",
        warmup=config.warmup,
        steps=config.steps,
        implementation=None if on_gpu() else "interpreted",
        only_compile=only_compile,
    )
    command = [sys.executable, "-m", "benchmarks.whole_step", json.dumps(dataclasses.asdict(job))]
    settings = environment(folder)
    if config.memory_gib and not only_compile:
        share = config.memory_gib / _total_gib()
        settings |= {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.5f}",
        }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=config.seconds, env=settings,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failure": f"took more than {config.seconds:g} seconds"}
    if done.returncode != 0:
        return {"failure": done.stderr[-800:] or f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def _total_gib() -> float:
    """Returns the memory of the first GPU as its driver reports it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0]) / 1024


def step_cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a line of a table for each row; all are of one model and one size."""
    first = next((one for row in rows if (one := summary(row["rounds"])) is not None), None)
    cells = []
    for row in rows:
        one = summary(row["rounds"])
        if one is None:
            why = next((one["failure"] for one in row["rounds"] if "failure" in one), "not run")
            cells.append((row["rival"], why[-60:], *[""] * 6))
            continue
        against = one if first is None else first
        tokens = row["batch_size"] * row["seq_len"]
        cells.append(
            (
                row["rival"],
                f"{one['seconds'] * 1e3:,.1f}",
                f"{tokens / one['seconds']:,.0f}",
                f"{against['seconds'] / one['seconds']:.3f}",
                f"{one['memory'] / 2**30:.2f}" + ("" if one["peak"] else " (planned)"),
                f"{one['planned_peak'] / 2**30:.2f}",
                f"{one['matmul_flops'] / one['seconds'] / 1e12:,.2f}",
                f"{one['loss']:.4f}",
            )
        )
    return cells
