"""Held-out loss of every method, trained on the same tokens from the same weights.

`python -m benchmarks.loss --model llama_9m --steps 500` trains every variant at each learning rate
of a grid, and prints the held-out loss after the last step at the best rate. Rows are written after
each run; `--add` keeps the rows that exist.
"""

import dataclasses
import math
import pathlib
import shutil
import statistics
import tempfile

import tyro
from rich.console import Console

from benchmarks import record
from benchmarks.tables import print_table
from benchmarks.variants import VARIANTS, check_names
from train.config import PretrainConfig
from train.loop import NonFiniteError
from train.metrics import read_metrics
from train.pretrain import run


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare."""

    train: PretrainConfig = dataclasses.field(default_factory=lambda: PretrainConfig(steps=500))
    """The run. This program sets the settings of a variant, learning rate, seed and folder."""
    variants: tuple[str, ...] = (
        "exact",
        "exact, 8-bit states",
        "pamm",
        "low_rank 32",
        "galore d/4",
        "subspace d/4",
        "subspace d/8",
        "random_projection d/4",
    )
    """Names from `benchmarks.variants`."""
    learning_rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 16e-3)
    """The grid, the same for all variants."""
    seeds: int = 1
    """Runs of each variant, with other weights, data order and keys of codecs."""
    add: bool = False
    """Keep the rows in `--results`, and run only those that are missing."""
    results: pathlib.Path = record.RESULTS / "loss.json"

    def __post_init__(self) -> None:
        check_names(self.variants, tuple(VARIANTS))


def measure(config: Config) -> list[dict]:
    """Returns one row for each variant, learning rate and seed: metrics of every evaluation."""
    rows = record.read(config.results)["rows"] if config.add else []
    known = {(row["variant"], row["learning_rate"], row["seed"]) for row in rows}
    for seed in range(config.seeds):
        for rate in config.learning_rates:
            for name in config.variants:
                if (name, rate, seed) not in known:
                    rows.append(_trained(config, name, rate, seed))
                    record.write(config, rows)
    return rows


def _trained(config: Config, name: str, learning_rate: float, seed: int) -> dict:
    folder = pathlib.Path(tempfile.mkdtemp())
    settings = VARIANTS[name].configure(config.train)
    settings = dataclasses.replace(
        settings,
        optimizer=dataclasses.replace(settings.optimizer, learning_rate=learning_rate),
        seed=seed,
        out=folder,
        save_every=settings.steps,
    )
    row = {"variant": name, "learning_rate": learning_rate, "seed": seed}
    try:
        if run(settings, Console(width=140)) < settings.steps:
            raise SystemExit(
                "stopped by a signal: continue with `--add`, which keeps the finished rows"
            )
        lines = read_metrics(folder / "metrics.jsonl")
    except NonFiniteError:
        # A learning rate that is too high is a result, not a failure of the program.
        lines = []
    shutil.rmtree(folder)
    evaluations = [line for line in lines if "validation_loss" in line]
    training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return row | {"evaluations": evaluations, "training": training}


def best_rows(rows: list[dict]) -> dict[str, list[dict]]:
    """Returns, for each variant, the rows at the learning rate with the least mean loss."""
    groups: dict[str, dict[float, list[dict]]] = {}
    for row in rows:
        groups.setdefault(row["variant"], {}).setdefault(row["learning_rate"], []).append(row)
    return {
        name: min(by_rate.values(), key=lambda group: statistics.mean(map(last_loss, group)))
        for name, by_rate in groups.items()
    }


def last_loss(row: dict) -> float:
    """Returns the last held-out loss of a run; infinite if it diverged."""
    return row["evaluations"][-1]["validation_loss"] if row["evaluations"] else math.inf


def show(config: Config, rows: list[dict]) -> None:
    """Prints the last held-out loss of each variant, and its difference to `exact`."""
    train = config.train
    title = f"{train.model}, {train.steps} steps of {train.batch_size} x {train.seq_len} tokens"
    headers = ("variant", "held-out loss", "above exact", "in %", "rate", "on the grid", "seeds")
    cells = []
    best = best_rows(rows)
    for name in config.variants:
        losses = [last_loss(row) for row in best[name]]
        gap, share = _gap(best[name], best["exact"]) if "exact" in best else ("", "")
        spread = f" ± {statistics.stdev(losses):.4f}" if config.seeds > 1 else ""
        grid = [last_loss(row) for row in rows if row["variant"] == name and row["seed"] == 0]
        cells.append(
            (
                name,
                f"{statistics.mean(losses):.4f}{spread}",
                gap,
                share,
                f"{best[name][0]['learning_rate']:g}",
                " ".join(f"{loss:.3f}" for loss in grid),
                str(len(losses)),
            )
        )
    print_table(title, headers, cells)


def _gap(rows: list[dict], exact: list[dict]) -> tuple[str, str]:
    """Returns the mean difference to the runs of `exact` with the same seeds, also in %."""
    reference = {row["seed"]: last_loss(row) for row in exact}
    gaps = [last_loss(row) - reference[row["seed"]] for row in rows if row["seed"] in reference]
    mean = statistics.mean(gaps)
    spread = f" ± {statistics.stdev(gaps):.4f}" if len(gaps) > 1 else ""
    return f"{mean:+.4f}{spread}", f"{100 * mean / statistics.mean(reference.values()):+.2f}"


def main() -> None:
    config = tyro.cli(Config, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    show(config, measure(config))


if __name__ == "__main__":
    main()
