"""What fits where: the largest model and the most tokens that a step of each way to train takes.

`python -m benchmarks.fits` prints a Markdown table. Every figure is the peak of a compiled step.
Steps are compiled for one device, whatever memory it has; other GPUs take about the same. It takes
about an hour.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import tyro

from models import Decoder
from models.presets import PRESETS
from train.planning.devices import find_device
from train.planning.estimate import compiled_peak, least_bytes
from train.planning.gpus import GIB
from train.run.recipe import Recipe, build_recipe
from train.settings.config import FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.settings.resolve import resolve

BUDGETS = (8, 12, 16, 24, 40, 80)
"""Sizes of GPUs, in GiB."""
DRIVER = GIB // 2
"""Memory that is left for the driver and its context."""
SEQ_LEN = 1024
"""Tokens of a sequence."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a step."""

_SMALL_STATES = OptimizerConfig(moment_dtype="4bit-factored")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
      title: head of a column.
      flags: the flags that choose it.
      settings: fields of `PretrainConfig`, or of `FinetuneConfig`.
      adapters: whether adapters of a checkpoint are trained.
    """

    title: str
    flags: str
    settings: dict[str, Any]
    adapters: bool = False

    def recipe(self, model: str, batch_size: int) -> Recipe:
        """Returns the recipe of a step with the dimensions of a preset."""
        sizes = {"batch_size": batch_size, "seq_len": SEQ_LEN}
        config: PretrainConfig | FinetuneConfig
        if self.adapters:
            config = FinetuneConfig(checkpoint=model, **sizes, **self.settings)
        else:
            config = PretrainConfig(model=model, **sizes, **self.settings)
        return build_recipe(resolve(config, PRESETS[model], "bfloat16"))


WAYS = (
    Way(
        "every weight",
        "--method lean_remat --moment-dtype 4bit-factored",
        {"method": "lean_remat", "optimizer": _SMALL_STATES},
    ),
    Way(
        "in a subspace of a quarter of the width",
        "--method lean_subspace --moment-dtype 4bit-factored",
        {"method": "lean_subspace", "optimizer": _SMALL_STATES},
    ),
    Way(
        "QLoRA",
        "--method qlora --remat",
        {"method": "qlora", "options": MethodOptions(remat=True)},
        adapters=True,
    ),
    Way("HyC-LoRA", "--method hyc_lora", {"method": "hyc_lora"}, adapters=True),
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits into a budget.

    Attributes:
      model: name of the largest preset; empty if none fits.
      tokens: most tokens of a step.
      peak: bytes of that step.
    """

    model: str = ""
    tokens: int = 0
    peak: int = 0


def parameters(model: str) -> int:
    """Returns the number of parameters of a preset."""
    shapes = jax.eval_shape(lambda: Decoder(PRESETS[model], jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def fits(
    device: str,
    ways: Sequence[Way] = WAYS,
    budgets: Sequence[int] = BUDGETS,
    models: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Way, list[Fit]]]:
    """Yields what fits into each budget, a way to train after the other.

    Args:
      device: what to compile for.
      ways: the ways to train.
      budgets: in GiB.
      models: presets to choose from; all by default.
      say: gets a line about each compiled step.
    """
    names = sorted(models or PRESETS, key=parameters, reverse=True)
    for way in ways:

        @functools.cache
        def peak(model: str, batch_size: int, way: Way = way) -> int:
            size = compiled_peak(way.recipe(model, batch_size), device)
            say(f"{way.title}, {model}, {batch_size} x {SEQ_LEN}: {size / GIB:.2f} GiB")
            return size

        yield way, [_fit(way, names, gib * GIB - DRIVER, peak) for gib in budgets]


def _fit(way: Way, names: Sequence[str], room: int, peak: Callable[[str, int], int]) -> Fit:
    """Returns what fits: the first of some models, with the largest batch."""
    for model in names:
        if least_bytes(way.recipe(model, 1)) > room or peak(model, 1) > room:
            continue
        # The peak grows with the batch, by about as much for each sequence.
        slope = max(1, (peak(model, 8) - peak(model, 1)) // 7)
        guess = 1 + (room - peak(model, 1)) // slope
        fitting = [n for n in _BATCHES if n <= guess]
        while peak(model, fitting[-1]) > room:
            fitting.pop()
        largest = fitting[-1]
        while largest < _BATCHES[-1] and peak(model, 2 * largest) <= room:
            largest *= 2
        return Fit(model, largest * SEQ_LEN, peak(model, largest))
    return Fit()


def markdown(found: Sequence[tuple[Way, Sequence[Fit]]], budgets: Sequence[int] = BUDGETS) -> str:
    """Returns what fits as a Markdown table, a line for each budget."""
    titles = ["GPU", *(way.title for way, _ in found)]
    lines = [_line(titles), _line("---" for _ in titles)]
    for i, gib in enumerate(budgets):
        cells = (_cell(column[i]) for _, column in found)
        lines.append(_line([f"{gib} GiB", *cells]))
    flags = "; ".join(f"{way.title}: `{way.flags}`" for way, _ in found)
    return "\n".join([*lines, "", f"{flags}."])


def _cell(fit: Fit) -> str:
    if not fit.model:
        return "-"
    return f"`{fit.model}`, {fit.tokens:,} ({fit.peak / GIB:.1f})"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile for."""

    device: str = "h100"
    """GPU, which need not be there: h100, h200, a100_80, a100_40, rtx_4090, ..."""

    def __post_init__(self) -> None:
        find_device(self.device)


def main() -> None:
    """Prints the table."""
    config = tyro.cli(Config, description=__doc__)
    jax.config.update("jax_platforms", "cpu")  # The CUDA plugin would ask for a driver.
    say = functools.partial(print, flush=True)
    print(markdown(list(fits(config.device, say=say))))


if __name__ == "__main__":
    main()
