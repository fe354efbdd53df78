"""Memory of each of several GPUs, and what they exchange in a step, from the compiled program.

`python -m benchmarks.devices` compiles the step of every method for one GPU and for meshes of them,
which this machine need not have. Each device has `--batch-size` sequences, whatever the mesh. The
bound for gathered bytes is three times the weights: forward pass, backward pass and update.
"""

import dataclasses
import math
import pathlib
from typing import Any

import jax

from benchmarks import command, record
from benchmarks.tables import cell, print_cells
from train.planning.collectives import KINDS
from train.planning.devices import find_device
from train.planning.estimate import compile_plan, make_plan
from train.run.gpus import GIB
from train.run.sharding import mesh_sizes
from train.settings.config import PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import FULL_WEIGHTS


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(
            model="llama_1b", batch_size=1, seq_len=1024, weight_dtype="bfloat16"
        )
    )
    """Model, dtypes, and the batch of each device. This program sets the method and the mesh."""
    only: tuple[str, ...] = FULL_WEIGHTS
    """Methods."""
    meshes: tuple[str, ...] = ("", "fsdp=8")
    """Meshes, such as fsdp=8; "" for one device."""
    device: str = "h100"
    """GPU to compile for."""
    results: pathlib.Path = record.RESULTS / "devices.json"

    def __post_init__(self) -> None:
        find_device(self.device)
        for mesh in self.meshes:
            mesh_sizes(mesh)
        for name in self.only:
            if name not in METHODS:
                raise ValueError(f"`--only`: unknown method {name!r}: {', '.join(METHODS)}.")


def measure(config: Config) -> list[dict]:
    """Returns one row for each method and mesh."""
    jax.config.update("jax_platforms", "cpu")  # The CUDA plugin would ask for a driver.
    rows = []
    for mesh in config.meshes:
        sizes = mesh_sizes(mesh)
        groups = sizes["data"] * sizes["fsdp"]
        for method in config.only:
            train = dataclasses.replace(
                config.train, method=method, mesh=mesh, batch_size=config.train.batch_size * groups
            )
            step = compile_plan(train, config.device)
            rows.append(
                {
                    "method": method,
                    "mesh": mesh,
                    "devices": math.prod(sizes.values()),
                    "batch_size": train.batch_size,
                    "peak": step.peak,
                    "temporaries": step.temporaries,
                    "weights": step.weights,
                    "states": step.states,
                    "all_weights": make_plan(train).memory.weights,
                    "exchanged": dict(step.exchanged),
                }
            )
            print(f"{method} on {mesh or 'one device'}: {step.peak / GIB:.2f} GiB", flush=True)
    return rows


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints memory and traffic in GiB, and gathered bytes relative to the weights."""
    train = config.train
    cells = [
        {
            "method": row["method"],
            "mesh": row["mesh"],
            **{name: f"{row[name] / GIB:.2f}" for name in ("peak", "weights", "states")},
            **{kind: f"{row['exchanged'].get(kind, 0) / GIB:.2f}" for kind in KINDS},
            "gathered / weights": cell(
                row["exchanged"].get("all-gather", 0), ".2f", row["all_weights"]
            ),
        }
        for row in rows
    ]
    title = f"{train.model}, {train.batch_size} x {train.seq_len} a device, {config.device}, GiB"
    print_cells(title, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
