"""Tables of compiled plans, and the flags that a plan chose."""

import dataclasses
import math
import shlex
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from train.planning.estimate import Compiled, Config, make_plan
from train.run.gpus import GIB
from train.run.sharding import mesh_sizes
from train.settings.config import PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import RARE, flag_name, given_fields, shown_flag
from train.settings.resolve import dimensions


def size_text(count: int) -> str:
    """Returns a number of bytes as a text."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


def table_of(rows: list[Compiled], train: Config, device: str) -> Table:
    """Returns compiled plans as a table, in GiB, or in MiB if all take less than a GiB.

    Times are predicted, and shown where they are known.

    Args:
      rows: the plans.
      train: settings that all of them share.
      device: what they are compiled for.
    """
    unit, name = (GIB, "GiB") if max(row.peak for row in rows) >= GIB else (2**20, "MiB")
    device += f" x {train.mesh}, of each device" if train.mesh else ""
    four_bit = METHODS[rows[0].config.method].four_bit  # Of the only row.
    dtype = f"NF4 and {train.weight_dtype}" if four_bit else train.weight_dtype
    title = (
        f"{train.title}, vocabulary of {dimensions(train).vocab_size:,},"
        f" {train.batch_size} x {train.seq_len}, weights {dtype},"
        f" compiled for {device}; {name}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("plan")
    if train.mesh:
        _add_devices(table, rows, unit)
        return table
    parts = ["peak", "weights", "gradients", "states", "residuals", "workspace"]
    if any(row.on_host for row in rows):
        parts.append("on host")
    is_timed = any(row.seconds is not None for row in rows)
    for part in (*parts, "TFLOP", *(["ms", "tokens/s"] if is_timed else [])):
        table.add_column(part, justify="right", no_wrap=True)
    for row in rows:
        plan = make_plan(row.config)
        memory = plan.memory.with_workspace(row.temporaries)
        residuals = memory.linear_residuals + memory.other_residuals
        sizes = (row.peak, memory.weights, memory.gradients, memory.optimizer,
                 residuals, memory.workspace or 0, row.on_host)[: len(parts)]  # fmt: skip
        cells = [f"{size / unit:.2f}" for size in sizes]
        cells.append(f"{plan.flops / 1e12:.2f}")
        if row.seconds is not None:
            cells += [f"{1e3 * row.seconds:,.0f}", f"{row.tokens_per_second:,.0f}"]
        table.add_row(chosen_flags(row.config), *cells)
    return table


def _add_devices(table: Table, rows: list[Compiled], unit: int) -> None:
    """Adds plans for several devices: the memory of one, and what it exchanges in a step."""
    kinds = {"gathered": ("all-gather",), "reduced": ("reduce-scatter", "all-reduce")}
    kinds["moved"] = ("all-to-all", "collective-permute")
    for part in ("peak", "weights", "states", "the rest", *kinds, "TFLOP"):
        table.add_column(part, justify="right", no_wrap=True)
    devices = math.prod(mesh_sizes(rows[0].config.mesh).values())
    for row in rows:
        moved = [
            sum(row.exchanged[kind] for kind in of) if row.exchanged else None
            for of in kinds.values()
        ]
        others = row.peak - row.weights - row.states
        sizes = (row.peak, row.weights, row.states, others, *moved)  # None: unknown.
        flops = make_plan(row.config).flops / devices / 1e12
        cells = ["-" if size is None else f"{size / unit:.2f}" for size in sizes]
        table.add_row(chosen_flags(row.config), *cells, f"{flops:.2f}")


def flags(config: Config) -> str:
    """Returns `--method` and the flags that differ from the defaults of the program.

    `rare_settings` has those that are no flags.
    """
    return shlex.join(["--method", config.method, *_flags(config)])


def rare_settings(config: Any) -> list[str]:
    """Returns the lines of a `--config` file for the settings that are no flags."""
    lines: list[str] = []
    for name, value in given_fields(config).items():
        if dataclasses.is_dataclass(value):
            lines += rare_settings(value)
        elif name in RARE:
            lines.append(shown_flag(name, value))
    return lines


def chosen_flags(config: Config) -> str:
    """Returns the flags that a plan chose."""
    neutral, names = PretrainConfig(), ("moment_dtype", "optimizer", "offload_states")
    memory = {name: getattr(config.optimizer, name) for name in names}  # Memory depends on these.
    chosen = dataclasses.replace(
        neutral,
        method=config.method,
        options=config.options,
        in_backward=config.in_backward,
        optimizer=dataclasses.replace(neutral.optimizer, **memory),
    )
    others = ["--accumulate", str(config.accumulate)] if config.accumulate > 1 else []
    adapter = getattr(config, "adapter", None)  # A plan of train.plan has one.
    others += [] if adapter is None else _flags(adapter)
    return " ".join([flags(chosen).removeprefix("--method "), *map(shlex.quote, others)])


def _flags(config: Any) -> Iterator[str]:
    """Yields the flags and values of the fields that differ from their defaults."""
    for name, value in given_fields(config).items():
        if dataclasses.is_dataclass(value):
            yield from _flags(value)
        elif name in RARE:
            continue
        elif isinstance(value, bool):
            yield shown_flag(name, value)
        elif name != "method":
            yield flag_name(name)
            yield from map(str, value if isinstance(value, tuple) else (value,))
