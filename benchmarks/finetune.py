"""Fine-tuning of a pretrained checkpoint with every method: held-out loss, memory and time.

`python -m benchmarks.finetune --checkpoint DIR --data FILE`. A row is one configuration: its loss,
its memory and its time are of the same weights, rounding, moments and codes. Every row takes the
same steps on the same batches. With seed 0 each learning rate of one grid is tried, and further
seeds run at the best. Seeds change the order of the data, the adapters and the codecs.

The share of the way that a row keeps is `(L0 - L) / (L0 - L')`: L0 is the held-out loss before the
first step, L the last one of the row, and L' that of `exact` with float32 weights (of `qlora` for
adapters). `stored` counts the bytes that the forward pass stores for the backward pass; the peak is
that of the compiled step, with weights and workspace; the time is the median over steps, with the
methods in turn.
"""

import dataclasses
import pathlib
import statistics
from typing import Any

from benchmarks import command, record
from benchmarks.tables import Cells, print_cells
from benchmarks.training import first_loss, last_loss, mean_and_spread, timed, trained
from benchmarks.variants import check_names
from train.config import AdapterConfig, FinetuneConfig, OptimizerConfig
from train.options import MethodOptions, given_fields


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration to compare.

    Attributes:
      method: the method.
      options: its options.
      weight_dtype: dtype of the weights. bfloat16 weights that train are rounded stochastically.
      optimizer: settings of the optimizer that differ from those of the run.
    """

    method: str
    options: MethodOptions = MethodOptions()
    weight_dtype: str = "bfloat16"
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained."""
        return self.method in ("lora", "qlora", "hyc_lora")


_SMALL_STATES = {
    "4-bit states": OptimizerConfig(moment_dtype="4bit"),
    "factored": OptimizerConfig(factored_second_moment=True),
    "4-bit and factored": OptimizerConfig(moment_dtype="4bit", factored_second_moment=True),
}
_LEVELS: Any = ("none", "intra", "intra+inter")
REFERENCE, ADAPTER_REFERENCE = "exact, float32 weights", "qlora"
"""Rows that the others are compared with."""
ROWS: dict[str, Row] = {
    REFERENCE: Row("exact", weight_dtype="float32"),
    "exact": Row("exact"),
    **{f"exact, {name}": Row("exact", optimizer=o) for name, o in _SMALL_STATES.items()},
    "remat": Row("remat"),
    **{f"lean, {bits} bits": Row("lean", MethodOptions(bits=bits)) for bits in (4, 3, 2)},
    "gact": Row("gact"),
    "compressed_remat": Row("compressed_remat"),
    "pamm, 1/64": Row("pamm", MethodOptions(ratio=1 / 64)),
    "pamm, 1/512": Row("pamm", MethodOptions(ratio=1 / 512)),
    "pamm, one point": Row("pamm", MethodOptions(points=1)),
    "low_rank": Row("low_rank"),
    "subspace, d/4": Row("subspace"),
    "galore, d/4": Row("galore"),
    "lora": Row("lora", weight_dtype="auto"),
    "qlora": Row("qlora", weight_dtype="auto"),
    "qlora, remat": Row("qlora", MethodOptions(remat=True), "auto"),
    **{f"hyc_lora, {n} bits": Row("hyc_lora", MethodOptions(bits=n), "auto") for n in (4, 2)},
    **{
        f"hyc_lora, {bits} bits, {level}": Row(
            "hyc_lora",
            MethodOptions(bits=bits, scaling="channel", same_bits=True, level=level),
            "auto",
        )
        for bits in (4, 2)
        for level in _LEVELS
    },
    **{
        f"hyc_lora, {bits} bits, remat": Row(
            "hyc_lora", MethodOptions(bits=bits, remat=True), "auto"
        )
        for bits in (4, 2)
    },
}
"""The configurations, by name. Those of `hyc_lora` that name a level have the published codes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare."""

    train: FinetuneConfig
    """The run. This program sets method, learning rate, seed and folder."""
    only: tuple[str, ...] = tuple(ROWS)
    """Rows to run."""
    full_rates: tuple[float, ...] = (1e-5, 2e-5, 4e-5)
    """Learning rates where all weights are trained."""
    adapter_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    """Learning rates of adapters."""
    seeds: int = 1
    """Runs of each row, at its best learning rate."""
    rounds: int = 10
    """Timed steps, with the methods in turn: all models are in memory at once. 0: no timing."""
    add: bool = False
    """Keep the rows in `--results`, and run only those that are missing."""
    results: pathlib.Path = record.RESULTS / "finetune.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(ROWS))


