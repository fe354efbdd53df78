"""Draws the losses of training runs that took the same batches.

`python -m benchmarks.curves --results FILE` draws the runs in a result of `benchmarks.finetune`,
`benchmarks.loss` or `benchmarks.weight_rounding` with the same first seed: their training and
held-out losses, and how far their training losses are above those of the first run, which is less
noisy, since a step sees the same text in all runs, and is drawn at the steps that both have logged.
"""

import pathlib
from typing import Any

import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks import picture
from benchmarks.record import read
from benchmarks.runs import last_loss

_COLORS = colormaps["tab20"]


def draw(results: pathlib.Path, out: pathlib.Path | None = None, prefix: str = "") -> None:
    """Draws the runs of a result.

    Args:
      results: raw result.
      out: the picture. Default: beside the result, with the suffix .png.
      prefix: only runs whose name begins with this.
    """
    runs = _runs(read(results)["rows"], prefix)
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference, first = next(iter(runs.items()))
    base = dict(first["training"])
    for number, (name, run) in enumerate(runs.items()):
        color = _COLORS(number % _COLORS.N)
        steps, losses = np.transpose(run["training"])
        rate = f", {run['learning_rate']:g}" if "learning_rate" in run else ""
        label = f"{name}{rate}: {last_loss(run):.4f}"
        left.plot(steps, _smooth(losses), color=color, label=label)
        points = [(line["step"], line["validation_loss"]) for line in run["evaluations"]]
        left.plot(*np.transpose(points), "o", color=color)
        above = [(step, loss - base[step]) for step, loss in run["training"] if step in base]
        if run is not first and above:
            steps, differences = np.transpose(above)
            right.plot(steps, _smooth(differences), color=color)
    left.set(xlabel="step", ylabel="loss, nats", title="smoothed; points: held out")
    right.set(xlabel="step", title=f"training loss above {reference}, smoothed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    path = out or results.with_suffix(".png")
    picture.save(figure, path, (results,), dpi=110)
    print(f"wrote {path}")


def _runs(rows: list[dict[str, Any]], prefix: str) -> dict[str, dict[str, Any]]:
    """Returns the first run of each name: that of the best rate, if several have this seed."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.get("seed", 0)):
        name = row.get("name") or row.get("variant")
        if name and row.get("training") and name.startswith(prefix):
            best = found.setdefault(name, row)
            if row.get("seed") == best.get("seed") and last_loss(row) < last_loss(best):
                found[name] = row
    if not found:
        raise SystemExit(f"no run with training losses has a name that begins with {prefix!r}")
    return found


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns means over a tenth of the values around each."""
    width = max(1, len(values) // 10)
    window = np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


if __name__ == "__main__":
    tyro.cli(draw, description=__doc__)
