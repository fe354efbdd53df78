"""Held-out loss of every method, trained on the same tokens from the same weights.

`python -m benchmarks.loss --model llama_9m --steps 2000` trains every variant at each learning rate
of a grid, with further seeds at the best one, and prints the held-out loss after the last step.
Rows are written after each run; `--add` keeps the rows that exist.
"""

import dataclasses
import pathlib
import statistics
from typing import Any

from benchmarks import command, record
from benchmarks.tables import Cells, cell, print_cells
from benchmarks.training import best_rows, last_loss, mean_and_spread, sweep
from benchmarks.variants import VARIANTS, check_names
from train.settings.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    train: PretrainConfig = dataclasses.field(default_factory=lambda: PretrainConfig(steps=2000))
    """The run. This program sets the settings of a variant, learning rate, seed and folder."""
    variants: tuple[str, ...] = (
        "exact", "exact, 8-bit states", "pamm", "low_rank 32", "galore d/4", "subspace d/4",
        "subspace d/8", "random_projection d/4",
    )  # fmt: skip
    """Names from `benchmarks.variants`."""
    learning_rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 16e-3)
    """The grid, the same for all variants. Empty, with `--add`: no runs, only timing."""
    seeds: int = 1
    """Runs of each variant at its best rate, with other weights, data order and keys of codecs."""
    rounds: int = 10
    """Timed steps of the best rows, with the variants in turn: all are in memory at once. 0: no
    timing."""
    add: bool = False
    """Keep the rows in `--results`, and run only those that are missing."""
    results: pathlib.Path = record.RESULTS / "loss.json"

    def __post_init__(self) -> None:
        check_names(self.variants, tuple(VARIANTS))


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each variant, learning rate and seed: metrics of every evaluation."""
    runs = {name: (VARIANTS[name], config.train) for name in config.variants}
    return sweep(config, "variant", runs, lambda _: config.learning_rates)


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the last held-out loss of each variant, and its difference to `exact`."""
    cells, best = [], best_rows(rows, "variant")
    for name, group in best.items():
        best_run, losses = group[0], [last_loss(row) for row in group]
        gap, share = _gap(group, best["exact"]) if "exact" in best else ("", "")
        grid = [last_loss(row) for row in rows if row["variant"] == name and row["seed"] == 0]
        seconds = best_run.get("seconds")
        cells.append(
            {
                "variant": name,
                "held-out loss": mean_and_spread(losses, ".4f"),
                "above exact": gap,
                "in %": share,
                **{
                    f"{part}, MiB": cell(best_run.get(part), ".1f", 2**20)
                    for part in ("stored", "peak")
                },
                "ms a step": f"{statistics.median(seconds) * 1e3:.0f}" if seconds else "",
                "rate": f"{best_run['learning_rate']:g}",
                "on the grid": " ".join(f"{loss:.3f}" for loss in grid),
                "seeds": str(len(losses)),
            }
        )
    return cells


def _gap(rows: list[dict[str, Any]], exact: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns the mean difference to the runs of `exact` with the same seeds, also in %."""
    reference = {row["seed"]: last_loss(row) for row in exact}
    gaps = [last_loss(row) - reference[row["seed"]] for row in rows if row["seed"] in reference]
    share = 100 * statistics.mean(gaps) / statistics.mean(reference.values())
    return mean_and_spread(gaps, "+.4f"), f"{share:+.2f}"


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    train = config.train
    title = f"{train.model}, {train.steps} steps of {train.batch_size} x {train.seq_len} tokens"
    print_cells(title, table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
