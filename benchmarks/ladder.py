"""From plain JAX to the default method, one change at a time: memory, operations, time and loss.

`python -m benchmarks.ladder` compiles a step of `llama_1b` with each rung for a GPU, and trains
`llama_3m` here with each rung on the same batches. It prints the seconds of a step and the
seconds of training until the held-out loss is one that every rung reaches: a rung that is fast and
learns slowly gains nothing. Rungs take turns after each evaluation, so that a machine that slows
down slows all of them.
"""

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import command, memory, record
from benchmarks.tables import Cells, cell, print_cells
from benchmarks.training_steps import training_step
from benchmarks.variants import check_names
from models import PRESETS
from train.planning.devices import find_device
from train.run.recipe import make_recipe
from train.run.step import make_eval_step
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.resolve import dimensions
from train.text.corpus import open_corpus
from train.text.data import ValidationSet, train_batches, validation_batches
from train.text.trained_tokenizer import default_tokenizer

RUNGS = {
    "plain": "plain JAX, optax.adamw",
    "jax.checkpoint, full": "the same, jax.checkpoint around each layer",
    "exact": "operators of actjax",
    "quantized, 4 bits": "+ codes of 4 bits",
    "quantized, 4 bits, in backward": "+ optimizer in the backward pass",
    "lean": "+ moments in 8 bits (`lean`)",
    "lean, 4-bit and factored": "+ moments in 4 bits and factored",
}
"""Names of steps, and the change of each to the one before. The second is no rung."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    compiled: str = "llama_1b"
    """Preset whose step is compiled."""
    compiled_batch_size: int = 8
    """Sequences of its step."""
    compiled_seq_len: int = 1024
    """Tokens of its sequences."""
    device: str = "h100"
    """GPU to compile for, or here."""
    model: str = "llama_3m"
    """Preset that is trained."""
    steps: int = 400
    """Steps of training."""
    batch_size: int = 8
    """Sequences of a step of training."""
    seq_len: int = 128
    """Tokens of its sequences."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    evaluations: int = 10
    """Evaluations on held-out text."""
    eval_batches: int = 10
    """Batches of an evaluation."""
    seed: int = 0
    """Seed of the weights, the batches and the codecs."""
    results: pathlib.Path = record.RESULTS / "ladder.json"

    def __post_init__(self) -> None:
        find_device(self.device)
        check_names((self.compiled,), tuple(PRESETS), "--compiled")
        check_names((self.model,), tuple(PRESETS), "--model")
        if not 1 <= self.evaluations <= self.steps:
            raise ValueError(
                f"`--evaluations` must be between 1 and `--steps` {self.steps}, got"
                f" {self.evaluations}."
            )

    def training(self) -> PretrainConfig:
        """Returns the run, without a method. Weights are in bfloat16, as compiled."""
        return PretrainConfig(
            model=self.model,
            steps=self.steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seed=self.seed,
            weight_dtype="bfloat16",
            compute_dtype="bfloat16",
            optimizer=OptimizerConfig(
                learning_rate=self.learning_rate, warmup_steps=self.steps // 10
            ),
        )


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each rung."""
    step: Any = PretrainConfig(
        model=config.compiled,
        batch_size=config.compiled_batch_size,
        seq_len=config.compiled_seq_len,
        weight_dtype="bfloat16",
        compute_dtype="bfloat16",
    )
    rows = []
    for name in RUNGS:
        row = memory.measure_step(name, memory.Config(train=step, device=config.device))
        print(f"{name}: {row['peak'] / 2**30:.2f} GiB", flush=True)
        rows.append({"rival": name, **row})
    trained = _trained(config)
    return with_time_to_loss([row | trained[row["rival"]] for row in rows])


def with_time_to_loss(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with `common_loss`, which all reach, and `seconds_to_loss`.

    The seconds are those of the steps until the first evaluation that is not above it; None for a
    rung whose losses are not finite, which does not count.
    """
    best = [[p["loss"] for p in row["curve"] if math.isfinite(p["loss"])] for row in rows]
    common = max((min(losses) for losses in best if losses), default=math.nan)
    reached = [[p["seconds"] for p in row["curve"] if p["loss"] <= common] for row in rows]
    return [
        row | {"common_loss": common, "seconds_to_loss": seconds[0] if seconds else None}
        for row, seconds in zip(rows, reached, strict=True)
    ]


def _trained(config: Config) -> dict[str, dict[str, Any]]:
    """Returns, for each rung, seconds of a step, and the held-out losses by step and seconds."""
    train = config.training()
    data_dir = train.data.data_dir.expanduser()
    corpus = open_corpus("stdlib", data_dir)
    tokenizer = default_tokenizer(corpus, train.data.vocab_size, data_dir)
    sizes: dict[str, Any] = {"batch_size": train.batch_size, "seq_len": train.seq_len}
    held_out = validation_batches(corpus, tokenizer, eval_batches=config.eval_batches, **sizes)
    batches = train_batches(corpus, tokenizer, seed=train.seed, part=(0, 1), **sizes)
    batches_of_run = [next(batches) for _ in range(train.steps)]
    batches.close()
    runs = {name: _run(name, train, batches_of_run, held_out, config) for name in RUNGS}
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for i in range(config.evaluations):
        for name, run in runs.items():
            points[name].append(next(run))
        print(f"evaluation {i + 1} of {config.evaluations}", flush=True)
    return {
        name: {
            "curve": [{k: v for k, v in p.items() if k != "taken"} for p in curve],
            "seconds_per_step": statistics.median(t for p in curve for t in p["taken"]),
            "loss": curve[-1]["loss"],
        }
        for name, curve in points.items()
    }


def _run(
    name: str,
    train: PretrainConfig,
    batches: Sequence[Any],
    held_out: ValidationSet,
    config: Config,
) -> Iterator[dict[str, Any]]:
    """Trains, and yields at each evaluation."""
    built = training_step(name, train)
    evaluate = jax.jit(make_eval_step(make_recipe(train, dimensions(train))))
    state = jax.jit(built.init)()
    step = jax.jit(built.step, donate_argnums=0).lower(state, batches[0]).compile()
    seconds, taken = 0.0, []
    every = len(batches) // config.evaluations
    for i, batch in enumerate(batches[: every * config.evaluations], start=1):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        taken.append(time.perf_counter() - began)
        seconds += taken[-1]
        if i % every == 0:
            nats = sum(float(evaluate(state.model, b)) for b in held_out.batches)
            loss = nats / held_out.num_tokens
            yield {"step": i, "seconds": seconds, "loss": loss, "taken": taken}
            taken = []


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the ladder, a row for each rung."""
    first = rows[0]
    return [
        {
            "rung": RUNGS[row["rival"]],
            "peak, GiB": f"{row['peak'] / 2**30:.2f}",
            "operations": f"{row['matmul_flops'] / first['matmul_flops']:.2f}",
            "s a step": f"{row['seconds_per_step']:.3f}",
            "/ first": f"{row['seconds_per_step'] / first['seconds_per_step']:.2f}",
            "held-out loss": cell(row["loss"], ".3f"),
            f"s to a loss of {cell(row['common_loss'], '.3f')}": cell(
                row["seconds_to_loss"], ".0f"
            ),
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the ladder."""
    print_cells(
        f"{config.compiled} compiled for {config.device}; {config.model} trained here for"
        f" {config.steps} steps",
        table(rows),
    )


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
