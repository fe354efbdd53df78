"""Cost of a refresh of the subspace, beside a singular value decomposition of every weight.

`python -m benchmarks.refresh --model llama_1b` counts the operations that a refresh step has beyond
an ordinary step: products in the trace, and factorizations by the counts of Golub and Van Loan,
"Matrix Computations", 5.2, 8.3 and 8.6. It times the refresh of one layer's bases, from factored
gradients as in `subspace` and from dense gradients as in `galore`, beside `jnp.linalg.svd` of the
same dense gradients (GaLore, Algorithm 2). Costs are spread over `--method.gap` steps.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import actjax
from actjax.optim.bases import OVERSAMPLING, POWER_ITERATIONS
from actjax.optim.projections import Side
from benchmarks import command, record
from benchmarks.rivals import rival
from benchmarks.tables import print_table
from train.planning.flops import causal_loop_length, matmul_flops
from train.run.loss import batch_shapes
from train.settings.config import PretrainConfig
from train.settings.resolve import dimensions


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(model="llama_1b", seq_len=1024)
    )
    """Model and batch."""
    divisors: tuple[int, ...] = (16, 4)
    """The ranks are the width of the model divided by these."""
    rounds: int = 3
    """Timed refreshes, after one that is not counted."""
    results: pathlib.Path = record.RESULTS / "refresh.json"


def measure(config: Config) -> list[dict]:
    """Returns one row for each rank, and one for the decompositions."""
    weights = _weights(config)
    width, layers = weights["q"][0], dimensions(config.train).num_layers
    keys = jax.random.split(jax.random.key(0), len(weights))
    dense = {
        name: jax.random.normal(key, shape, jnp.float32)
        for key, (name, shape) in zip(keys, weights.items(), strict=True)
    }
    svd = jax.jit(functools.partial(jax.tree.map, lambda g: jnp.linalg.svd(g, False)[0]))
    programs: dict[str, tuple[Callable, Any]] = {"svd": (svd, dense)}
    rows: dict[str, dict] = {"svd": {"what": "svd of every weight", "layers": layers}}
    rows["svd"]["factorisation_flops"] = sum(_svd_flops(*shape) for shape in weights.values())
    for divisor in config.divisors:
        rank = width // divisor
        factored = _factored(weights, rank)
        sides: tuple[tuple[str, Any, Side], ...] = (
            (f"subspace d/{divisor}", factored, "input"),
            (f"galore d/{divisor}", dense, "smaller"),
        )
        for what, grads, side in sides:
            groups = _GROUPS if side == "input" else {name: name for name in weights}
            tx = actjax.optim.subspace(optax.scale_by_adam(), rank, side=side, groups=groups)
            state = tx.init(dense)
            change = jax.jit(lambda g, s, tx=tx: tx.refresh(g, s, g).bases)
            programs[what] = (functools.partial(_swapped, change, state), grads)
            rows[what] = {"what": what, "rank": rank, "layers": layers} | _flops(config, what)
            rows[what]["factorisation_flops"] = sum(
                _basis_flops(weights[name], rank, side) for name in set(groups.values())
            )
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + config.rounds):
        for name, (program, grads) in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(grads))
            seconds[name].append(time.perf_counter() - begin)
    for name, row in rows.items():
        row["seconds_a_layer"] = seconds[name][1:]
    return list(rows.values())


_GROUPS = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}


def _svd_flops(d: int, n: int) -> float:
    """Returns operations of a thin singular value decomposition of [d, n]."""
    long, short = max(d, n), min(d, n)
    return 6 * long * short**2 + 20 * short**3


def _basis_flops(shape: tuple[int, int], rank: int, side: Side) -> float:
    """Returns operations of the factorizations for one basis: QR, and eigenvectors."""
    if side == "input":
        return _qr_flops(shape[0], rank) + 9 * rank**3
    # For a dense gradient: a sketch with oversampling, and QR again for each power iteration.
    columns = rank + OVERSAMPLING
    return (1 + POWER_ITERATIONS) * _qr_flops(min(shape), columns) + 9 * columns**3


def _qr_flops(d: int, k: int) -> float:
    """Returns operations of a Householder QR of [d, k] that forms the first factor."""
    return 4 * d * k**2 - 4 * k**3 / 3


def _swapped(change: Callable, state: Any, grads: Any) -> Any:
    return change(grads, state)


def _weights(config: Config) -> dict[str, tuple[int, int]]:
    """Returns the shapes of one layer's weights."""
    dims = dimensions(config.train)
    d, f = dims.hidden_size, dims.ffn_size
    heads, keys = dims.num_heads * dims.head_size, dims.num_kv_heads * dims.head_size
    return {
        "q": (d, heads),
        "k": (d, keys),
        "v": (d, keys),
        "o": (heads, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


def _factored(weights: dict[str, tuple[int, int]], rank: int) -> dict[str, actjax.LowRank]:
    lefts = {}
    for i, (name, (d, _)) in enumerate(weights.items()):
        if _GROUPS[name] == name:
            lefts[name] = jax.random.normal(jax.random.key(i), (d, rank), jnp.float32)
    return {
        name: actjax.LowRank(
            lefts[_GROUPS[name]], jax.random.normal(jax.random.key(99 + i), (rank, n), jnp.float32)
        )
        for i, (name, (_, n)) in enumerate(weights.items())
    }


def _flops(config: Config, name: str) -> dict[str, int]:
    """Returns operations of a step of the whole model, and of a refresh step."""
    one = rival(name, config.train)
    state, batch = jax.eval_shape(one.init), batch_shapes(config.train)
    count = functools.partial(matmul_flops, loop_length=causal_loop_length(config.train.seq_len))
    return {
        "step_matmul_flops": count(one.step, state, batch),
        "refresh_matmul_flops": count(one.refresh, state, batch),
    }


def show(config: Config, rows: list[dict]) -> None:
    """Prints operations and time of a refresh, spread over the gap."""
    gap = config.train.options.gap
    title = f"{config.train.model}, a refresh of the subspace every {gap} steps"
    headers = ("what", "ms a layer", "/ svd", "s a step, all layers", "factorizations TFLOP",
               "TFLOP a step", "more in a refresh", "amortised share")  # fmt: skip
    cells = []
    svd = statistics.median(rows[0]["seconds_a_layer"])
    steps = [row["step_matmul_flops"] for row in rows if "step_matmul_flops" in row]
    for row in rows:
        median = statistics.median(row["seconds_a_layer"])
        factorisations = row["factorisation_flops"] * row["layers"]
        step = row.get("step_matmul_flops", max(steps))
        more = factorisations + row.get("refresh_matmul_flops", step) - step
        cells.append(
            (
                row["what"],
                f"{median * 1e3:,.0f}",
                f"{median / svd:.4f}",
                f"{median * row['layers'] / gap:.3f}",
                f"{factorisations / 1e12:,.2f}",
                f"{step / 1e12:,.2f}",
                f"{more / 1e12:,.2f}",
                f"{more / gap / step:.5f}",
            )
        )
    print_table(title, headers, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
