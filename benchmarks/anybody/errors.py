"""Errors of the gradient, and bytes that are held, of programs that are sensitive to codes.

`python -m benchmarks.anybody.errors`. Each program of `benchmarks.anybody.programs` is
differentiated exactly, and with `compress_residuals` at 8 and at 4 bits.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import actjax
from benchmarks import command, record
from benchmarks.anybody.programs import Program, programs
from benchmarks.tables import Cells, print_cells


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    seed: int = 0
    """Seed of parameters and data."""
    results: pathlib.Path = record.RESULTS / "sensitive_programs.json"
    """Where raw results go."""


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each program."""
    return [_row(program) for program in programs(config.seed)]


def _row(program: Program) -> dict[str, Any]:
    exact = jax.jit(jax.grad(program.loss))(program.params, *program.batch)
    row: dict[str, Any] = {"kind": program.kind, "program": program.name}
    for bits in (8, 4):
        coded = actjax.compress_residuals(program.loss, actjax.Quantized(bits))
        error = _error(jax.jit(jax.grad(coded))(program.params, *program.batch), exact)
        row[f"error_{bits}"] = error if math.isfinite(error) else None
        row[f"held_{bits}"] = _held(coded, program)
    row["held"] = _held(program.loss, program)
    return row


def _error(gradient: Any, exact: Any) -> float:
    """Returns `‖g - g_exact‖ / ‖g_exact‖` over all parameters."""
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True))
    wrong = sum(float(np.sum(np.square(np.asarray(a, float) - b))) for a, b in pairs)
    return (wrong / sum(float(np.sum(np.square(np.asarray(b, float)))) for _, b in pairs)) ** 0.5


def _held(loss: Callable[..., Any], program: Program) -> int:
    """Returns the bytes of the pullback."""
    pullback = jax.eval_shape(
        lambda params: jax.vjp(lambda p: loss(p, *program.batch), params)[1], program.params
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns cells for kinds of programs: errors of each program, and the most that is held."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    cells = []
    for kind in kinds:
        of_kind = [row for row in rows if row["kind"] == kind]
        cells.append(
            {
                "kind": kind,
                "programs": ", ".join(row["program"].replace("_", " ") for row in of_kind),
                **{
                    f"error, {bits} bits": ", ".join(_text(row[f"error_{bits}"]) for row in of_kind)
                    for bits in (8, 4)
                },
                "held, 4 bits": f"{max(row['held_4'] / row['held'] for row in of_kind):.0%}",
            }
        )
    return cells


def _text(error: float | None) -> str:
    return "NaN" if error is None else f"{error:.2g}"


def show(_: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    cells = [
        {
            "kind": row["kind"],
            "program": row["program"],
            "error, 8 bits": _text(row["error_8"]),
            "4 bits": _text(row["error_4"]),
            "held, 4 bits": f"{row['held_4'] / row['held']:.0%}",
        }
        for row in rows
    ]
    print_cells("Errors of sensitive programs", cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
