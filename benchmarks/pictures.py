"""The pictures of the documentation. Each holds the digests of the results that it shows."""

import hashlib
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.ladder import RUNGS
from benchmarks.record import read
from benchmarks.training import best_rows, last_loss

_KEY = "Description"
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#BBBBBB", "#CC79A7")
_OVERVIEW = (
    *("plain", "jax.checkpoint, dots", "jax.checkpoint, full", "optax.contrib.galore d/4", "exact"),
    *("low_rank 32", "subspace d/4", "quantized, 4 bits", "remat, 8-bit states, in backward"),
    *("lean", "lean_subspace d/4"),
)
"""Steps whose memory the picture of the README shows."""
_SUBSPACES = ("subspace", "galore", "lean_subspace", "random_projection")
"""How names of steps begin whose optimizers read most gradients in a subspace only."""
Result = dict[str, Any]


def overview(figure: Figure, memory: Result, loss: Result) -> None:
    """Draws the memory of a whole step by category, and the loss that each variant ends at.

    The panels are above each other, and the picture is narrow, so that its letters can be read
    where it is 400 pixels wide.
    """
    upper, lower = figure.subplots(2, 1, height_ratios=(11, 15))
    _draw_memory(upper, memory)
    _draw_losses(lower, loss)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set(fontsize=11, fontweight="bold")
        # Over the labels too, which take a third of the width.
        axes.title.set_horizontalalignment("right")
        axes.title.set_x(1)