def measure(config: Config) -> list[dict]:
    """Returns one row for each configuration, learning rate of seed 0, and further seed."""
    rows = record.rows_to_keep(config.results, config.add)
    known = {(row["name"], row["seed"], row["learning_rate"]) for row in rows}

    def run(name: str, seed: int, rate: float) -> None:
        if (name, seed, rate) not in known:
            row = {"name": name, "seed": seed, "learning_rate": rate}
            rows.append(row | trained(_settings(config, name, seed, rate)))
            record.write(config, rows)

    for name in config.only:
        for rate in config.adapter_rates if ROWS[name].has_adapters else config.full_rates:
            run(name, 0, rate)
    for seed in range(1, config.seeds):
        for name in config.only:
            run(name, seed, _best_rate(rows, name))
    if config.rounds:
        untimed = {row["name"]: row for row in reversed(rows) if row["name"] in config.only}
        settings = {name: _settings(config, name, 0, 1e-5) for name in untimed}
        for name, seconds in timed(settings, config.rounds).items():
            untimed[name]["seconds"] = seconds
    return rows


def _best_rate(rows: list[dict], name: str) -> float:
    """Returns the learning rate of the lowest last loss with seed 0."""
    tried = [row for row in rows if row["name"] == name and row["seed"] == 0]
    return min(tried, key=last_loss)["learning_rate"]


def _settings(config: Config, name: str, seed: int, rate: float) -> FinetuneConfig:
    row = ROWS[name]
    optimizer = dataclasses.replace(config.train.optimizer, **given_fields(row.optimizer))
    return dataclasses.replace(
        config.train,
        method=row.method,
        options=row.options,
        weight_dtype=row.weight_dtype,
        adapter=config.train.adapter if row.has_adapters else AdapterConfig(),
        optimizer=dataclasses.replace(optimizer, learning_rate=rate),
        seed=seed,
    )


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns loss, share of the way, memory and time of each configuration at its best rate."""
    names = dict.fromkeys(row["name"] for row in rows)
    best = {name: _best_rate(rows, name) for name in names}
    groups = {
        name: [r for r in rows if r["name"] == name and r["learning_rate"] == best[name]]
        for name in names
    }
    cells = []
    for name, group in groups.items():
        reference = groups.get(ADAPTER_REFERENCE if ROWS[name].has_adapters else REFERENCE, [])
        ends = {row["seed"]: row for row in reference}
        shares = [_share(row, ends[row["seed"]]) for row in group if row["seed"] in ends]
        times = [second for row in group for second in row.get("seconds", ())]
        cells.append(
            {
                "row": name,
                "held-out loss": mean_and_spread([last_loss(row) for row in group], ".4f"),
                "share of the way, %": mean_and_spread(shares, ".1f") if shares else "",
                "stored, MiB": f"{group[0]['stored'] / 2**20:.2f}",
                "peak, MiB": f"{group[0]['peak'] / 2**20:.1f}",
                "ms a step": f"{statistics.median(times) * 1e3:.0f}" if times else "",
                "rate": f"{best[name]:g}",
                "seeds": str(len(group)),
            }
        )
    return cells


def _share(row: dict[str, Any], reference: dict[str, Any]) -> float:
    """Returns the share of the way of the reference that a row keeps, in %."""
    first = first_loss(reference)
    return 100 * (first - last_loss(row)) / (first - last_loss(reference))


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    train = config.train
    title = f"{train.title}, {train.steps} steps of {train.batch_size} x {train.seq_len} tokens"
    print_cells(title, table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
