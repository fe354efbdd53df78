"""Time of a whole training step, with all rivals interleaved in one run.

`python -m benchmarks.step_time --model llama_60m --compute-dtype float32` on a CPU; on a GPU
`... --model llama_1b --batch-size 8 --seq-len 1024 --weight-dtype bfloat16`.

Each round runs every rival once, so that a drift of the machine affects all of them equally. The
result is the median over rounds. Every rival trains separate weights. The bound of a time is the
time of the step's matrix products at the rate of a large product in the same run.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import command, memory, record
from benchmarks.rivals import ON_DEVICE, Rival, compiled_memory, random_batch, rival
from benchmarks.tables import Cells, print_cells
from benchmarks.variants import check_names
from train.run.loss import Batch
from train.settings.config import PretrainConfig
from train.settings.resolve import dimensions


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    train: PretrainConfig = dataclasses.field(default_factory=PretrainConfig)
    """Model, batch and dtypes. This program sets the method."""
    rounds: int = 10
    """Timed steps of each rival, after two steps that are not counted."""
    only: tuple[str, ...] = (
        "plain",
        "jax.checkpoint, dots",
        "jax.checkpoint, full",
        "exact",
        "remat",
        "pamm",
        "low_rank 32",
        "galore d/4",
        "subspace d/4",
        "subspace d/16",
        "random_projection d/4",
    )
    """Rivals to measure, from `benchmarks.rivals`."""
    results: pathlib.Path = record.RESULTS / "step_time.json"

    def __post_init__(self) -> None:
        check_names(self.only, ON_DEVICE)


class Programs(NamedTuple):
    """Compiled programs of a rival; `refresh` is None without refresh steps."""

    init: Any
    refresh: Any
    step: Any


def compile_rival(measured: Rival, batch: Batch) -> Programs:
    """Returns the compiled programs of a rival for a batch."""
    state = jax.eval_shape(measured.init)
    step, refresh = (
        None if run is None else jax.jit(run, donate_argnums=0).lower(state, batch).compile()
        for run in (measured.step, measured.refresh)
    )
    return Programs(jax.jit(measured.init).lower().compile(), refresh, step)


def measure(config: Config) -> tuple[list[dict[str, Any]], float]:
    """Returns one row for each rival, and the rate of a large product in FLOP/s."""
    batch = random_batch(config.train, dimensions(config.train).vocab_size)
    rows, running = [], []
    for name in config.only:
        measured = rival(name, config.train)
        programs, state = compile_rival(measured, batch), jax.eval_shape(measured.init)
        row: dict[str, Any] = {
            "rival": name,
            "matmul_flops": memory.operations(measured.step, state, batch),
            **compiled_memory(programs.step),
        }
        if measured.refresh is not None:
            row["refresh_matmul_flops"] = memory.operations(measured.refresh, state, batch)
        rows.append(row | {"seconds": [], "refresh_seconds": []})
        running.append((programs, programs.init()))
    for number in range(2 + config.rounds):
        for i, (row, (programs, state)) in enumerate(zip(rows, running, strict=True)):
            for name, program in (
                ("seconds", programs.step),
                ("refresh_seconds", programs.refresh),
            ):
                if program is None:
                    continue
                begin = time.perf_counter()
                state, metrics = jax.block_until_ready(program(state, batch))
                row[name] += [time.perf_counter() - begin] if number >= 2 else []
                row["loss"] = float(metrics["loss"]) if name == "seconds" else row["loss"]
            running[i] = programs, state
    return rows, _matmul_rate(jnp.dtype(config.train.compute_dtype))


def _matmul_rate(dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of a large square product of random numbers, the best of five runs."""
    size = 8192 if jax.default_backend() == "gpu" else 2048
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32).astype(dtype))
    product(a).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        product(a).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times)


def table(rows: list[dict[str, Any]], rate: float, tokens: int) -> Cells:
    """Returns medians, ratios to the first rival, and bounds.

    Args:
      rows: the rows.
      rate: FLOP/s of a large product.
      tokens: tokens of a step.
    """
    cells, first = [], statistics.median(rows[0]["seconds"])
    for row in rows:
        seconds, refresh = row["seconds"], row["refresh_seconds"]
        median, bound = statistics.median(seconds), row["matmul_flops"] / rate
        spread = f"({min(seconds) * 1e3:,.1f} to {max(seconds) * 1e3:,.1f})"
        cells.append(
            {
                "rival": row["rival"],
                "ms (min to max)": f"{median * 1e3:,.1f} {spread}",
                "/ first": f"{median / first:.3f}",
                "tokens/s": f"{tokens / median:,.0f}",
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
