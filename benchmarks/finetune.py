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
import functools
import pathlib
import statistics
from typing import Any

from benchmarks import command, record
from benchmarks.tables import Cells, print_cells
from benchmarks.training import best_rows, first_loss, last_loss, mean_and_spread, sweep
from benchmarks.variants import VARIANTS, Variant, check_names, codec
from train.settings.config import (
    AdapterConfig,
    FinetuneConfig,
    MomentDtype,
    OptimizerConfig,
    WeightDtype,
)
from train.settings.options import ADAPTERS


def _row(
    method: str,
    *codecs: str,
    weight_dtype: WeightDtype = "bfloat16",
    moment_dtype: MomentDtype = "auto",
    **options: Any,
) -> Variant:
    """Returns a row; `codecs` are the values of `--codec`."""
    return Variant(
        method,
        options=codec(*codecs, **options),
        optimizer=OptimizerConfig(moment_dtype=moment_dtype),
        weight_dtype=weight_dtype,
    )


_adapters = functools.partial(_row, weight_dtype="auto")
REFERENCE, ADAPTER_REFERENCE = "exact, float32 weights", "qlora"
"""Rows that the others are compared with."""
ROWS = {
    REFERENCE: _row("exact", weight_dtype="float32"),
    "exact": _row("exact"),
    "exact, 4-bit states": _row("exact", moment_dtype="4bit"),
    "exact, factored": _row("exact", moment_dtype="float32-factored"),
    "exact, 4-bit and factored": _row("exact", moment_dtype="4bit-factored"),
    "remat": _row("remat"),
    **{f"lean, {bits} bits": _row("lean", f"Quantized({bits})") for bits in (4, 3, 2)},
    "gact": _row("gact"),
    "compressed_remat": VARIANTS["compressed_remat"],
    "pamm, 1/64": _row("pamm", "PointApproximation(0.015625)"),
    "pamm, 1/512": _row("pamm", "PointApproximation(0.001953125)"),
    "pamm, one point": _row("pamm", "PointApproximation(points=1)"),
    "low_rank": _row("low_rank"),
    "subspace, d/4": _row("subspace"),
    "subspace, d/4, equal rates": _row("subspace", scale=1.0),
    "lean_subspace, d/4, equal rates": _row("lean_subspace", scale=1.0),
    "galore, d/4": _row("galore"),
    "lora": _adapters("lora"),
    "qlora": _adapters("qlora"),
    "qlora, remat": _adapters("qlora", remat=True),
    **{f"hyc_lora, {n} bits": _adapters("hyc_lora", f"Quantized({n})") for n in (4, 2)},
    **{
        f"hyc_lora, {bits} bits, {level}": _adapters(
            "hyc_lora", f"Quantized({bits}, scaling='channel')", level=level
        )
        for bits in (4, 2)
        for level in ("none", "intra", "intra+inter")
    },
    **{
        f"hyc_lora, {bits} bits, remat": _adapters("hyc_lora", f"Quantized({bits})", remat=True)
        for bits in (4, 2)
    },
}
"""The configurations, by name. Those of `hyc_lora` that name a level have the published codes.

Where rates are equal, a scale of 1 gives projected weights the rate of embedding and head."""


def _has_adapters(name: str) -> bool:
    return ROWS[name].method in ADAPTERS


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

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


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each configuration, learning rate of seed 0, and further seed."""
    full = dataclasses.replace(config.train, adapter=AdapterConfig())
    runs = {
        name: (ROWS[name], config.train if _has_adapters(name) else full) for name in config.only
    }
    return sweep(
        config,
        "name",
        runs,
        lambda name: config.adapter_rates if _has_adapters(name) else config.full_rates,
    )


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns loss, share of the way, memory and time of each configuration at its best rate."""
    groups, cells = best_rows(rows, "name"), []
    for name, group in groups.items():
        reference = groups.get(ADAPTER_REFERENCE if _has_adapters(name) else REFERENCE, [])
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
                "rate": f"{group[0]['learning_rate']:g}",
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
