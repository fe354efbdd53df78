"""Memory of whole steps with small optimizer states, compiled for a GPU that need not be there.

`python -m benchmarks.state_memory` compiles the steps of `llama_7b`, `llama3_8b` and `llama_1b`
whose peaks are compared with those of others: one factored second moment, paged moments in 8 bits.
It takes about ten minutes on two cores.
"""

import dataclasses
import pathlib
from typing import Any

from benchmarks import command, record
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.planning.estimate import compile_plan, make_plan
from train.planning.gpus import GIB
from train.planning.tables import choice
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions


def _run(model: str, batch_size: int, seq_len: int, method: str, **settings: Any) -> PretrainConfig:
    rank = settings.pop("rank", 0)
    return PretrainConfig(
        model=model,
        method=method,
        batch_size=batch_size,
        seq_len=seq_len,
        weight_dtype="bfloat16",
        options=MethodOptions(rank=rank),
        optimizer=OptimizerConfig(**settings),
    )


_SMALL: dict[str, Any] = {"moment_dtype": "4bit", "factored_second_moment": True}
CASES = {
    "7b, 8 bits": _run("llama_7b", 4, 1024, "lean"),
    "7b, 4 bits": _run("llama_7b", 4, 1024, "lean", moment_dtype="4bit"),
    "7b, 4 bits, factored": _run("llama_7b", 4, 1024, "lean", **_SMALL),
    "7b, adafactor": _run("llama_7b", 4, 1024, "lean", optimizer="adafactor"),
    "7b, 8 bits on the host": _run("llama_7b", 4, 1024, "lean", offload_states=True),
    "7b, subspace, 8 bits": _run("llama_7b", 4, 1024, "lean_subspace", rank=1024),
    "7b, subspace, 4 bits, factored": _run(
        "llama_7b", 4, 1024, "lean_subspace", rank=1024, **_SMALL
    ),
    "7b, subspace, 8 bits on the host": _run(
        "llama_7b", 4, 1024, "lean_subspace", rank=1024, offload_states=True
    ),
    "7b, subspace, 4 bits, factored, on the host": _run(
        "llama_7b", 4, 1024, "lean_subspace", rank=1024, offload_states=True, **_SMALL
    ),
    "8b, adafactor": _run("llama3_8b", 2, 2048, "lean_remat", optimizer="adafactor"),
    "8b, 8 bits on the host": _run("llama3_8b", 2, 2048, "lean_remat", offload_states=True),
    "1b, 8 bits": _run("llama_1b", 8, 1024, "lean"),
    "1b, 4 bits": _run("llama_1b", 8, 1024, "lean", moment_dtype="4bit"),
    "1b, 4 bits, factored": _run("llama_1b", 8, 1024, "lean", **_SMALL),
    "1b, fira": _run("llama_1b", 8, 1024, "lean", optimizer="fira", **_SMALL),
}
"""The runs, by name."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    only: tuple[str, ...] = tuple(CASES)
    """Rows to compile."""
    device: str = "h100"
    """Device to compile for."""
    add: bool = False
    """Keep the other rows in `--results`."""
    results: pathlib.Path = record.RESULTS / "state_memory.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        check_names(self.only, tuple(CASES))


def measure(config: Config) -> list[dict]:
    """Returns the bytes of each step by category."""
    rows = [row for row in record.rows_to_keep(config.results, config.add)
            if row["name"] not in config.only]  # fmt: skip
    for name in config.only:
        plan = make_plan(CASES[name], config.device)
        found = compile_plan(plan, config.device)
        memory = plan.memory.with_workspace(found.temporaries)
        rows.append(
            {
                "name": name,
                "flags": f"--model {CASES[name].model} {choice(CASES[name])}",
                "commit": record.environment()["commit"],
                "peak": found.peak,
                "on_host": found.on_host,
                "temporaries": found.temporaries,
                **dataclasses.asdict(memory),
            }
        )
        print(f"{name}: {found.peak / GIB:.2f} GiB", flush=True)
        record.write(config, rows)
    return rows


def show(config: Config, rows: list[dict]) -> None:
    """Prints the rows as a table, in GiB."""
    parts = ("peak", "weights", "optimizer", "on_host", "temporaries")
    cells = [(row["name"], *(f"{row[part] / GIB:.2f}" for part in parts)) for row in rows]
    print_table(f"compiled for {config.device}; GiB", ("step", *parts), cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
