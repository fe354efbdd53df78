"""Time of a whole training step, all rivals interleaved in one run.

`python -m benchmarks.step_time --model llama_9m` on a CPU; on a GPU `python -m benchmarks.step_time
--model llama_1b --batch-size 8 --seq-len 1024 --weight-dtype bfloat16`.

Each round runs every rival once, so that a drift of the machine meets all alike; the median over
rounds counts. All rivals train the same weights in turn. Beside the time stands its bound: the
step's matrix products at the rate that a large product reaches on the same machine in the same run.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.flops import matmul_flops
from benchmarks.rivals import Loss, rivals
from models import Decoder, preset
from train.config import Dtype, OptimizerConfig
from train.methods import MethodOptions
from train.optimizer import make_optimizer


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    model: str = "llama_9m"
    batch_size: int = 8
    seq_len: int = 256
    weight_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    rounds: int = 10
    """Timed steps of each rival, after two that are not counted."""
    only: tuple[str, ...] = ()
    """Rivals to measure; all if empty."""
    options: MethodOptions = dataclasses.field(default_factory=MethodOptions)
    results: pathlib.Path = record.RESULTS / "step_time.json"


def training_step(config: Config, loss: Loss) -> Callable:
    """Returns one step of AdamW: state and data to state and loss."""
    optimizer = make_optimizer(OptimizerConfig(), steps=1000)

    def step(model, moments, tokens, targets, key):
        value, grads = jax.value_and_grad(loss)(model, tokens, targets, key)
        updates, moments = optimizer.update(grads, moments, model)
        return optax.apply_updates(model, updates), moments, value

    return step


def measure(config: Config) -> tuple[list[dict], float]:
    """Returns one row a rival, and the rate of a large product in FLOP/s."""
    key = jax.random.key(0)
    make = functools.partial(Decoder, preset(config.model), dtype=config.weight_dtype)
    model = jax.jit(make)(key)
    moments = jax.jit(make_optimizer(OptimizerConfig(), steps=1000).init)(model)
    shape, vocabulary = (config.batch_size, config.seq_len + 1), model.config.vocab_size
    rows = jax.random.randint(key, shape, 0, vocabulary)
    data = (rows[:, :-1], rows[:, 1:], key)

    losses = rivals(config.options, config.compute_dtype)
    losses = {name: losses[name] for name in config.only or losses}
    results, programs = {}, {}
    for name, loss in losses.items():
        step = training_step(config, loss)
        flops = matmul_flops(step, model, moments, *data)
        programs[name] = jax.jit(step, donate_argnums=(0, 1)).lower(model, moments, *data).compile()
        results[name] = {"rival": name, "matmul_flops": flops, **_memory(programs[name])}

    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(2 + config.rounds):
        for name, program in programs.items():
            begin = time.perf_counter()
            model, moments, value = jax.block_until_ready(program(model, moments, *data))
            seconds[name].append(time.perf_counter() - begin)
            results[name]["loss"] = float(value)
    for name, times in seconds.items():
        results[name]["seconds"] = times[2:]
    return list(results.values()), _matmul_rate(jnp.dtype(config.compute_dtype))


def _memory(program) -> dict[str, int]:
    stats = program.memory_analysis()
    peak = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return {"temporaries": stats.temp_size_in_bytes, "peak": peak}


def _matmul_rate(dtype: jnp.dtype) -> float:
    """Returns FLOP/s of a large square product of random numbers, the best of five."""
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
    """Prints medians, ratios to the first rival, and the bound beside them."""
    device = jax.devices()[0].device_kind
    title = (
        f"{config.model}, {config.batch_size} x {config.seq_len}, weights {config.weight_dtype},"
        f" computed in {config.compute_dtype}, {device}, large product {rate / 1e12:.2f} TFLOP/s"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    headers = ("rival", "ms (min to max)", "tokens/s", "/ first", "bound ms", "of it",
               "peak GiB", "/ first")  # fmt: skip
    for header in headers:
        table.add_column(header, justify="left" if header == "rival" else "right")
    tokens = config.batch_size * config.seq_len
    first = statistics.median(rows[0]["seconds"])
    for row in rows:
        median = statistics.median(row["seconds"])
        spread = f"({min(row['seconds']) * 1e3:,.1f} to {max(row['seconds']) * 1e3:,.1f})"
        bound = row["matmul_flops"] / rate
        table.add_row(
            row["rival"],
            f"{median * 1e3:,.1f} {spread}",
            f"{tokens / median:,.0f}",
            f"{first / median:.3f}",
            f"{bound * 1e3:,.1f}",
            f"{bound / median:.2f}",
            f"{row['peak'] / 2**30:.2f}",
            f"{row['peak'] / rows[0]['peak']:.3f}",
        )
    Console(width=140).print(table)


def main() -> None:
    config = tyro.cli(Config, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    rows, rate = measure(config)
    show(config, rows, rate)
    record.write(config, rows, matmul_flops_per_second=rate)


if __name__ == "__main__":
    main()