def _draw_memory(axes: Any, result: Result) -> None:
    rows = {row["rival"]: row for row in result["rows"] if row["rival"] in _OVERVIEW}
    names = sorted(rows, key=lambda name: -rows[name]["peak"])
    train, plain = result["settings"]["train"], rows["plain"]
    for i, name in enumerate(names):
        row, start = rows[name], 0.0
        for (category, size), color in zip(row["categories"].items(), _COLORS, strict=False):
            label = category.replace("_", " ") if i == 0 else None
            axes.barh(i, size / 2**30, left=start, color=color, label=label)
            start += size / 2**30
        flops = row["matmul_flops"] / plain["matmul_flops"]
        axes.text(start, i, f" {row['peak'] / 2**30:.1f} GiB, {flops:.2f}", va="center")
    axes.set_yticks(range(len(names)), [name.removesuffix(", in backward") for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * plain["peak"] / 2**30)
    shape = f"{train['batch_size']} x {train['seq_len']} tokens, {train['weight_dtype']} weights"
    axes.set_title(f"Memory of an AdamW step: shorter is better\n{train['model']}, {shape}")
    axes.set_xlabel("GiB, compiled for an H100; then operations, plain = 1", loc="right")
    axes.legend(loc="lower right", frameon=False)


def _draw_losses(axes: Any, result: Result) -> None:
    """Draws variants of all weights, and below them those in a subspace.

    They are not comparable: the layers of the latter take a quarter of the step of embeddings and
    head, which the former do not have at any learning rate (`docs/results/quality.md`).
    """
    train, best = result["settings"]["train"], best_rows(result["rows"], "variant")
    means = {name: statistics.mean(map(last_loss, rows)) for name, rows in best.items()}
    names = sorted(means, key=lambda name: (name.startswith(_SUBSPACES), means[name]))
    apart = sum(not name.startswith(_SUBSPACES) for name in names)
    places = [i + 2.2 * (i >= apart) for i in range(len(names))]
    for place, name in zip(places, names, strict=True):
        rows, mean = best[name], means[name]
        filling = "none" if name.startswith(_SUBSPACES) else "#0072B2"
        single_runs = [last_loss(row) for row in rows]
        label = f"{mean:.3f} at {rows[0]['learning_rate']:g}"
        if len(rows) > 1:
            axes.plot(single_runs, [place] * len(rows), ".", color="#BBBBBB")
            label += f", {len(rows)} seeds"
        axes.plot(mean, place, "o", color="#0072B2", mfc=filling)
        axes.annotate(
            label, (max(single_runs), place), (7, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, names)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    low, high = min(means.values()), max(means.values())
    axes.set_xlim(low - 0.05 * (high - low), high + 0.4 * (high - low))
    axes.axhspan(apart - 0.4, places[-1] + 0.7, color="#F0F0F0", zorder=0)
    axes.text(
        *(0.99, apart + 0.55),
        "Not comparable: at 8e-3, scaled by 0.25 in the layers,\n"
        "embeddings and head take four times larger steps.",
        transform=axes.get_yaxis_transform(), ha="right", va="center", style="italic",
    )  # fmt: skip
    tokens = f"{train['steps']:,} steps of {train['batch_size']} x {train['seq_len']} tokens"
    axes.set_title(f"Loss after training: left is better\n{train['model']}, {tokens}")
    axes.set_xlabel("held-out loss, nats a token, at a learning rate; gray: seeds", loc="right")
    axes.grid(axis="x", alpha=0.3)


class Point(NamedTuple):
    """A step with its peak in bytes, and its operations or seconds."""

    name: str
    memory: float
    cost: float

    @property
    def is_in_subspace(self) -> bool:
        """Whether its optimizer reads most gradients in a subspace only."""
        return self.name.removeprefix("optax.contrib.").startswith(_SUBSPACES)

    def beats(self, other: "Point") -> bool:
        """Whether it is no worse in both costs, better in one, and trains as much."""
        as_full = self.is_in_subspace <= other.is_in_subspace
        as_good = self.memory <= other.memory and self.cost <= other.cost
        return as_full and as_good and self[1:] != other[1:]


def pareto(figure: Figure, memory: Result, step_time: Result) -> None:
    """Draws memory against operations and against time, with the steps that no other beats.

    Steps in a subspace are hollow: they may beat each other, but not those of all weights.
    """
    panels = (
        (memory, "compiled for an H100", "matmul TFLOP", lambda row: row["matmul_flops"] / 1e12),
        (step_time, "run on a CPU", "s a step, median", lambda x: statistics.median(x["seconds"])),
    )
    for axes, (result, how, unit, cost) in zip(figure.subplots(1, 2), panels, strict=True):
        points = [Point(row["rival"], row["peak"] / 2**30, cost(row)) for row in result["rows"]]
        beaten = {p.name for p in points if any(q.beats(p) for q in points)}
        for hollow, style in ((False, "-"), (True, ":")):
            front = sorted(
                p[1:] for p in points if p.name not in beaten and p.is_in_subspace == hollow
            )
            axes.step(*np.reshape(front, (-1, 2)).T, color="0.8", ls=style, where="post")
        for p in points:
            is_ours = not p.name.startswith(("plain", "jax.checkpoint", "optax."))
            color = "#0072B2" if is_ours else "#D55E00"
            filling = "none" if p.is_in_subspace else color
            alpha = 0.35 if p.name in beaten else 1
            axes.plot(*p[1:], "o", ms=6, color=color, mfc=filling, alpha=alpha)
            if p.name not in beaten or not is_ours:
                axes.annotate(p.name, p[1:], xytext=(4, 4), textcoords="offset points", fontsize=7,
                              rotation=30, color=color)  # fmt: skip
        train = result["settings"]["train"]
        title = f"{train['model']}, {train['batch_size']} x {train['seq_len']} tokens, {how}"
        axes.set(title=title, xlabel="peak, GiB", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.margins(0.12)


def ladder(figure: Figure, result: Result) -> None:
    """Draws the memory of each rung, and the held-out loss against seconds of training."""
    rows, settings = result["rows"], result["settings"]
    left, right = figure.subplots(1, 2)
    labels, places = [RUNGS[row["rival"]] for row in rows], range(len(rows))
    left.barh(places, [row["peak"] / 2**30 for row in rows], color=_COLORS)
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.margins(x=0.15)
    left.set_xlabel(f"peak of a step of {settings['compiled']}, GiB, compiled")
    for place, row, label, color in zip(places, rows, labels, _COLORS, strict=False):
        left.text(row["peak"] / 2**30, place, f" {row['peak'] / 2**30:.1f}", va="center")
        seconds, losses = zip(*((p["seconds"], p["loss"]) for p in row["curve"]), strict=True)
        right.plot(seconds, losses, "o-", ms=3, color=color, label=label, lw=1)
    right.axhline(rows[0]["common_loss"], color="gray", lw=0.8, ls=":")
    trained = f"seconds of training {settings['model']} here"
    right.set(xlabel=trained, ylabel="held-out loss, nats a token")
    right.grid(alpha=0.3)
    right.legend(fontsize=7)


def curves(figure: Figure, result: Result) -> None:
    """Draws the losses of runs that took the same batches, those of each name with the first seed.

    The differences of training losses to those of the first run are less noisy than the losses: a
    step sees the same text in all runs.
    """
    runs = _first_runs(result["rows"])
    left, right = figure.subplots(1, 2)
    reference, first = next(iter(runs.items()))
    base, colors = dict(first["training"]), colormaps["tab20"]
    for number, (name, run) in enumerate(runs.items()):
        color = colors(number % colors.N)
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


def _first_runs(rows: list[Result]) -> dict[str, Result]:
    """Returns the first run of each name: that of the best rate, if several have this seed."""
    runs: dict[str, Result] = {}
    for row in sorted(rows, key=lambda row: row.get("seed", 0)):
        name = row.get("name") or row.get("variant")
        if name and row.get("training"):
            best = runs.setdefault(name, row)
            if row.get("seed") == best.get("seed") and last_loss(row) < last_loss(best):
                runs[name] = row
    return runs


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns means over a tenth of the values around each."""
    window = np.ones(max(1, len(values) // 10))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


class Picture(NamedTuple):
    """How to draw a picture: from a figure and the contents of results."""

    draw: Callable[..., None]
    results: tuple[str, ...]
    size: tuple[float, float]
    dpi: int


PICTURES = {
    "overview.png": Picture(overview, ("memory_h100.json", "loss.json"), (6.2, 8.4), 200),
    "pareto.png": Picture(pareto, ("memory_h100.json", "step_time.json"), (15, 6), 130),
    "ladder.png": Picture(ladder, ("ladder.json",), (11, 3.8), 110),
    **{
        f"{name}.png": Picture(curves, (f"{name}.json",), (16, 4.8), 110)
        for name in ("loss", "finetune", "finetune_wikisql")
    },
}
"""By the names of their files, in the folder of the results."""


def draw_all(folders: Sequence[pathlib.Path]) -> None:
    """Draws the pictures of each folder whose results have changed since they were drawn."""
    for folder in folders:
        for name, picture in PICTURES.items():
            path, results = folder / name, [folder / result for result in picture.results]
            if all(result.exists() for result in results) and note(path):
                figure = Figure(figsize=picture.size, layout="constrained")
                picture.draw(figure, *map(read, results))
                save(figure, path, results, picture.dpi)
                print(f"drew {path}")


def save(figure: Figure, path: pathlib.Path, results: Sequence[pathlib.Path], dpi: int) -> None:
    """Writes a figure as a PNG file that holds the digests of its results."""
    figure.savefig(path, dpi=dpi, metadata={_KEY: _digests(results)})


def note(path: pathlib.Path) -> str:
    """Returns a fault in the age of a picture; nothing if its results are as they were."""
    if not path.exists():
        return f"{path.name} is not drawn yet."
    with Image.open(path) as image:
        drawn = image.info.get(_KEY, "")
    if not drawn:
        return f"{path.name} does not say which results it shows."
    names = [part.split()[0] for part in drawn.split(", ")]
    if drawn == _digests([path.parent / name for name in names]):
        return ""
    return f"{path.name} is older than its results, {' and '.join(names)}: draw it again."


def _digests(results: Sequence[pathlib.Path]) -> str:
    """Returns names and digests; results that are not there have none."""
    digests = []
    for path in results:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
        digests.append(f"{path.name} {digest[:16]}")
    return ", ".join(digests)
