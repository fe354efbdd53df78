"""Rounding errors of first moments in 4 bits, on the moments of a trained model.

`python -m benchmarks.moment_rounding` trains `llama_9m` with Adam in float32, and rounds the first
moments of its layers in each form of `actjax.optim.four_bit`. An error is relative to the root of
the second moment of its number, as it enters an update. It takes five minutes on two cores.
"""

import dataclasses
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from actjax.kernels.four_bit import GROUP, signed_zeros
from benchmarks import command, record
from benchmarks.tables import print_table
from train import pretrain
from train.run.loop import StopSignal, train
from train.settings.config import OptimizerConfig, PretrainConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    model: str = "llama_9m"
    """Model to train."""
    steps: int = 300
    """Steps before its moments are rounded."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    seed: int = 0
    """Seed of the run."""
    groups: tuple[int, ...] = (GROUP, 64, 32)
    """Values that share a scale."""
    results: pathlib.Path = record.RESULTS / "moment_rounding.json"
    """File of the raw results."""


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each form, rounding and size of groups."""
    moments = _moments(config)
    rows = []
    for published in (False, True):
        for stochastic in (True, False):
            for group in config.groups:
                errors = [_errors(m, v, group, stochastic, published) for m, v in moments]
                count = sum(m.size for m, _ in moments)
                rows.append(
                    {
                        "form": "published" if published else "rank_one",
                        "rounding": "stochastic" if stochastic else "nearest",
                        "group": group,
                        "error": float(sum(errors)) / count,
                        "moment": float(sum(jnp.sum(m**2 / v) for m, v in moments)) / count,
                    }
                )
    return rows


def _moments(config: Config) -> list[tuple[jax.Array, jax.Array]]:
    """Returns first and second moments of the matrices of the layers, [layers, d, n]."""
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop:
        settings = PretrainConfig(
            model=config.model,
            method="exact",
            steps=config.steps,
            weight_dtype="bfloat16",
            optimizer=OptimizerConfig(learning_rate=config.learning_rate, moment_dtype="float32"),
            seed=config.seed,
            save_every=config.steps,
            out=pathlib.Path(folder, "run"),
        )
        console = Console(width=140)
        run = pretrain.prepare(settings, console)
        if train(run, console, stop) < config.steps:
            raise SystemExit("stopped by a signal")
    states = [
        node for node in jax.tree.leaves(run.state.optimizer, is_leaf=_is_adam) if _is_adam(node)
    ]
    pairs = [
        (m, v)
        for state in states
        for m, v in zip(jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True)
    ]
    # A number without a gradient has moments of zero, which are exact in every form.
    return [(m, jnp.maximum(v, 1e-30)) for m, v in pairs if m.ndim == 3]


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _errors(m: jax.Array, v: jax.Array, group: int, stochastic: bool, published: bool) -> jax.Array:
    """Returns the sum of squared rounding errors of a first moment over its second one."""
    zeros = signed_zeros(m.shape, m.dtype, group, stochastic=stochastic, published=published)
    return jnp.sum((jax.jit(zeros.encode)(m).decode() - m) ** 2 / v)


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the variance of each form."""
    title = f"{config.model} after {config.steps} steps: squared errors over the second moment"
    cells = [
        (
            f"{row['form']}, {row['rounding']}, groups of {row['group']}",
            f"{row['error']:.5f}",
            f"{row['error'] / row['moment']:.4f}",
        )
        for row in rows
    ]
    print_table(title, ("form", "mean", "over that of the moment"), cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
