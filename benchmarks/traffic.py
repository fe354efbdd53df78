"""Bytes that the kernels of a step move, and its predicted time, from the compiled program.

`python -m benchmarks.traffic` compiles every method and baseline for an H100, which this machine
need not have (`pip install -e '.[programs,compile]'`), and prints what it moves outside of products
and attention, by pass and operator, beside the least that is possible (`train.planning.least`), and
the time that `train.planning.time` predicts, with the errors that are written there. Times for
other GPUs are of the same program. Nothing is run.

Passes are named by the program: where layers are updated within the backward pass, "update" has
both.
"""

import collections
import dataclasses
import pathlib
from typing import Any

import jax

from benchmarks import command, record
from benchmarks.tables import Cells, print_cells
from benchmarks.training_steps import ON_DEVICE, PLAIN_JAX, training_step
from benchmarks.variants import VARIANTS, check_names
from train.planning.devices import compile_for
from train.planning.least import least_work
from train.planning.time import predicted_seconds, work_of
from train.planning.traffic import ATTENTION, PRODUCTS, Kernel, kernels_of
from train.run.gpus import GPUS
from train.run.loss import batch_shapes
from train.run.sharding import product_options
from train.settings.config import PretrainConfig
from train.settings.messages import check_known
from train.settings.resolve import dimensions, resolve

PREDICTED = ("h100", "a100_80", "rtx_4090", "l4")
"""GPUs whose time is predicted."""
_MOST_COLUMNS = 8
"""Steps whose operators are printed beside each other."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    train: PretrainConfig = PretrainConfig(
        model="llama_1b", batch_size=8, seq_len=1024, weight_dtype="bfloat16"
    )
    """Model, batch and dtypes. This program sets the method."""
    only: tuple[str, ...] = ON_DEVICE
    """Steps to compile, from `benchmarks.training_steps`."""
    device: str = "h100"
    """GPU to compile for, as for `train.plan`."""
    results: pathlib.Path = record.RESULTS / "traffic.json"

    def __post_init__(self) -> None:
        if not self.only:
            raise ValueError("`--only` names no step.")
        dimensions(self.train)  # Raises for an unknown model.
        check_names(self.only, ON_DEVICE)
        check_known("GPU", self.device, GPUS, cutoff=0.3)


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each step."""
    jax.config.update("jax_platforms", "cpu")  # The CUDA plugin would ask for a driver.
    rows = []
    for name in config.only:
        rows.append(row_of(name, config))
        ms = rows[-1]["milliseconds"]["h100"]
        print(f"{name}: {rows[-1]['moved'] / 1e9:.1f} GB, {ms:,.0f} ms on an H100", flush=True)
    return rows


def row_of(name: str, config: Config) -> dict[str, Any]:
    """Returns the traffic of a step.

    Returns:
      `moved`: bytes outside of products and attention; `by_operator`: the same by pass and
      operator, with the number of kernels; `least`: the least possible bytes by pass; `flops`: of
      products and attention; `kernels`: how many run; `milliseconds`: predicted, by GPU.
    """
    kernels = kernels_of(_program(name, config))
    work = work_of(kernels)
    return {
        "rival": name,
        "moved": work.moved,
        "flops": work.products + work.unaligned + work.attention,
        "kernels": work.kernels,
        "by_operator": _by_operator(kernels),
        "least": _least(name, config),
        "milliseconds": {gpu: 1e3 * predicted_seconds(work, GPUS[gpu]) for gpu in PREDICTED},
    }


def _program(name: str, config: Config) -> str:
    built = training_step(name, config.train)
    state, batch = jax.eval_shape(built.init), batch_shapes(config.train)
    with compile_for(GPUS[config.device]) as place:
        lowered = jax.jit(built.step, donate_argnums=0).lower(place(state), place(batch))
        return lowered.compile(compiler_options=product_options()).as_text() or ""


def _by_operator(kernels: list[Kernel]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns bytes and number of kernels by pass and operator, the largest first."""
    sums: dict[str, dict[str, dict[str, float]]] = {}
    for kernel in kernels:
        operators = sums.setdefault(kernel.phase, {})
        counts = operators.setdefault(kernel.operator, {"moved": 0.0, "kernels": 0})
        counts["moved"] += kernel.moved
        counts["kernels"] += kernel.runs
    return {
        phase: dict(sorted(operators.items(), key=lambda item: -item[1]["moved"]))
        for phase, operators in sums.items()
    }


def _least(name: str, config: Config) -> dict[str, float]:
    """Returns the least bytes of each pass; for a baseline, of the method that stores the same."""
    if name in VARIANTS:
        train = VARIANTS[name].configure(config.train)
    else:
        form = PLAIN_JAX.get(name, PLAIN_JAX["plain"])
        method = "remat" if form.remat in ("full", "offload_inputs") else "exact"
        train = dataclasses.replace(config.train, method=method)
    work = least_work(resolve(train, dimensions(config.train)))
    return {phase: part.moved for phase, part in work.items()}


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns one line for each step, in GB."""
    return [
        {
            "step": row["rival"],
            **{phase: f"{_outside(row, phase) / 1e9:.1f}" for phase in _phases(rows)},
            "GB": f"{row['moved'] / 1e9:.1f}",
            "least": f"{sum(row['least'].values()) / 1e9:.1f}",
            "kernels": f"{row['kernels']:,.0f}",
            "TFLOP": f"{row['flops'] / 1e12:.1f}",
            **{f"{gpu}, ms": f"{ms:,.0f}" for gpu, ms in row["milliseconds"].items()},
        }
        for row in rows
    ]


def by_operator(rows: list[dict[str, Any]]) -> Cells:
    """Returns one line for each operator and pass: GB and kernels of each step."""
    names = collections.Counter[tuple[str, str]]()
    for row in rows:
        for phase, operators in row["by_operator"].items():
            names.update({(phase, name): x["moved"] for name, x in operators.items()})
    return [
        {"pass": phase, "operator": name}
        | {row["rival"]: _cell(row["by_operator"].get(phase, {}).get(name)) for row in rows}
        for phase in _phases(rows)
        for (of_phase, name), moved in names.most_common()
        if of_phase == phase and moved > 1e8
    ]


def _cell(counts: dict[str, float] | None) -> str:
    return "" if counts is None else f"{counts['moved'] / 1e9:.1f} in {counts['kernels']:,.0f}"


def _outside(row: dict[str, Any], phase: str) -> float:
    operators = row["by_operator"].get(phase, {})
    return sum(x["moved"] for name, x in operators.items() if name not in (PRODUCTS, ATTENTION))


def _phases(rows: list[dict[str, Any]]) -> list[str]:
    return sorted({phase for row in rows for phase in row["by_operator"]}, key=_ORDER.index)


_ORDER = ("forward", "backward", "update")


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table of the steps, and for a few of them that of their operators."""
    train = config.train
    title = f"{train.model}, {train.batch_size} x {train.seq_len}, compiled for {config.device}"
    print_cells(f"{title}: GB outside of products and attention, predicted ms", table(rows))
    if len(rows) <= _MOST_COLUMNS:
        print_cells(f"{title}: GB in kernels", by_operator(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
