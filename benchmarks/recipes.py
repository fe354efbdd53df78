"""Memory of every file of `recipes/`, from its compiled programs, which are not run.

`python -m benchmarks.recipes` compiles the step and the evaluation of each recipe for a GPU, which
this machine need not have, from dimensions alone. The peak is the larger of the two programs with
the optimizer states beside it. It takes about 15 minutes on two cores.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import yaml

from benchmarks import command, memory, record
from benchmarks.fits import BUDGETS
from benchmarks.tables import Cells, cell, print_cells
from benchmarks.variants import check_names
from models import ModelConfig, preset
from train.planning.devices import compile_for, find_device
from train.planning.estimate import compiled_peak, least_bytes
from train.run.gpus import GIB
from train.run.loss import whole_batch_shapes
from train.run.recipe import Recipe, build_recipe
from train.run.report import explain_step, step_memory
from train.run.step import init_state, make_eval_step
from train.settings import cli
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.resolve import resolve

RECIPES = {
    path.stem: path
    for path in sorted((pathlib.Path(__file__).resolve().parents[1] / "recipes").glob("*.yaml"))
}
"""Files by the names of the recipes."""
DIMENSIONS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        ffn_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_embeddings=True,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": preset("llama3_1b"),
    "Qwen/Qwen3-0.6B": preset("qwen3_0_6b"),
    "Qwen/Qwen3-4B": preset("qwen3_4b"),
    "Qwen/Qwen3-8B": preset("qwen3_8b"),
}
"""Dimensions of the checkpoints, all of which are in bfloat16."""
_FILLED = 7 / 8
"""Share of a GPU's memory that a recipe may take. The rest is for the driver, for ECC, which some
GPUs keep in it, and for the holes between arrays."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    device: str = "h100"
    """GPU to compile for."""
    only: tuple[str, ...] = tuple(RECIPES)
    """Recipes to compile."""
    add: bool = False
    """Keep the other rows of `--results`."""
    results: pathlib.Path = record.RESULTS / "recipes.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(RECIPES))
        find_device(self.device)


def settings_of(name: str) -> dict[str, Any]:
    """Returns the settings in a recipe's file, by key."""
    return yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))


def recipe_of(name: str) -> Recipe:
    """Returns a recipe as its program reads it, with the dimensions of its model."""
    program = FinetuneConfig if "checkpoint" in settings_of(name) else PretrainConfig
    config = cli.parse(program, "benchmarks.recipes", args=["--config", str(RECIPES[name])])
    if isinstance(config, FinetuneConfig):
        return build_recipe(resolve(config, DIMENSIONS[config.checkpoint], "bfloat16"))
    return build_recipe(resolve(config, preset(config.model)))


def smallest_gpu(peak: int) -> int:
    """Returns the memory of the smallest GPU that a recipe fits, in GiB.

    Raises:
      ValueError: it fits none.
    """
    for gib in BUDGETS:
        if peak <= _FILLED * gib * GIB:
            return gib
    raise ValueError(f"{peak / GIB:.2f} GiB fit no GPU.")


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each recipe: its settings, and the bytes of its programs."""
    jax.config.update("jax_platforms", "cpu")  # The CUDA plugin would ask for a driver.
    rows = {row["recipe"]: row for row in record.rows_to_keep(config.results, config.add)}
    for name in sorted(config.only, key=lambda name: least_bytes(recipe_of(name))):
        rows[name] = _measure(name, config.device) | {"commit": record.environment()["commit"]}
        print(f"{name}: {rows[name]['peak'] / GIB:.2f} GiB", flush=True)
        # A run takes minutes: what is there stays if it ends early.
        record.write(config, [rows[key] for key in RECIPES if key in rows])
    return [rows[key] for key in RECIPES if key in rows]


def _measure(name: str, device: str) -> dict[str, Any]:
    recipe = recipe_of(name)
    state = jax.eval_shape(functools.partial(init_state, recipe))
    step = compiled_peak(recipe, device)
    with compile_for(find_device(device)):  # The stored arrays depend on its kernels.
        known = step_memory(recipe, state, explain_step(recipe, state))
    evaluate = make_eval_step(recipe)
    evaluation = memory.compiled(
        lambda trained, batch: evaluate(trained[0], batch, trained[1]),
        (state.model, state.context),
        whole_batch_shapes(recipe.config),
        device=device,
    )["peak"]
    evaluation += known.optimizer
    categories = known.with_workspace(step - known.weights - known.optimizer)
    return {
        "recipe": name,
        "settings": settings_of(name),
        "peak": max(step, evaluation),
        "step": step,
        "evaluation": evaluation,
        "categories": dataclasses.asdict(categories),
    }


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the table of the rows, in GiB."""
    gib = functools.partial(cell, spec=",.2f", unit=GIB)
    cells = []
    for row in rows:
        settings, sizes = row["settings"], row["categories"]
        stored = sizes["linear_residuals"] + sizes["other_residuals"]
        parts = f" in {n}" if (n := settings.get("accumulate", 1)) > 1 else ""
        cells.append(
            {
                "recipe": f"`{row['recipe']}`",
                "sequences": f"{settings['batch_size']} x {settings['seq_len']:,}{parts}",
                "fits, GiB": str(smallest_gpu(row["peak"])),
                "peak": gib(row["peak"]),
                "weights": gib(sizes["weights"]),
                "gradients": gib(sizes["gradients"]),
                "states": gib(sizes["optimizer"]),
                "stored": gib(stored),
                "workspace": gib(sizes["workspace"]),
                "evaluation": gib(row["evaluation"]),
            }
        )
    return cells


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print_cells(f"recipes, compiled for {config.device}; GiB", table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
