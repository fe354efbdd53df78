"""Memory and operations of forward + backward, from the compiled program: nothing is run.

`python -m benchmarks.memory --model llama_130m --batch-size 8 --seq-len 256`

The figure to compare is `temporaries`: residuals and workspace, without weights (arguments) and
gradients (outputs), which all rivals share. Judge bf16 on a GPU only: on a CPU, XLA turns bf16
products into float32 copies.
"""

import dataclasses
import functools
import pathlib

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.flops import matmul_flops
from benchmarks.rivals import rivals
from models import Decoder, preset
from train.methods import MethodOptions


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    model: str = "llama_130m"
    batch_size: int = 8
    seq_len: int = 256
    dtype: str = "float32"
    """Of weights and of the computation."""
    options: MethodOptions = dataclasses.field(
        default_factory=lambda: MethodOptions(rank=32, ratio=1 / 64)
    )
    results: pathlib.Path = record.RESULTS / "memory.json"


def measure(config: Config) -> list[dict]:
    """Returns one row a rival: bytes of the compiled program and operations."""
    make = functools.partial(Decoder, preset(config.model), dtype=config.dtype)
    model = jax.eval_shape(make, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), "int32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = []
    for name, loss in rivals(config.options, config.dtype).items():
        gradient = jax.value_and_grad(loss)
        compiled = jax.jit(gradient).lower(model, tokens, tokens, key).compile()
        stats, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        rows.append(
            {
                "rival": name,
                "temporaries": stats.temp_size_in_bytes,
                "arguments": stats.argument_size_in_bytes,
                "outputs": stats.output_size_in_bytes,
                "matmul_flops": matmul_flops(gradient, model, tokens, tokens, key),
                "cost_analysis_flops": cost.get("flops"),
            }
        )
    return rows


def show(config: Config, rows: list[dict]) -> None:
    """Prints the rows as a table, ratios to plain autodiff and to our exact operators beside."""
    by_name = {row["rival"]: row for row in rows}
    title = f"{config.model}, {config.batch_size} x {config.seq_len}, {config.dtype}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    headers = ("rival", "temporaries MiB", "/ plain", "/ exact", "matmul GFLOP", "/ plain")
    for header in headers:
        table.add_column(header, justify="left" if header == "rival" else "right")
    plain, exact = by_name["plain"], by_name["exact"]
    for row in rows:
        size, flops = row["temporaries"], row["matmul_flops"]
        table.add_row(
            row["rival"],
            f"{size / 2**20:,.1f}",
            f"{size / plain['temporaries']:.3f}",
            f"{size / exact['temporaries']:.3f}",
            f"{flops / 1e9:,.1f}",
            f"{flops / plain['matmul_flops']:.3f}",
        )
    Console(width=110).print(table)


def main() -> None:
    config = tyro.cli(Config, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    rows = measure(config)
    show(config, rows)
    record.write(config, rows)


if __name__ == "__main__":
    main()
