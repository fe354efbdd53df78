"""Rivals that no other beats: memory against operations, and memory against measured time.

`python -m benchmarks.pareto` reads the results of `benchmarks.memory --device h100` and
`benchmarks.step_time`. It prints a table of each, with the rivals that beat another in both costs,
and draws them. Rivals that train in a subspace are drawn hollow: they may beat each other, but not
rivals that train with full gradients.
"""

import dataclasses
import pathlib
import statistics

import tyro
from matplotlib.figure import Figure

from benchmarks import picture
from benchmarks.record import RESULTS, read
from benchmarks.tables import print_table
from benchmarks.variants import VARIANTS
from train.settings.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Point:
    """A rival with both of its costs.

    Attributes:
      name: name of the rival.
      memory: peak in bytes.
      cost: operations, or seconds.
    """

    name: str
    memory: float
    cost: float

    @property
    def is_ours(self) -> bool:
        """Whether it is a method of `train.pretrain`."""
        return self.name in VARIANTS

    @property
    def is_in_subspace(self) -> bool:
        """Whether its optimizer reads most gradients in a subspace only."""
        ours = self.is_ours and METHODS[VARIANTS[self.name].method].subspace is not None
        return ours or self.name.startswith("optax.contrib.galore")

    def beats(self, other: "Point") -> bool:
        """Whether it is no worse in both costs, better in one, and trains as much."""
        as_full = self.is_in_subspace <= other.is_in_subspace
        as_good = self.memory <= other.memory and self.cost <= other.cost
        return as_full and as_good and (self.memory, self.cost) != (other.memory, other.cost)


def dominators(points: list[Point]) -> dict[str, str]:
    """Returns, for each beaten rival, a rival that beats it."""
    found = {}
    for p in points:
        better = [q for q in points if q.beats(p)]
        if better:
            found[p.name] = min(better, key=lambda q: q.memory * q.cost).name
    return found


def show(title: str, points: list[Point], unit: str, scale: float) -> None:
    """Prints rivals by memory, each with a rival that beats it."""
    beaten = dominators(points)
    print_table(
        title,
        ("rival", "GiB", unit, "beaten by"),
        [
            (p.name, f"{p.memory / 2**30:.2f}", f"{p.cost / scale:.2f}", beaten.get(p.name, "none"))
            for p in sorted(points, key=lambda p: p.memory)
        ],
    )


def draw(
    memory: pathlib.Path = RESULTS / "memory_h100.json",
    step_time: pathlib.Path = RESULTS / "step_time.json",
    out: pathlib.Path = RESULTS / "pareto.png",
) -> None:
    """Prints and draws the rivals that no other beats.

    Args:
      memory: raw result of `benchmarks.memory`.
      step_time: raw result of `benchmarks.step_time`.
      out: the picture.
    """
    compiled, timed = (read(path) for path in (memory, step_time))
    panels = [
        (_where(compiled, "compiled for an H100"), _counted(compiled), "matmul TFLOP", 1e12),
        (_where(timed, "run on a CPU"), _timed(timed), "s a step, median", 1.0),
    ]
    figure = Figure(figsize=(15, 6), layout="constrained")
    for axes, (title, points, unit, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        show(f"a whole step of {title}", points, unit, scale)
        _draw(axes, points, scale)
        axes.set(title=title, xlabel="peak, GiB", ylabel=unit)
        axes.margins(0.12)
    picture.save(figure, out, (memory, step_time), dpi=130)
    print(f"wrote {out}")


def _where(result: dict, how: str) -> str:
    train = result["settings"]["train"]
    return f"{train['model']}, {train['batch_size']} x {train['seq_len']} tokens, {how}"


def _counted(result: dict) -> list[Point]:
    return [Point(row["rival"], row["peak"], row["matmul_flops"]) for row in result["rows"]]


def _timed(result: dict) -> list[Point]:
    return [
        Point(row["rival"], row["peak"], statistics.median(row["seconds"]))
        for row in result["rows"]
    ]


def _draw(axes, points: list[Point], scale: float) -> None:
    beaten = dominators(points)
    for in_subspace in (False, True):
        of_it = [p for p in points if p.name not in beaten and p.is_in_subspace == in_subspace]
        front = sorted(of_it, key=lambda p: p.memory)
        axes.step(
            [p.memory / 2**30 for p in front],
            [p.cost / scale for p in front],
            color="0.8",
            linestyle=":" if in_subspace else "-",
            where="post",
        )
    for p in points:
        color = "#0072B2" if p.is_ours else "#D55E00"
        axes.plot(
            p.memory / 2**30,
            p.cost / scale,
            "o",
            ms=6,
            color=color,
            mfc="none" if p.is_in_subspace else color,
            alpha=0.35 if p.name in beaten else 1,
        )
        if p.name not in beaten or not p.is_ours:
            axes.annotate(
                p.name,
                (p.memory / 2**30, p.cost / scale),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
                rotation=30,
                color=color,
            )
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    tyro.cli(draw, description=__doc__)
