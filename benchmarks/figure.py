"""Draws the figure of the README from the results of `benchmarks.memory` and `benchmarks.loss`."""

import json
import pathlib

import tyro
from matplotlib.figure import Figure

from benchmarks.record import RESULTS

_NAMES = {
    "plain": "plain JAX",
    "jax.checkpoint, dots": "jax.checkpoint, dots",
    "jax.checkpoint, full": "jax.checkpoint, full",
    "exact": "actjax exact",
    "pamm": "actjax pamm",
    "random_projection": "actjax random_projection",
    "low_rank": "actjax low_rank",
}


def draw(
    memory: pathlib.Path = RESULTS / "memory.json",
    loss: pathlib.Path = RESULTS / "loss.json",
    out: pathlib.Path = RESULTS / "overview.png",
) -> None:
    """Draws memory against operations, and the loss that each method ends at.

    Args:
      memory: raw result of `benchmarks.memory`.
      loss: raw result of `benchmarks.loss`.
      out: the picture.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(left, json.loads(memory.read_text()))
    _draw_loss(right, json.loads(loss.read_text()))
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


def _draw_memory(axes, result: dict) -> None:
    rows = {row["rival"]: row for row in result["rows"]}
    settings = result["settings"]
    for i, (key, name) in enumerate(_NAMES.items()):
        size = rows[key]["temporaries"] / 2**20
        flops = rows[key]["matmul_flops"] / rows["plain"]["matmul_flops"]
        axes.barh(i, size, color="tab:blue" if "actjax" in name else "tab:gray")
        axes.text(size, i, f" {size:,.0f} MiB, {flops:.2f} x FLOPs", va="center")
    axes.set_yticks(range(len(_NAMES)), _NAMES.values())
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * rows["plain"]["temporaries"] / 2**20)
    shape = f"{settings['batch_size']} x {settings['seq_len']} tokens, {settings['dtype']}"
    axes.set(title=f"{settings['model']}, {shape}", xlabel="residuals and workspace, MiB")


def _draw_loss(axes, result: dict) -> None:
    train = result["settings"]["train"]
    for row in result["rows"]:
        if row["seed"] == 0:
            steps = [(line["step"], line["validation_loss"]) for line in row["evaluations"]]
            label = f"{row['method']}: {steps[-1][1]:.3f}"
            axes.plot(*zip(*steps, strict=True), "o-", markersize=3, label=label)
    tokens = f"{train['batch_size']} x {train['seq_len']} tokens a step"
    axes.set(title=f"{train['model']}, {tokens}", xlabel="step", ylabel="held-out loss, nats")
    axes.legend()
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    tyro.cli(draw, description=__doc__)
