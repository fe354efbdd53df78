"""What a run says before its first step: what will be stored, and where memory goes."""

import math
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

import actjax
from models import ModelConfig, Storage
from train.config import PretrainConfig
from train.step import TrainState, loss_function


def explain_step(config: PretrainConfig, state: TrainState, storage: Storage) -> actjax.Explanation:
    """Returns what the backward pass of one micro-batch will keep.

    Args:
      config: the run.
      state: the training state, or its shapes.
      storage: what each site stores.

    Raises:
      ValueError: a codec does not fit the activations, such as a rank above their dimension.
    """
    shape = (config.batch_size // config.accumulate, config.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(shape, "float32")}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return actjax.explain(loss_function(config, storage), state.model, batch, key)


def print_opening(
    console: Console,
    config: PretrainConfig,
    model_config: ModelConfig,
    state: TrainState,
    explanation: actjax.Explanation,
) -> None:
    """Prints what is trained, what each site stores, and the memory of a step by category."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    console.print(
        f"[bold]{config.model}[/bold]: {parameters / 1e6:,.1f} M parameters,"
        f" {model_config.num_layers} layers of {model_config.hidden_size},"
        f" method [bold]{config.method}[/bold],"
        f" {config.batch_size} x {config.seq_len} tokens a step"
    )
    console.print(explanation)
    gradient_bytes = parameters * 4 if config.accumulate > 1 else _bytes(state.model)
    rows = {
        "weights": _bytes(state.model),
        "gradients": gradient_bytes,
        "optimizer": _bytes(state.optimizer),
        "kept for the backward pass": explanation.stored_bytes,
    }
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("memory of a step, without workspace", "total")
    table.add_column("MiB", f"{sum(rows.values()) / 2**20:,.1f}", justify="right")
    for name, size in rows.items():
        table.add_row(name, f"{size / 2**20:,.1f}")
    console.print(table)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
