"""Memory and operations of a whole training step, from the compiled program, which is not run.

`python -m benchmarks.memory` compiles for this machine, and with `--device h100` for a GPU, which
this machine need not have. `peak` is the largest memory in use: weights, states, gradients,
residuals and workspace. `fwd+bwd` are the temporaries of the gradient, without weights and
gradients. For bf16, compile for a GPU: on a CPU, XLA turns bf16 products into float32 copies.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import command, record
from benchmarks.tables import Cells, cell, print_cells
from benchmarks.training_steps import ON_DEVICE, compiled_memory, training_step
from benchmarks.variants import check_names
from train.planning.devices import HERE, compile_for, find_device
from train.planning.flops import causal_loop_length, matmul_flops
from train.run.loss import batch_shapes
from train.settings.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(model="llama_130m", compute_dtype="float32")
    )
    """Model, batch and dtypes. This program sets the method."""
    only: tuple[str, ...] = ON_DEVICE
    """Steps to measure, from `benchmarks.training_steps`."""
    device: str = HERE
    """Device to compile for: here, or a GPU by name: h100, h200, a100_80, a100_40, rtx_4090, ..."""
    add: bool = False
    """Keep the other rows of `--results`."""
    results: pathlib.Path = record.RESULTS / "memory.json"

    def __post_init__(self) -> None:
        check_names(self.only, ON_DEVICE)
        find_device(self.device)


def measure(config: Config) -> list[dict]:
    """Returns one row for each step: bytes of the programs by category, and operations.

    Rows are written after each step.
    """
    rows = {row["rival"]: row for row in record.rows_to_keep(config.results, config.add)}
    for name in config.only:
        rows[name] = _measure(name, config) | {"commit": record.environment()["commit"]}
        print(f"{name}: {rows[name]['peak'] / 2**30:.2f} GiB", flush=True)
        record.write(config, list(rows.values()))
    return list(rows.values())


def measure_step(name: str, config: Config) -> dict[str, int]:
    """Returns the `peak` and the `matmul_flops` of a step, without its gradient."""
    built = training_step(name, config.train)
    state, batch = jax.eval_shape(built.init), batch_shapes(config.train)
    flops = operations(built.step, state, batch)
    peak = compiled(built.step, state, batch, device=config.device, donate=True)["peak"]
    return {"peak": peak, "matmul_flops": flops}


def _measure(name: str, config: Config) -> dict[str, Any]:
    built = training_step(name, config.train)
    state, batch = jax.eval_shape(built.init), batch_shapes(config.train)
    bytes_of = functools.partial(compiled, device=config.device)
    row: dict[str, Any] = {"rival": name, "matmul_flops": operations(built.step, state, batch)}
    row |= bytes_of(built.step, state, batch, donate=True)
    with compile_for(find_device(config.device)):  # The stored arrays depend on its kernels.
        known = built.memory()
    row["categories"] = dataclasses.asdict(known.with_workspace(row["temporaries"]))
    if built.refresh is not None:
        row["refresh_matmul_flops"] = operations(built.refresh, state, batch)
        row["refresh_peak"] = bytes_of(built.refresh, state, batch, donate=True)["peak"]
    if built.gradient is not None:
        row["forward_and_backward"] = bytes_of(built.gradient, state, batch)["temporaries"]
    return row


def operations(step: Callable[..., Any], state: Any, batch: Any) -> int:
    """Returns the operations of the products of a step, from its trace."""
    # Counted in the form that a CPU runs: the trace of cuDNN's attention has no products.
    length = causal_loop_length(batch["inputs"].shape[1])
    return matmul_flops(step, state, batch, loop_length=length)


def compiled(
    step: Callable[..., Any], state: Any, batch: Any, *, device: str, donate: bool = False
) -> dict[str, int]:
    """Returns `temporaries` and `peak` of a step, compiled for a device, in bytes."""
    with compile_for(find_device(device)) as place:
        program = jax.jit(step, donate_argnums=(0,) if donate else ())
        return compiled_memory(program.lower(place(state), place(batch)).compile())


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the table of the rows, in GiB, with ratios to the first row."""
    first = rows[0]
    gib = functools.partial(cell, spec=",.2f", unit=2**30)
    return [
        {
            "step": row["rival"],
            "peak, GiB": gib(row["peak"]),
            "/ first": f"{row['peak'] / first['peak']:.3f}",
            "refresh": gib(row.get("refresh_peak")),
            **{name.replace("_", " "): gib(size) for name, size in row["categories"].items()},
            "temporaries of the gradient": gib(row.get("forward_and_backward")),
            "operations, TFLOP": cell(row["matmul_flops"], ",.2f", 1e12),
            "operations, / first": f"{row['matmul_flops'] / first['matmul_flops']:.3f}",
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    train = config.train
    where = "this CPU" if config.device == HERE else config.device
    print_cells(
        f"{train.model}, {train.batch_size} x {train.seq_len}, weights {train.weight_dtype},"
        f" compute {train.compute_dtype}, compiled for {where}; GiB",
        table(rows),
    )


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
