"""Fine-tuning of a pretrained checkpoint with every method: held-out loss, memory and time.

`python -m benchmarks.finetune --checkpoint DIR --data FILE`. Every method takes the same steps on
the same batches. `stored` counts the bytes that the forward pass stores for the backward pass. The
peak is that of the compiled step, with weights and workspace. The time is the median over steps,
with the methods in turn. Seeds change the order of the data, the adapters and the codecs; with
several seeds each loss has a standard deviation.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
from rich.console import Console

from benchmarks import command, record
from benchmarks.rivals import compiled_memory
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train import finetune
from train.config import AdapterConfig, FinetuneConfig
from train.loop import NonFiniteError, StopSignal, train
from train.metrics import read_metrics
from train.options import MethodOptions
from train.report import explain_step

_LEVELS: Any = ("none", "intra", "intra+inter")
METHODS: dict[str, tuple[str, MethodOptions]] = {
    "exact": ("exact", MethodOptions()),
    "remat": ("remat", MethodOptions()),
    "pamm, one point": ("pamm", MethodOptions(points=1)),
    "pamm": ("pamm", MethodOptions(ratio=1 / 64)),
    "low_rank": ("low_rank", MethodOptions(rank=16)),
    "subspace": ("subspace", MethodOptions(rank=16)),
    "gact": ("gact", MethodOptions()),
    "lean": ("lean", MethodOptions()),
    "lora": ("lora", MethodOptions()),
    "qlora": ("qlora", MethodOptions()),
    "qlora, remat": ("qlora", MethodOptions(remat=True)),
    **{
        f"hyc_lora, {bits} bits, {level}": ("hyc_lora", MethodOptions(bits=bits, level=level))
        for bits in (4, 2)
        for level in _LEVELS
    },
    **{
        f"hyc_lora, {bits} bits, remat": ("hyc_lora", MethodOptions(bits=bits, remat=True))
        for bits in (4, 2)
    },
}
"""By name: the method and its options."""
ADAPTERS = ("lora", "qlora", "hyc_lora")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare."""

    train: FinetuneConfig
    """The run. This program sets method, learning rate, seed and folder."""
    only: tuple[str, ...] = tuple(METHODS)
    """Methods to run."""
    full_rate: float = 3e-3
    """Learning rate where all weights are trained."""
    adapter_rate: float = 1e-2
    """Learning rate of adapters."""
    seeds: int = 1
    """Runs of each method."""
    rounds: int = 10
    """Timed steps, with the methods in turn: all models are in memory at once. 0: no timing."""
    add: bool = False
    """Keep the rows in `--results`, and run only those that are missing."""
    results: pathlib.Path = record.RESULTS / "finetune.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(METHODS))


def measure(config: Config) -> list[dict]:
    """Returns one row for each method and seed."""
    rows = record.read(config.results)["rows"] if config.add else []
    known = {(row["name"], row["seed"]) for row in rows}
    for seed in range(config.seeds):
        for name in config.only:
            if (name, seed) not in known:
                rows.append(_trained(config, name, seed))
                record.write(config, rows)
    if config.rounds:
        untimed = {row["name"]: row for row in reversed(rows) if row["name"] in config.only}
        for name, seconds in _timed(config, list(untimed)).items():
            untimed[name]["seconds"] = seconds
    return rows


def _settings(config: Config, name: str, seed: int, folder: pathlib.Path) -> FinetuneConfig:
    method, options = METHODS[name]
    rate = config.adapter_rate if method in ADAPTERS else config.full_rate
    return dataclasses.replace(
        config.train,
        method=method,
        options=options,
        adapter=config.train.adapter if method in ADAPTERS else AdapterConfig(),
        optimizer=dataclasses.replace(config.train.optimizer, learning_rate=rate),
        seed=seed,
        out=folder,
        save_every=config.train.steps,
    )


def _timed(config: Config, names: list[str]) -> dict[str, list[float]]:
    """Returns the seconds of each step after the first, by method."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_data:
        runs = {}
        for name in names:
            settings = _settings(config, name, 0, pathlib.Path(folder, str(len(runs))))
            runs[name] = run = finetune.prepare(settings, Console(quiet=True))
            open_data.callback(run.batches.close)
        batches = {name: jax.device_put(next(run.batches)) for name, run in runs.items()}
        for _ in range(1 + config.rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run.state, _ = jax.block_until_ready(run.train_step(run.state, batches[name]))
                seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def _trained(config: Config, name: str, seed: int) -> dict:
    folder = pathlib.Path(tempfile.mkdtemp())
    settings = _settings(config, name, seed, folder)
    console = Console(width=140)
    run = finetune.prepare(settings, console)
    row = {
        "name": name,
        "seed": seed,
        # With `add`, rows can come from several commits.
        "commit": record.environment()["commit"],
        "learning_rate": settings.optimizer.learning_rate,
        "stored": explain_step(run.recipe, run.state).stored_bytes,
        **compiled_memory(run.train_step),
    }
    try:
        with StopSignal() as stop:
            if train(run, console, stop) < settings.steps:
                raise SystemExit(
                    "stopped by a signal: continue with `--add`, which keeps the finished rows"
                )
        lines = read_metrics(folder / "metrics.jsonl")
    except NonFiniteError:
        # A learning rate that is too high is a result, not a failure of the program.
        lines = []
    shutil.rmtree(folder)
    return row | {
        "losses": [line["validation_loss"] for line in lines if "validation_loss" in line],
        "training": [line["loss"] for line in lines if "loss" in line],
    }


def show(config: Config, rows: list[dict]) -> None:
    """Prints the rows as a table."""
    train = config.train
    title = f"{train.title}, {train.steps} steps of {train.batch_size} x {train.seq_len} tokens"
    headers = (
        "method",
        "held-out loss",
        "above qlora",
        "stored, MiB",
        "peak, MiB",
        "ms a step",
        "rate",
        "seeds",
    )
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    base = {row["seed"]: _last(row) for row in groups.get("qlora", [])}
    cells = []
    for name, group in groups.items():
        gaps = [_last(row) - base[row["seed"]] for row in group if row["seed"] in base]
        times = [second for row in group for second in row.get("seconds", ())]
        cells.append(
            (
                name,
                _spread([_last(row) for row in group]),
                _spread(gaps, "+") if gaps else "",
                f"{group[0]['stored'] / 2**20:.2f}",
                f"{group[0]['peak'] / 2**20:.1f}",
                f"{statistics.median(times) * 1e3:.0f}" if times else "",
                f"{group[0]['learning_rate']:g}",
                str(len(group)),
            )
        )
    print_table(title, headers, cells)


def _last(row: dict) -> float:
    return row["losses"][-1] if row["losses"] else float("inf")


def _spread(values: list[float], sign: str = "") -> str:
    mean = f"{statistics.mean(values):{sign}.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
