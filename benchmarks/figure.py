"""Draws the figure of the README from the results of `benchmarks.memory` and `benchmarks.loss`."""

import pathlib
import statistics

import tyro
from matplotlib.figure import Figure

from benchmarks import picture
from benchmarks.loss import best_rows
from benchmarks.record import RESULTS, read
from benchmarks.runs import last_loss

_RIVALS = (
    "plain",
    "jax.checkpoint, dots",
    "jax.checkpoint, full",
    "optax.contrib.galore d/4",
    "exact",
    "low_rank 32",
    "subspace d/4",
    "subspace d/16",
    "gact, 4 bits",
    "quantized, 4 bits",
    "compressed_remat",
    "exact, 8-bit states, in backward",
    "remat, 8-bit states, in backward",
    "lean",
    "lean_subspace d/4",
)
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#BBBBBB")


def draw(
    memory: pathlib.Path = RESULTS / "memory_h100.json",
    loss: pathlib.Path = RESULTS / "loss.json",
    out: pathlib.Path = RESULTS / "overview.png",
) -> None:
    """Draws the memory of a whole step by category, and the loss that each variant ends at.

    Args:
      memory: raw result of `benchmarks.memory`.
      loss: raw result of `benchmarks.loss`.
      out: the picture.
    """
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(left, read(memory))
    _draw_loss(right, read(loss))
    picture.save(figure, out, (memory, loss), dpi=130)
    print(f"wrote {out}")


def _draw_memory(axes, result: dict) -> None:
    rows = {row["rival"]: row for row in result["rows"]}
    train, plain = result["settings"]["train"], rows["plain"]
    for i, name in enumerate(_RIVALS):
        row, start = rows[name], 0.0
        for (category, size), color in zip(row["categories"].items(), _COLORS, strict=True):
            label = category.replace("_", " ") if i == 0 else None
            axes.barh(i, size / 2**30, left=start, color=color, label=label)
            start += size / 2**30
        flops = row["matmul_flops"] / plain["matmul_flops"]
        axes.text(start, i, f" {row['peak'] / 2**30:.1f} GiB, {flops:.2f} x FLOPs", va="center")
    axes.set_yticks(range(len(_RIVALS)), _RIVALS)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * plain["peak"] / 2**30)
    shape = f"{train['batch_size']} x {train['seq_len']} tokens"
    title = f"a whole AdamW step of {train['model']},\n{shape}, {train['weight_dtype']} weights"
    axes.set(title=title, xlabel="GiB, compiled for an H100")
    axes.legend(loc="lower right", fontsize=8)


def _draw_loss(axes, result: dict) -> None:
    train = result["settings"]["train"]
    best = best_rows(result["rows"])
    means = {name: statistics.mean(map(last_loss, rows)) for name, rows in best.items()}
    names = sorted(means, key=lambda name: means[name])
    for i, name in enumerate(names):
        others = [row for row in result["rows"] if row["variant"] == name]
        axes.plot([last_loss(row) for row in others], [i] * len(others), ".", color="#BBBBBB")
        axes.plot(means[name], i, "o", color="#0072B2")
        label = f"{means[name]:.3f} at {best[name][0]['learning_rate']:g}"
        label += f", {len(best[name])} seeds" if len(best[name]) > 1 else ""
        axes.text(means[name], i - 0.2, label, fontsize=8, ha="center")
    axes.set_yticks(range(len(names)), names)
    # Room for the labels: above the first, and beside the least and the largest loss. No difference
    # below a hundredth of the loss looks large.
    axes.set_ylim(len(names) - 0.6, -0.6)
    low, high = axes.get_xlim()
    room = max(0.17 * (high - low), 0.02 * low - (high - low) / 2)
    axes.set_xlim(low - room, high + room)
    tokens = f"{train['steps']} steps of {train['batch_size']} x {train['seq_len']} tokens"
    title = f"{train['model']}, {tokens},\n{train['weight_dtype']} weights unless named"
    axes.set(title=title, xlabel="held-out loss, nats a token; gray: single runs")
    axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    tyro.cli(draw, description=__doc__)
