"""What a run says before its first step: what will be stored, and where memory goes."""

import dataclasses
import math
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

import actjax
from models import Decoder
from train.step import (
    Recipe,
    TrainState,
    batch_shapes,
    gradient_function,
    loss_function,
    whole_batch_shapes,
)


def explain_step(recipe: Recipe, state: TrainState) -> actjax.Explanation:
    """Returns what the backward pass of one micro-batch will keep, between changes of a subspace.

    Args:
      recipe: the run.
      state: the training state, or its shapes.

    Raises:
      ValueError: a codec does not fit the activations, such as a rank above their dimension.
    """
    loss = loss_function(recipe.config, recipe.storage, recipe.lora)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = batch_shapes(recipe.config, packed=recipe.config.packed)
    arguments = (state.model, batch, key, state.context)
    if recipe.subspace is None:
        return actjax.explain(loss, *arguments)
    bases = jax.eval_shape(recipe.subspace.bases, layerwise_state(state.optimizer))

    def stored_in_bases(
        model: Any, batch: Any, key: Any, context: Any, bases: actjax.Bases
    ) -> jax.Array:
        return actjax.with_bases(loss, bases)(model, batch, key, context)

    return actjax.explain(stored_in_bases, *arguments, bases)


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step by category, as Wei et al. (2026) print them in Table 4.

    Attributes:
      weights: all parameters, and scales that were measured.
      gradients: what of them exists at once; factors that several weights share count once.
      optimizer: moments, bases, counters.
      linear_residuals: inputs of linear operators, kept for the backward pass.
      other_residuals: what else is kept for it.
      workspace: what the compiled program needs besides, over all devices; None if not known.
    """

    weights: int
    gradients: int
    optimizer: int
    linear_residuals: int
    other_residuals: int
    workspace: int | None = None

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(size or 0 for size in dataclasses.asdict(self).values())

    def with_workspace(self, temporaries: int) -> "StepMemory":
        """Returns it with what is left of the temporaries of the compiled step."""
        known = self.gradients + self.linear_residuals + self.other_residuals
        return dataclasses.replace(self, workspace=max(0, temporaries - known))


def step_memory(recipe: Recipe, state: TrainState, explanation: actjax.Explanation) -> StepMemory:
    """Returns the memory of a step by category, without workspace.

    Args:
      recipe: the run.
      state: the training state, or its shapes.
      explanation: what `explain_step` returned.
    """
    linear = sum(r.stored_bytes for r in explanation.residuals if r.operator == "linear")
    return StepMemory(
        weights=tree_bytes((state.model, state.context)),
        gradients=sum(gradient_bytes(recipe, state).values()),
        optimizer=tree_bytes(state.optimizer),
        linear_residuals=linear,
        other_residuals=explanation.stored_bytes - linear,
    )


def layerwise_state(optimizer: Any) -> Any:
    """Returns the state of the transform, whichever way it is applied."""
    in_backward = isinstance(optimizer, actjax.optim.InBackwardState)
    return optimizer.optimizer if in_backward else optimizer


def gradient_bytes(recipe: Recipe, state: TrainState) -> dict[str, int]:
    """Returns, by the path of a parameter, the bytes of its gradient that exist at once.

    Of layers whose update is in the backward pass, that is one layer's. What the weights of one
    input share counts for the first of them, a basis for none: it is the optimizer's.
    """
    config = dataclasses.replace(recipe.config, accumulate=1)
    whole = dataclasses.replace(recipe, config=config)
    inner = dataclasses.replace(state, optimizer=layerwise_state(state.optimizer))
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = whole_batch_shapes(config), key, state.context

    def gradient(state: TrainState, *arguments: Any) -> Any:
        return gradient_function(whole, state, refresh=False)(state.model, *arguments)[1]

    grads = jax.eval_shape(gradient, inner, *arguments)
    loss = loss_function(config, recipe.storage, recipe.lora)
    groups = actjax.input_groups(loss, state.model, *arguments)
    sizes, counted = {}, set()
    for path, g in jax.tree_util.tree_flatten_with_path(grads, is_leaf=_is_low_rank)[0]:
        name, parts = _name(path), [g]
        if _is_low_rank(g):
            first = g.basis_name is None and groups[name] not in counted
            parts = [g.left, g.right] if first else [g.right]
            counted.add(groups[name])
        one_layer = config.in_backward and name.startswith("layers.")
        sizes[name] = tree_bytes(parts) // (recipe.model_config.num_layers if one_layer else 1)
    return sizes


def _is_low_rank(x: Any) -> bool:
    return isinstance(x, actjax.LowRank)


def _name(path: Any) -> str:
    """Returns the name of a parameter as `actjax.input_groups` has it."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def print_opening(
    console: Console,
    recipe: Recipe,
    state: TrainState,
    explanation: actjax.Explanation,
    memory: StepMemory,
) -> None:
    """Prints what is trained, what each site stores, and the memory of a step by category."""
    config, model_config = recipe.config, recipe.model_config
    shapes = jax.eval_shape(lambda: Decoder(model_config, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    share = "" if recipe.lora is None else f" ({trained / 1e6:,.2f} M in adapters are trained)"
    console.print(
        f"[bold]{config.title}[/bold]: {parameters / 1e6:,.1f} M parameters{share},"
        f" {model_config.num_layers} layers of {model_config.hidden_size},"
        f" method [bold]{config.method}[/bold],"
        f" {config.batch_size} x {config.seq_len} tokens a step"
    )
    console.print(f"{config.method}: {recipe.method.summary}")
    console.print(explanation)
    console.print(memory_table(memory))


def memory_table(memory: StepMemory) -> Table:
    """Returns the categories as a table in MiB."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("memory of a step", "total")
    table.add_column("MiB", f"{memory.total / 2**20:,.1f}", justify="right")
    for name, size in dataclasses.asdict(memory).items():
        if size is not None:
            table.add_row(name.replace("_", " "), f"{size / 2**20:,.1f}")
    return table


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
