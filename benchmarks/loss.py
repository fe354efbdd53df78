"""What each method costs in loss: the same tokens and weights, trained with every method.

`python -m benchmarks.loss --model llama_9m --steps 500` prints held-out loss after the last step,
and the spread over seeds if there are several.
"""

import dataclasses
import pathlib
import shutil
import statistics
import tempfile

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import record
from train.config import PretrainConfig
from train.methods import METHODS
from train.metrics import read_metrics
from train.pretrain import run


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare."""

    train: PretrainConfig = dataclasses.field(default_factory=lambda: PretrainConfig(steps=500))
    """The run; its method, seed and folder are set by this program."""
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: int = 1
    results: pathlib.Path = record.RESULTS / "loss.json"


def measure(config: Config) -> list[dict]:
    """Returns one row a method and seed: metrics of every evaluation."""
    rows = []
    for seed in range(config.seeds):
        for method in config.methods:
            folder = pathlib.Path(tempfile.mkdtemp())
            settings = dataclasses.replace(
                config.train, method=method, seed=seed, out=folder, save_every=config.train.steps
            )
            if run(settings, Console(width=140)) < settings.steps:
                raise SystemExit("stopped by a signal: nothing was written")
            lines = read_metrics(folder / "metrics.jsonl")
            shutil.rmtree(folder)
            evaluations = [line for line in lines if "validation_loss" in line]
            training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
            rows.append(
                {"method": method, "seed": seed, "evaluations": evaluations, "training": training}
            )
    return rows


def show(config: Config, rows: list[dict]) -> None:
    """Prints the last held-out loss of each method, and what it is above `exact`."""
    train = config.train
    title = f"{train.model}, {train.steps} steps of {train.batch_size} x {train.seq_len} tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for header in ("method", "held-out loss", "above exact", "perplexity", "bits a byte", "seeds"):
        table.add_column(header, justify="left" if header == "method" else "right")
    last = {(row["method"], row["seed"]): row["evaluations"][-1] for row in rows}
    for method in config.methods:
        mine = [last[method, seed] for seed in range(config.seeds)]
        losses = [line["validation_loss"] for line in mine]
        gaps = [
            line["validation_loss"] - last["exact", seed]["validation_loss"]
            for seed, line in enumerate(mine)
            if ("exact", seed) in last
        ]
        spread = f" ± {statistics.stdev(losses):.4f}" if config.seeds > 1 else ""
        table.add_row(
            method,
            f"{statistics.mean(losses):.4f}{spread}",
            f"{statistics.mean(gaps):+.4f}" if gaps else "",
            f"{statistics.mean(line['perplexity'] for line in mine):,.2f}",
            f"{statistics.mean(line['bits_per_byte'] for line in mine):.4f}",
            str(config.seeds),
        )
    Console(width=110).print(table)


def main() -> None:
    config = tyro.cli(Config, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    rows = measure(config)
    show(config, rows)
    record.write(config, rows)


if __name__ == "__main__":
    main()
