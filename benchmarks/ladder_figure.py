"""The picture of the ladder: memory of each rung, and held-out loss against seconds of training."""

import pathlib
from typing import Any

from matplotlib.figure import Figure

from benchmarks import picture
from benchmarks.ladder import RUNGS

_COLORS = ("#0072B2", "#999999", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a result of `benchmarks.ladder`.

    Args:
      result: its content.
      path: a PNG file, beside the result and named as it is.
    """
    rows, settings = result["rows"], result["settings"]
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = [RUNGS[row["rival"]] for row in rows]
    places = range(len(rows))
    left.barh(places, [row["peak"] / 2**30 for row in rows], color=_COLORS)
    for place, row in zip(places, rows, strict=True):
        left.text(row["peak"] / 2**30, place, f" {row['peak'] / 2**30:.1f}", va="center")
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.margins(x=0.15)
    left.set_xlabel(f"peak of a step of {settings['compiled']}, GiB, compiled")
    for row, label, color in zip(rows, labels, _COLORS, strict=True):
        curve = row["curve"]
        right.plot(
            [p["seconds"] for p in curve], [p["loss"] for p in curve], "o-", ms=3, color=color,
            label=label, lw=1,
        )  # fmt: skip
    right.axhline(rows[0]["common_loss"], color="gray", lw=0.8, ls=":")
    right.set(
        xlabel=f"seconds of training {settings['model']} here", ylabel="held-out loss, nats a token"
    )
    right.grid(alpha=0.3)
    right.legend(fontsize=7)
    picture.save(figure, path, (path.with_suffix(".json"),), dpi=110)
