"""Errors of gradients, memory and time of `compress`, for the scripts of this folder."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import actjax
from benchmarks import record
from benchmarks.tables import Cells

RESULTS = record.RESULTS / "trainers.json"
Gradient = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a loss to its gradient as the trainer takes it: from arrays to a pytree of arrays."""
OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def report(
    trainer: str,
    lines: int,
    loss: Callable[..., Any],
    gradient: Gradient,
    arguments: tuple[Any, ...],
    measured: tuple[Any, ...],
    *,
    step: Callable[[Callable[..., Any]], Any] | None = None,
    has_aux: bool = False,
    error: float = 0.05,
    more: dict[str, Any] | None = None,
) -> None:
    """Measures each way, and writes a row of `benchmarks/results/trainers.json`.

    Args:
      trainer: its name and version.
      lines: how many lines a user changes.
      loss: the loss that the trainer takes.
      gradient: how the trainer differentiates it.
      arguments: of the gradient.
      measured: arguments of `compress(...).measure`.
      step: from a loss to the lowered training step.
      has_aux: whether the loss returns auxiliary data.
      error: of `compress`.
      more: further entries of the row.
    """
    out: dict[str, Any] = {"trainer": trainer, **record.environment(), "lines": lines}
    exact = jax.jit(gradient(loss))(*arguments)
    out["parameters"] = sum(x.size for x in jax.tree.leaves(exact))
    out["memory_MiB"] = {"plain": _memory(loss, gradient, arguments, step)}
    out["error"] = {}

    def add(name: str, coded: Callable[..., Any]) -> None:
        out["error"][name] = errors(jax.jit(gradient(coded))(*arguments), exact)
        out["memory_MiB"][name] = _memory(coded, gradient, arguments, step)
        print(name, out["error"][name], out["memory_MiB"][name], flush=True)

    for bits in (8, 4):
        add(f"{bits} bits", actjax.compress_residuals(loss, actjax.Quantized(bits)))
    start = time.perf_counter()
    small = actjax.compress(loss, error=error, has_aux=has_aux, verbose=False).measure(*measured)
    out["compress_s"] = round(time.perf_counter() - start, 1)
    choice = small.choice
    assert choice is not None
    out["compress"] = {t.name: round(t.error, 4) for t in choice.tried}
    out["chosen"] = choice.name
    add("compress", small)
    others = [r for r in record.rows_to_keep(RESULTS, add=True) if r["trainer"] != trainer]
    row = out | (more or {})
    record.save(RESULTS, {"environment": record.environment(), "rows": [*others, row]})
    print(row)


def errors(gradient: Any, exact: Any) -> dict[str, float]:
    """Returns the relative error of a gradient: of all of it, and of its arrays.

    `arrays` is the root mean square over parameters of the error of the array that they are in, as
    `compress` has it, and `worst` that of the worst array.
    """
    pairs = [
        (np.asarray(x, np.float64), np.asarray(y, np.float64))
        for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True)
    ]
    parts = [(np.sum((x - y) ** 2), np.sum(y**2), y.size) for x, y in pairs]
    total = sum(a for a, _, _ in parts) / sum(b for _, b, _ in parts)
    each = [(a / b, size) for a, b, size in parts if b > 0]
    mean = sum(e * size for e, size in each) / sum(size for _, size in each)
    named = {"all": total**0.5, "arrays": mean**0.5, "worst": max(each)[0] ** 0.5}
    return {name: round(float(x), 5) for name, x in named.items()}


def _memory(
    loss: Callable[..., Any], gradient: Gradient, arguments: tuple[Any, ...], step: Any
) -> dict[str, float]:
    """Returns MiB of temporaries of the gradient, of the step, and of the gradient on an H100."""
    jitted = jax.jit(gradient(loss))
    out = {"gradient": _temporaries(jitted.lower(*arguments).compile(compiler_options=OPTIONS))}
    if step is not None:
        out["step"] = _temporaries(step(loss).compile(compiler_options=OPTIONS))
    target = os.environ.get("TARGET_CONFIG")  # A file with XLA's description of a GPU.
    if target:
        text = Path(target).read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=text
        )
        place = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=place),
            arguments,
        )
        with contextlib.suppress(RuntimeError):  # Callbacks need the device itself.
            out["h100"] = _temporaries(jax.jit(gradient(loss)).lower(*shapes).compile())
    return out


def _temporaries(compiled: Any) -> float:
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 3)


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns cells for trainers: memory of the gradient, errors, and the time to choose."""
    cells = []
    for row in rows:
        memory, errors = row["memory_MiB"], row["error"]
        cells.append(
            {
                "trainer": row["trainer"],
                "lines": str(row["lines"]),
                **{
                    f"{place}: plain, 8 bits, 4 bits, `compress`, MiB": ", ".join(
                        f"{memory[way][key]:.1f}" for way in memory if key in memory[way]
                    )
                    for place, key in (("CPU", "gradient"), ("H100", "h100"))
                },
                "error": ", ".join(f"{e['all']:.2%}" for e in errors.values()),
                "time to choose, s": f"{row['compress_s']:.0f}",
            }
        )
    return cells
