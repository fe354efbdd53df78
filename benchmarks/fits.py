"""The largest model, and the most tokens, that a step of each method fits into a GPU's memory.

`python -m benchmarks.fits` prints a Markdown table. Every figure is the peak of a compiled step.
Steps are compiled for one device, whatever memory it has; other GPUs take about the same. It takes
about an hour.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import tyro

from benchmarks.tables import Cells, markdown
from models import Decoder
from models.padding import count_parameters
from models.presets import PRESETS
from train.planning.devices import find_device
from train.planning.estimate import compiled_peak, least_bytes
from train.run.gpus import GIB
from train.run.recipe import Recipe, build_recipe
from train.settings.config import FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.options import ADAPTERS, MethodOptions
from train.settings.resolve import resolve

BUDGETS = (8, 12, 16, 24, 40, 80)
"""Sizes of GPUs, in GiB."""
DRIVER = GIB // 2
"""Memory that is left for the driver and its context."""
SEQ_LEN = 1024
"""Tokens of a sequence."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a step."""

_SMALL_STATES = {"optimizer": OptimizerConfig(moment_dtype="4bit-factored")}
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "every weight": (
        "--method lean_remat --moment-dtype 4bit-factored",
        {"method": "lean_remat", **_SMALL_STATES},
    ),
    "in a subspace of a quarter of the width": (
        "--method lean_subspace --moment-dtype 4bit-factored",
        {"method": "lean_subspace", **_SMALL_STATES},
    ),
    "QLoRA": (
        "--method qlora --remat",
        {"method": "qlora", "options": MethodOptions(remat=True)},
    ),
    "HyC-LoRA": ("--method hyc_lora", {"method": "hyc_lora"}),
}
"""By title of a column: the flags of a method, and the fields of its settings."""


def recipe_of(title: str, model: str, batch_size: int) -> Recipe:
    """Returns the recipe of a step of a column, with the dimensions of a preset."""
    fields = {"batch_size": batch_size, "seq_len": SEQ_LEN, **COLUMNS[title][1]}
    config: PretrainConfig | FinetuneConfig
    if fields["method"] in ADAPTERS:
        config = FinetuneConfig(checkpoint=model, **fields)
    else:
        config = PretrainConfig(model=model, **fields)
    return build_recipe(resolve(config, PRESETS[model], "bfloat16"))


@functools.cache
def _least_bytes(title: str, model: str) -> int:
    return least_bytes(recipe_of(title, model, 1))


def _parameters(model: str) -> int:
    shapes = jax.eval_shape(lambda: Decoder(PRESETS[model], jax.random.key(0)))
    return count_parameters(shapes, PRESETS[model])


def table(
    device: str, budgets: Sequence[int] = BUDGETS, models: Sequence[str] = tuple(PRESETS)
) -> Cells:
    """Returns a row for each budget, and prints a line about each compiled step."""
    names = sorted(models, key=_parameters, reverse=True)
    rows: Cells = [{"GPU": f"{gib} GiB"} for gib in budgets]
    for title in COLUMNS:

        @functools.cache
        def peak(model: str, batch_size: int, title: str = title) -> int:
            size = compiled_peak(recipe_of(title, model, batch_size), device)
            print(f"{title}, {model}, {batch_size} x {SEQ_LEN}: {size / GIB:.2f} GiB", flush=True)
            return size

        for row, gib in zip(rows, budgets, strict=True):
            row[title] = _largest(title, names, gib * GIB - DRIVER, peak)
    return rows


def _largest(title: str, names: Sequence[str], room: int, peak: Callable[[str, int], int]) -> str:
    """Returns the first model that fits, with its most tokens and the peak of that step."""
    for model in names:
        if _least_bytes(title, model) > room or peak(model, 1) > room:
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
        return f"`{model}`, {largest * SEQ_LEN:,} ({peak(model, largest) / GIB:.1f})"
    return "-"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    device: str = "h100"
    """GPU, which need not be there: h100, h200, a100_80, a100_40, rtx_4090, ..."""

    def __post_init__(self) -> None:
        find_device(self.device)


def main() -> None:
    """Prints the table, and the flags of its columns."""
    config = tyro.cli(Config, description=__doc__)
    jax.config.update("jax_platforms", "cpu")  # The CUDA plugin would ask for a driver.
    print(markdown(table(config.device)))
    print("; ".join(f"{title}: `{flags}`" for title, (flags, _) in COLUMNS.items()))


if __name__ == "__main__":
    main()
