"""Whole training runs as rows of a result: losses, stored bytes, and times of a step."""

import contextlib
import dataclasses
import hashlib
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from benchmarks import record
from benchmarks.timing import Advancing, interleaved
from benchmarks.training_steps import compiled_memory
from benchmarks.variants import Variant
from train import finetune, pretrain
from train.run.loop import Run, train
from train.run.metrics import read_metrics
from train.run.program import NonFiniteError
from train.run.report import explain_step, tree_bytes
from train.settings.config import FinetuneConfig, PretrainConfig

Settings = PretrainConfig | FinetuneConfig


def trained(settings: Settings) -> dict[str, Any]:
    """Trains to the end and returns a row of results.

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
    name = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
    folder = pathlib.Path(tempfile.gettempdir(), "actjax-benchmarks", name)
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
        if train(run, console) < settings.steps:
            raise SystemExit("stopped by a signal: continue with `--add`, which keeps all rows")
        lines = read_metrics(folder / "metrics.jsonl")
    except NonFiniteError as error:
        # The remaining message says where the checkpoint is, which is deleted below.
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
    runs: Mapping[str, tuple[Variant, Settings]],
    rates: Callable[[str], Sequence[float]],
) -> list[dict[str, Any]]:
    """Trains configurations: with seed 0 at each rate, with further seeds at the best of them.

    Rows are written after each run. The best rows get the `seconds` of steps after the first, with
    the configurations in turn: all of them are in memory at once.

    Args:
      config: `seeds`, timed `rounds`, `results`, and whether to `add` to them.
      label: the entry of a row that names its configuration.
      runs: by name, the configurations, and the settings that they change.
      rates: returns the learning rates of a name.
    """
    rows = record.rows_to_keep(config.results, config.add)
    known = {(row[label], row["seed"], row["learning_rate"]) for row in rows}

    def settings(name: str, seed: int, rate: float) -> Settings:
        variant, train = runs[name]
        run = variant.configure(train)
        optimizer = dataclasses.replace(run.optimizer, learning_rate=rate)
        return dataclasses.replace(run, optimizer=optimizer, seed=seed)

    def run(name: str, seed: int, rate: float) -> None:
        if (name, seed, rate) not in known:
            row = {label: name, "seed": seed, "learning_rate": rate}
            rows.append(row | trained(settings(name, seed, rate)))
            record.write(config, rows)

    for name in runs:
        for rate in rates(name):
            run(name, 0, rate)
    best = {name: _best_row(rows, label, name) for name in runs}
    for seed in range(1, config.seeds):
        for name in runs:
            run(name, seed, best[name]["learning_rate"])
    if config.rounds:
        timed = {name: settings(name, 0, row["learning_rate"]) for name, row in best.items()}
        for name, seconds in _timed(timed, config.rounds).items():
            best[name]["seconds"] = seconds
    return rows


def _best_row(rows: Sequence[dict[str, Any]], label: str, name: str) -> dict[str, Any]:
    """Returns the row of a configuration with the lowest last loss of seed 0."""
    tried = [row for row in rows if row[label] == name and row["seed"] == 0]
    if not tried:
        raise SystemExit(f"no rows of {name!r}: give it a learning rate.")
    return min(tried, key=last_loss)


def best_rows(rows: Sequence[dict[str, Any]], label: str) -> dict[str, list[dict[str, Any]]]:
    """Returns, for each configuration, the rows at its best learning rate.

    That is the one with the least mean loss among those with the most seeds: a mean of several
    seeds and a loss of one do not compare.
    """
    groups: dict[str, dict[float, list[dict]]] = {}
    for row in rows:
        groups.setdefault(row[label], {}).setdefault(row["learning_rate"], []).append(row)
    return {
        name: min(
            by_rate.values(),
            key=lambda rows: (-len(rows), statistics.mean(map(last_loss, rows))),
        )
        for name, by_rate in groups.items()
    }


def _timed(settings: Mapping[str, Settings], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of steps after the first, by name, with the runs in turn."""
    steps = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_data:
        for number, (name, run_settings) in enumerate(settings.items()):
            path = pathlib.Path(folder, str(number))
            run = _prepare(run_settings, path, Console(quiet=True))
            open_data.callback(run.batches.close)
            batch = jax.device_put(next(run.batches))
            steps[name] = Advancing(run.state).by(run.train_step, batch)
        return interleaved(steps, rounds)


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


def _prepare(settings: Settings, folder: pathlib.Path, console: Console) -> Run:
    every = max(1, settings.steps // 10)
    settings = dataclasses.replace(settings, out=folder, resume=True, save_every=every)
    if isinstance(settings, FinetuneConfig):
        return finetune.prepare(settings, console)
    return pretrain.prepare(settings, console)
