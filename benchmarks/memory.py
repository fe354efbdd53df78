"""Memory and operations of a whole training step, from the compiled program, which is not run.

`python -m benchmarks.memory` compiles for this machine, and with `--device h100` for a GPU, which
this machine need not have. `peak` is the largest memory in use: weights, states, gradients,
residuals and workspace. `fwd+bwd` are the temporaries of the gradient, without weights and
gradients. For bf16, compile for a GPU: on a CPU, XLA turns bf16 products into float32 copies.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

from benchmarks import command, record
from benchmarks.rivals import ON_DEVICE, compiled_memory, rival
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.planning.devices import HERE, compile_for, find_device
from train.planning.flops import causal_loop_length, matmul_flops
from train.run.loss import batch_shapes
from train.settings.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(model="llama_130m", compute_dtype="float32")
    )
    """Model, batch and dtypes. This program sets the method."""
    only: tuple[str, ...] = ON_DEVICE
    """Rivals to measure."""
    device: str = HERE
    """Device to compile for: here, or a GPU by name: h100, h200, a100_80, a100_40, rtx_4090, ..."""
    add: bool = False
    """Keep the rows of other rivals in `--results`."""
    results: pathlib.Path = record.RESULTS / "memory.json"

    def __post_init__(self) -> None:
        check_names(self.only, ON_DEVICE)
        find_device(self.device)


def measure(config: Config) -> list[dict]:
    """Returns one row for each rival: bytes of the programs by category, and operations."""
    rows = {row["rival"]: row for row in record.rows_to_keep(config.results, config.add)}
    for name in config.only:
        rows[name] = _measure(name, config) | {"commit": record.environment()["commit"]}
        print(f"{name}: {rows[name]['peak'] / 2**30:.2f} GiB", flush=True)
    return list(rows.values())


def measure_step(name: str, config: Config) -> dict[str, int]:
    """Returns the `peak` and the `matmul_flops` of the step of one rival, without its gradient."""
    one = rival(name, config.train)
    state, batch = jax.eval_shape(one.init), batch_shapes(config.train)
    flops = _flops(one.step, config, state, batch)
    with compile_for(find_device(config.device)) as place:
        program = _compile(one.step, (place(state), place(batch)), donate=True)
    return {"peak": compiled_memory(program)["peak"], "matmul_flops": flops}


def _measure(name: str, config: Config) -> dict:
    one = rival(name, config.train)
    state, batch = jax.eval_shape(one.init), batch_shapes(config.train)
    row: dict[str, Any] = {"rival": name, "matmul_flops": _flops(one.step, config, state, batch)}
    if one.refresh is not None:
        row["refresh_matmul_flops"] = _flops(one.refresh, config, state, batch)
    gradients, states = one.of_layers()
    row |= {"layer_gradients": gradients, "layer_states": states}
    with compile_for(find_device(config.device)) as place:
        placed = place(state), place(batch)
        known = one.memory()
        row |= compiled_memory(_compile(one.step, placed, donate=True))
        row["categories"] = dataclasses.asdict(known.with_workspace(row["temporaries"]))
        if one.refresh is not None:
            row["refresh_peak"] = compiled_memory(_compile(one.refresh, placed, True))["peak"]
        if one.gradient is not None:
            program = _compile(one.gradient, placed, donate=False)
            row["forward_and_backward"] = compiled_memory(program)["temporaries"]
    return row


def _flops(step: Any, config: Config, state: Any, batch: Any) -> int:
    # Counted in the form that a CPU runs: the trace of cuDNN's attention has no products.
    length = causal_loop_length(config.train.seq_len)
    return matmul_flops(step, state, batch, loop_length=length)


def _compile(function: Any, arguments: Any, donate: bool) -> Any:
    donated = (0,) if donate else ()
    return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()


def show(config: Config, rows: list[dict]) -> None:
    """Prints the rows as a table, with ratios to the first row."""
    train = config.train
    where = "this CPU" if config.device == HERE else config.device
    title = (
        f"{train.model}, {train.batch_size} x {train.seq_len}, weights {train.weight_dtype},"
        f" compute {train.compute_dtype}, compiled for {where}; GiB"
    )
    headers = ("rival", "peak", "/ first", "refresh", "weights", "gradients", "states",
               "linear res.", "other res.", "workspace", "fwd+bwd", "matmul TFLOP",
               "/ first")  # fmt: skip
    cells = []
    gib = functools.partial(_scaled, unit=2**30)
    for row in rows:
        cells.append(
            (
                row["rival"],
                gib(row["peak"]),
                f"{row['peak'] / rows[0]['peak']:.3f}",
                gib(row.get("refresh_peak")),
                *(gib(size) for size in row["categories"].values()),
                gib(row.get("forward_and_backward")),
                _scaled(row["matmul_flops"], unit=1e12),
                f"{row['matmul_flops'] / rows[0]['matmul_flops']:.3f}",
            )
        )
    print_table(title, headers, cells)


def _scaled(size: int | None, unit: float) -> str:
    return "" if size is None else f"{size / unit:,.2f}"


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
