"""Whole training runs as rows of a result: what is learnt and stored, how long a step takes."""

import contextlib
import dataclasses
import hashlib
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from benchmarks import record
from benchmarks.rivals import compiled_memory
from train import finetune, pretrain
from train.run.loop import NonFiniteError, Run, StopSignal, train
from train.run.metrics import read_metrics
from train.run.report import explain_step, tree_bytes
from train.settings.config import FinetuneConfig, PretrainConfig

Settings = PretrainConfig | FinetuneConfig


def trained(settings: Settings) -> dict[str, Any]:
    """Trains to the end and returns what to compare.

    The run is saved ten times in a folder among the temporary files, whose name is a hash of the
    settings. If it was stopped or killed it continues from there.

    Returns:
      A row: `commit` and `xla_flags`; `weight_dtype`, `weight_rounding` and `compute_dtype`; bytes
      of `weights`, of the `optimizer` state, `stored` by the forward pass for the backward pass,
      `temporaries` and `peak` of the compiled step; `evaluations` and `training`, metrics by step.
      Both are empty if a loss was not finite: a learning rate that is too high is a result.

    Raises:
      SystemExit: a signal stopped the run.
    """
    folder = pathlib.Path(tempfile.gettempdir(), "actjax-benchmarks", _name(settings))
    console = Console(width=140)
    run = _prepare(settings, folder, console)
    environment = record.environment()
    row = {
        # With `--add`, rows can come from several commits, and ran with other flags.
        "commit": environment["commit"],
        "xla_flags": environment["xla_flags"],
        "weight_dtype": run.config.weight_dtype,
        "weight_rounding": run.config.weight_rounding,
        "compute_dtype": run.config.compute_dtype,
        "weights": tree_bytes(run.state.model),
        "optimizer": tree_bytes(run.state.optimizer),
        "stored": explain_step(run.recipe, run.state).stored_bytes,
        **compiled_memory(run.train_step),
    }
    try:
        with StopSignal() as stop:
            if train(run, console, stop) < settings.steps:
                raise SystemExit("stopped by a signal: continue with `--add`, which keeps all rows")
        lines = read_metrics(folder / "metrics.jsonl")
    except NonFiniteError as error:
        # Only what happened: the rest says where the checkpoint is, which is deleted below.
        console.print(f"{str(error).partition(':')[0]}: the row has no losses.")
        lines = []
    shutil.rmtree(folder)
    return row | {
        "evaluations": [line for line in lines if "validation_loss" in line],
        "training": [(line["step"], line["loss"]) for line in lines if "loss" in line],
    }


def sweep(
    config: Any,
    label: str,
    names: Sequence[str],
    rates: Callable[[str], Sequence[float]],
    settings: Callable[[str, int, float], Settings],
) -> list[dict[str, Any]]:
    """Trains configurations: with seed 0 at each rate, with further seeds at the best of them.

    Rows are written after each run. The best rows get the `seconds` of steps after the first, with
    the configurations in turn: all of them are in memory at once.

    Args:
      config: `seeds`, timed `rounds`, `results`, and whether to `add` to them.
      label: the entry of a row that names its configuration.
      names: the configurations.
      rates: returns the learning rates of a name.
      settings: returns the run of a name, a seed and a learning rate.
    """
    rows = record.rows_to_keep(config.results, config.add)
    known = {(row[label], row["seed"], row["learning_rate"]) for row in rows}

    def run(name: str, seed: int, rate: float) -> None:
        if (name, seed, rate) not in known:
            row = {label: name, "seed": seed, "learning_rate": rate}
            rows.append(row | trained(settings(name, seed, rate)))
            record.write(config, rows)

    for name in names:
        for rate in rates(name):
            run(name, 0, rate)
    best = {name: best_row(rows, label, name) for name in names}
    for seed in range(1, config.seeds):
        for name in names:
            run(name, seed, best[name]["learning_rate"])
    if config.rounds:
        runs = {name: settings(name, 0, row["learning_rate"]) for name, row in best.items()}
        for name, seconds in _timed(runs, config.rounds).items():
            best[name]["seconds"] = seconds
    return rows


def best_row(rows: Sequence[dict[str, Any]], label: str, name: str) -> dict[str, Any]:
    """Returns the row of a configuration with the lowest last loss of seed 0.

    Raises:
      SystemExit: there is no such row.
    """
    tried = [row for row in rows if row[label] == name and row["seed"] == 0]
    if not tried:
        raise SystemExit(f"no rows of {name!r}: give it a learning rate.")
    return min(tried, key=last_loss)


def _timed(settings: Mapping[str, Settings], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of steps after the first, by name, with the runs in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    quiet = Console(quiet=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_data:
        runs = {}
        for number, (name, run_settings) in enumerate(settings.items()):
            runs[name] = run = _prepare(run_settings, pathlib.Path(folder, str(number)), quiet)
            open_data.callback(run.batches.close)
        batches = {name: jax.device_put(next(run.batches)) for name, run in runs.items()}
        for _ in range(1 + rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run.state, _ = jax.block_until_ready(run.train_step(run.state, batches[name]))
                seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def first_loss(row: Mapping[str, Any]) -> float:
    """Returns the held-out loss before the first step, or at the first evaluation."""
    return row["evaluations"][0]["validation_loss"] if row["evaluations"] else float("nan")


def last_loss(row: Mapping[str, Any]) -> float:
    """Returns the last held-out loss of a run; infinite if it diverged."""
    return row["evaluations"][-1]["validation_loss"] if row["evaluations"] else float("inf")


def mean_and_spread(values: Sequence[float], spec: str) -> str:
    """Returns the text of a mean, with the standard deviation if there are several values."""
    mean = f"{statistics.mean(values):{spec}}"
    spread = f" ± {statistics.stdev(values):{spec.strip('+')}}" if len(values) > 1 else ""
    return mean + spread


def _name(settings: Settings) -> str:
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def _prepare(settings: Settings, folder: pathlib.Path, console: Console) -> Run:
    every = max(1, settings.steps // 10)
    settings = dataclasses.replace(settings, out=folder, resume=True, save_every=every)
    if isinstance(settings, FinetuneConfig):
        return finetune.prepare(settings, console)
    return pretrain.prepare(settings, console)
