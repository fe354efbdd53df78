"""Benchmarks that one command runs, with the arguments of a quick run and of a full one."""

import collections
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import ladder
from benchmarks.soak import verdict
from benchmarks.tables import Cells, cell


@dataclasses.dataclass(frozen=True)
class Job:
    """A benchmark.

    Attributes:
      name: name of its result file, without `.json`.
      module: what `python -m` runs.
      title: title of its table.
      sources: files and folders whose code it measures.
      table: returns the table of a result.
      quick: arguments of a quick run; None if it has none.
      full: arguments of a full run; None if it has none here.
      needs: what a full run needs that not every machine has; nothing for most.
    """

    name: str
    module: str
    title: str
    sources: tuple[str, ...]
    table: Callable[[dict[str, Any]], Cells]
    quick: tuple[str, ...] | None = None
    full: tuple[str, ...] | None = ()
    needs: str = ""


def _gib(row: dict[str, Any], key: str) -> str:
    return f"{row[key] / 2**30:.2f}" if row.get(key) is not None else ""


def _rows(table: Callable[[list[dict[str, Any]]], Cells]) -> Callable[[dict[str, Any]], Cells]:
    """Returns what makes the table of a result, from what makes that of its rows."""
    return lambda result: table(result["rows"])


def _memory(result: dict[str, Any]) -> Cells:
    first = result["rows"][0]
    return [
        {
            "rival": row["rival"],
            "peak, GiB": _gib(row, "peak"),
            "/ first": f"{row['peak'] / first['peak']:.3f}",
            "temporaries of the gradient, GiB": _gib(row, "forward_and_backward"),
            "operations, / first": f"{row['matmul_flops'] / first['matmul_flops']:.2f}",
        }
        for row in result["rows"]
    ]


def _triton(result: dict[str, Any]) -> Cells:
    return [
        {
            "case": row["case"],
            "program": row["program"],
            "blocks": row["choice"],
            "registers": str(row["registers"]),
            "spilled": str(row["spilled"]),
            "shared, bytes": f"{row['shared']:,}",
            "instructions": f"{row['instructions']:,}",
        }
        for row in result["rows"]
    ]


def _loops(result: dict[str, Any]) -> Cells:
    return [{"loop": row["loop"], "loss": cell(row["loss"], ".4f")} for row in result["rows"]]


def _random_arrays(result: dict[str, Any]) -> Cells:
    kinds: dict[str, dict[str, int]] = {}
    for row in result["rows"]:
        counts = kinds.setdefault(row["kind"], {"arrays": 0, "refused": 0, "faults": 0})
        counts["arrays"] += row["arrays"]
        counts["refused"] += row["refused"]
        counts["faults"] += len(row["faults"])
    return [{"codec": kind} | {k: f"{n:,}" for k, n in c.items()} for kind, c in kinds.items()]


def _malformed(result: dict[str, Any]) -> Cells:
    counts = collections.Counter((row["kind"], row["verdict"]) for row in result["rows"])
    verdicts = sorted({verdict for _, verdict in counts} | {"fault"})
    kinds = dict.fromkeys(row["kind"] for row in result["rows"])
    return [{"kind": kind} | {v: str(counts[kind, v]) for v in verdicts} for kind in kinds]


def _gpu(result: dict[str, Any]) -> Cells:
    rows = []
    for row in result["rows"]:
        if not row.get("rounds"):
            continue
        seconds = statistics.median(t for one in row["rounds"] for t in one["seconds"])
        one = row["rounds"][0]
        rows.append(
            {
                "model": row["model"],
                "step": ladder.RUNGS.get(row["rival"], row["rival"]),
                "tokens": f"{row['batch_size']} x {row['seq_len']}",
                "ms": f"{seconds * 1e3:,.0f}",
                "tokens/s": f"{row['batch_size'] * row['seq_len'] / seconds:,.0f}",
                "matmul TFLOP/s": f"{one['matmul_flops'] / seconds / 1e12:.0f}",
                "peak, GiB: device": _gib(one, "peak"),
                "compiler": _gib(one, "planned_peak"),
            }
        )
    return rows


_STEP = (
    "actjax", "models",
    *(f"train/{name}.py" for name in ("step", "methods", "optimizer", "resolve", "calibration",
                                      "config", "estimate")),
    *(f"benchmarks/{name}.py" for name in ("memory", "rivals", "variants", "plain")),
)  # fmt: skip

JOBS = (
    Job(
        "ladder", "benchmarks.ladder", "One change at a time",
        (*_STEP, *(f"train/{name}.py" for name in ("corpus", "data", "tokenizer")),
         "benchmarks/ladder.py"),
        _rows(ladder.table),
        quick=("--steps", "40", "--batch-size", "4", "--evaluations", "4", "--eval-batches", "2"),
        needs="`pip install -e '.[programs,compile]'`",
    ),
    Job(
        "memory", "benchmarks.memory", "A step of `llama_130m`, compiled for a CPU", _STEP, _memory,
        quick=("--only", "plain", "jax.checkpoint, full", "exact", "lean",
               "lean, 4-bit and factored"),
    ),
    Job(
        "memory_h100", "benchmarks.memory", "A step of `llama_1b`, compiled for an H100", _STEP,
        _memory,
        full=("--model", "llama_1b", "--batch-size", "8", "--seq-len", "1024",
              "--weight-dtype", "bfloat16", "--compute-dtype", "bfloat16",
              "--device", "h100"),
        needs="`pip install -e '.[programs,compile]'`",
    ),
    Job(
        "gpu", "benchmarks.gpu", "Steps on a GPU", _STEP, _gpu, full=None,
        needs="an NVIDIA GPU, and `python -m benchmarks.gpu --queue`",
    ),
    Job(
        "triton_kernels", "benchmarks.triton_kernels",
        "Kernels in Triton and in Pallas, assembled for an H100",
        ("actjax/kernels", "benchmarks/kernel_cases"), _triton,
        quick=("--cases", "llama_1b block input, 4 bits by channel, 1% whole"),
        needs="`pip install -e '.[programs,triton,compile]'`",
    ),
    Job(
        "subspace_loops", "benchmarks.subspace_loops",
        "Subspace optimizers in the loops of other libraries",
        ("actjax", "benchmarks/subspace_loops.py"), _loops,
    ),
    Job(
        "random_arrays", "benchmarks.random_arrays", "Random arrays through every codec",
        ("actjax/codecs", "actjax/kernels"), _random_arrays,
        quick=("--count", "1650", "--together", "22"),
    ),
    Job(
        "malformed", "benchmarks.malformed", "Malformed inputs of the programs",
        ("actjax", "train", "models"), _malformed, quick=("--count", "35"),
    ),
    Job(
        "soak", "benchmarks.soak", "A run under random kills", ("actjax", "models", "train"),
        _rows(verdict.table),
        quick=("--steps", "200", "--kills", "3", "--save-every", "20", "--processes", "1",
               "--vocab-size", "512"),
    ),
)  # fmt: skip
"""In the order of the page. Loss curves that take hours are not among them: their commands stand
beside their tables in `docs/results/quality.md`."""
