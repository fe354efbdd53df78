"""Time of a whole training step, with all methods and baselines interleaved in one run.

`python -m benchmarks.step_time --model llama_60m --compute-dtype float32` on a CPU; on a GPU
`... --model llama_1b --batch-size 8 --seq-len 1024 --weight-dtype bfloat16`.

Each round runs every step once, so that a drift of the machine affects all of them equally. The
result is the median over rounds. Each has separate weights. The bound of a time is the
time of the step's matrix products at the rate of a large product in the same run.
"""

import dataclasses
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command, memory, record
from benchmarks.tables import Cells, print_cells
from benchmarks.timing import Advancing, interleaved
from benchmarks.training_steps import ON_DEVICE, compiled_memory, random_batch, training_step
from benchmarks.variants import check_names
from train.run.gpus import gpu_of_kind
from train.settings.config import PretrainConfig
from train.settings.resolve import dimensions


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    train: PretrainConfig = dataclasses.field(default_factory=PretrainConfig)
    """Model, batch and dtypes. This program sets the method."""
    rounds: int = 10
    """Timed steps of each, after two steps that are not counted."""
    only: tuple[str, ...] = (
        "plain", "jax.checkpoint, dots", "jax.checkpoint, full", "exact", "remat", "pamm",
        "low_rank 32", "galore d/4", "subspace d/4", "subspace d/16", "random_projection d/4",
    )  # fmt: skip
    """Steps to measure, from `benchmarks.training_steps`."""
    results: pathlib.Path = record.RESULTS / "step_time.json"

    def __post_init__(self) -> None:
        check_names(self.only, ON_DEVICE)


def measure(config: Config) -> tuple[list[dict[str, Any]], float]:
    """Returns one row for each step, and the rate of a large product in FLOP/s."""
    batch = random_batch(config.train, dimensions(config.train).vocab_size)
    rows, calls = [], {}
    for name in config.only:
        built = training_step(name, config.train)
        shapes = jax.eval_shape(built.init)
        programs = {
            kind: (run, jax.jit(run, donate_argnums=0).lower(shapes, batch).compile())
            for kind, run in (("", built.step), ("refresh_", built.refresh))
            if run is not None
        }
        row: dict[str, Any] = {"rival": name, **compiled_memory(programs[""][1])}
        row["refresh_seconds"] = []
        state = Advancing(jax.jit(built.init)())
        for kind, (run, program) in programs.items():
            row[f"{kind}matmul_flops"] = memory.operations(run, shapes, batch)
            calls[name, f"{kind}seconds"] = state.by(program, batch)
        rows.append(row)
    for (name, kind), seconds in interleaved(calls, config.rounds).items():
        rows[config.only.index(name)][kind] = seconds
    return rows, _matmul_rate(jnp.dtype(config.train.compute_dtype))


def _matmul_rate(dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of a large square product of random numbers, the best of five runs."""
    size = 8192 if jax.default_backend() == "gpu" else 2048
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32).astype(dtype))
    return 2 * size**3 / min(interleaved({"": lambda: product(a)}, rounds=5)[""])


def table(rows: list[dict[str, Any]], rate: float, tokens: int) -> Cells:
    """Returns medians, ratios to the first row, and bounds."""
    gpu = gpu_of_kind(jax.devices()[0].device_kind)
    cells, first = [], statistics.median(rows[0]["seconds"])
    for row in rows:
        seconds, refresh = row["seconds"], row["refresh_seconds"]
        median, bound = statistics.median(seconds), row["matmul_flops"] / rate
        spread = f"({min(seconds) * 1e3:,.1f} to {max(seconds) * 1e3:,.1f})"
        cells.append(
            {
                "step": row["rival"],
                "ms (min to max)": f"{median * 1e3:,.1f} {spread}",
                "/ first": f"{median / first:.3f}",
                "tokens/s": f"{tokens / median:,.0f}",
                "TFLOP/s": f"{row['matmul_flops'] / median / 1e12:.3g}",
                **({"of peak": f"{row['matmul_flops'] / median / gpu.flops:.0%}"} if gpu else {}),
                "refresh ms": f"{statistics.median(refresh) * 1e3:,.1f}" if refresh else "",
                "bound ms": f"{bound * 1e3:,.1f}",
                "of it": f"{bound / median:.2f}",
                "peak GiB": f"{row['peak'] / 2**30:.2f}",
            }
        )
    return cells


def main() -> None:
    config = command.settings(Config, __doc__)
    rows, rate = measure(config)
    train, device = config.train, jax.devices()[0].device_kind
    print_cells(
        f"{train.model}, {train.batch_size} x {train.seq_len}, weights {train.weight_dtype},"
        f" computed in {train.compute_dtype}, {device}, large product {rate / 1e12:.2f} TFLOP/s",
        table(rows, rate, train.batch_size * train.seq_len),
    )
    record.write(config, rows, matmul_flops_per_second=rate)


if __name__ == "__main__":
    main()
