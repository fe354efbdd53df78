"""Time of a whole training step, with all rivals interleaved in one run.

`python -m benchmarks.step_time --model llama_60m --compute-dtype float32` on a CPU; on a GPU
`... --model llama_1b --batch-size 8 --seq-len 1024 --weight-dtype bfloat16`.

Each round runs every rival once, so that a drift of the machine affects all of them equally. The
result is the median over rounds. Every rival trains separate weights. The bound of a time is the
time of the step's matrix products at the rate of a large product in the same run.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command, record
from benchmarks.rivals import ON_DEVICE, compiled_memory, random_batch, rival
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.planning.flops import causal_loop_length, matmul_flops
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


@dataclasses.dataclass
class _Running:
    """A rival that is being timed: its compiled steps and its state."""

    program: Any
    refresh: Any
    state: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    refresh_seconds: list[float] = dataclasses.field(default_factory=list)


def measure(config: Config) -> tuple[list[dict], float]:
    """Returns one row for each rival, and the rate of a large product in FLOP/s."""
    batch = random_batch(config.train, dimensions(config.train).vocab_size)
    rows, running = [], {}
    for name in config.only:
        one = rival(name, config.train)
        state = jax.jit(one.init)()
        flops = functools.partial(
            matmul_flops, loop_length=causal_loop_length(config.train.seq_len)
        )
        program = _compile(one.step, state, batch)
        refresh = None if one.refresh is None else _compile(one.refresh, state, batch)
        rows.append({"rival": name, "matmul_flops": flops(one.step, state, batch)})
        rows[-1] |= compiled_memory(program)
        if one.refresh is not None:
            rows[-1]["refresh_matmul_flops"] = flops(one.refresh, state, batch)
        running[name] = _Running(program, refresh, state)

    for _ in range(2 + config.rounds):
        for name, one in running.items():
            begin = time.perf_counter()
            one.state, metrics = jax.block_until_ready(one.program(one.state, batch))
            one.seconds.append(time.perf_counter() - begin)
            if one.refresh is not None:
                begin = time.perf_counter()
                one.state, _ = jax.block_until_ready(one.refresh(one.state, batch))
                one.refresh_seconds.append(time.perf_counter() - begin)
            next(row for row in rows if row["rival"] == name)["loss"] = float(metrics["loss"])
    for row, one in zip(rows, running.values(), strict=True):
        row["seconds"], row["refresh_seconds"] = one.seconds[2:], one.refresh_seconds[2:]
    return rows, _matmul_rate(jnp.dtype(config.train.compute_dtype))


def _compile(step: Any, state: Any, batch: Any) -> Any:
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile()


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


def show(config: Config, rows: list[dict], rate: float) -> None:
    """Prints medians, ratios to the first rival, and bounds."""
    train, device = config.train, jax.devices()[0].device_kind
    title = (
        f"{train.model}, {train.batch_size} x {train.seq_len}, weights {train.weight_dtype},"
        f" computed in {train.compute_dtype}, {device}, large product {rate / 1e12:.2f} TFLOP/s"
    )
    headers = ("rival", "ms (min to max)", "/ first", "tokens/s", "refresh ms", "bound ms", "of it",
               "peak GiB", "/ first")  # fmt: skip
    cells = []
    tokens = train.batch_size * train.seq_len
    first = statistics.median(rows[0]["seconds"])
    for row in rows:
        median = statistics.median(row["seconds"])
        spread = f"({min(row['seconds']) * 1e3:,.1f} to {max(row['seconds']) * 1e3:,.1f})"
        refresh = row["refresh_seconds"]
        bound = row["matmul_flops"] / rate
        cells.append(
            (
                row["rival"],
                f"{median * 1e3:,.1f} {spread}",
                f"{median / first:.3f}",
                f"{tokens / median:,.0f}",
                f"{statistics.median(refresh) * 1e3:,.1f}" if refresh else "",
                f"{bound * 1e3:,.1f}",
                f"{bound / median:.2f}",
                f"{row['peak'] / 2**30:.2f}",
                f"{row['peak'] / rows[0]['peak']:.3f}",
            )
        )
    print_table(title, headers, cells)


def main() -> None:
    config = command.settings(Config, __doc__)
    rows, rate = measure(config)
    show(config, rows, rate)
    record.write(config, rows, matmul_flops_per_second=rate)


if __name__ == "__main__":
    main()
