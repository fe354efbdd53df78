"""The opening of a run: what each site stores, and the memory of a step by category."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

import actjax
from actjax._core.paths import named_leaves
from actjax.optim.states.host_states import HOST
from models import Decoder
from models.padding import count_parameters
from train.run.loss import loss_function, micro_batch_shapes, whole_batch_shapes
from train.run.recipe import Recipe, build_recipe
from train.run.sharding import moments_on_host
from train.run.step import TrainState, gradient_function, init_state
from train.settings.codecs import CODECS
from train.settings.config import OptimizerConfig
from train.settings.options import MethodOptions


def explain_step(recipe: Recipe, state: TrainState) -> actjax.Explanation:
    """Returns what is stored for the backward pass of one micro-batch, between refreshes.

    Args:
      recipe: the run.
      state: the training state, or its shapes.

    Raises:
      ValueError: a codec does not fit the activations, for example a rank above their dimension.
    """
    loss = loss_function(recipe.config, recipe.storage, recipe.config.lora)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = micro_batch_shapes(recipe.config)
    arguments = (state.model, batch, key, state.context)

    def stored_in_bases(*arguments: Any) -> jax.Array:
        return actjax.with_bases(loss, arguments[-1])(*arguments[:-1])

    try:
        if recipe.subspace is None:
            return actjax.explain(loss, *arguments)
        bases = jax.eval_shape(recipe.subspace.bases, state.optimizer)
        return actjax.explain(stored_in_bases, *arguments, bases)
    except ValueError as error:
        # An error of a codec begins with the name of its field, which a flag gave.
        field = re.match(r"`(\w+)`", str(error))
        fields = {field.name for codec in CODECS.values() for field in dataclasses.fields(codec)}
        if field is None or field[1] not in fields:
            raise
        flag = "--rank" if field[1] == "rank" else "--codec"
        raise ValueError(f"`{flag}`: {error}") from error


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step by category, as in Wei et al. (2026), Table 4.

    Attributes:
      weights: all parameters, and calibrated scales.
      gradients: gradients that exist at once; factors that several weights share count once.
      optimizer: moments, bases, counters, without those that are kept on the host.
      linear_residuals: inputs of linear operators, stored for the backward pass.
      other_residuals: everything else that is stored for the backward pass.
      workspace: further memory of the compiled program, over all devices; None if unknown.
      process: memory of the process beside all of these, on a CPU: Python, JAX, its compiler and
        the compiled program; None on other devices, whose memory it does not share.
    """

    weights: int
    gradients: int
    optimizer: int
    linear_residuals: int
    other_residuals: int
    workspace: int | None = None
    process: int | None = None

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(size or 0 for size in dataclasses.asdict(self).values())

    def with_workspace(self, temporaries: int, process: int | None = None) -> "StepMemory":
        """Returns a copy whose workspace is the rest of the compiled step's temporaries.

        Args:
          temporaries: of the compiled step, bytes.
          process: memory of the process beside the run, as the field.
        """
        known = self.gradients + self.linear_residuals + self.other_residuals
        workspace = max(0, temporaries - known)
        return dataclasses.replace(self, workspace=workspace, process=process)


def step_memory(recipe: Recipe, state: TrainState, explanation: actjax.Explanation) -> StepMemory:
    """Returns the memory of a step by category, without workspace.

    Args:
      recipe: the run.
      state: the training state, or its shapes.
      explanation: what `explain_step` returned.
    """
    return StepMemory(
        weights=tree_bytes((state.model, state.context)),
        gradients=sum(gradient_bytes(recipe, state).values()),
        optimizer=tree_bytes(state.optimizer) - bytes_on_host(recipe, state.optimizer),
        **_residual_bytes(explanation),
    )


def bytes_on_host(recipe: Recipe, optimizer: Any) -> int:
    """Returns the bytes of an optimizer state, or of its shapes, that are kept on the host."""
    if not recipe.config.optimizer.offload_states:
        return 0
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), optimizer)
    placed = jax.tree.leaves(moments_on_host(shapes))
    return tree_bytes([x for x in placed if x.sharding.memory_kind == HOST])


def _residual_bytes(explanation: actjax.Explanation) -> dict[str, int]:
    linear = sum(r.stored_bytes for r in explanation.residuals if r.operator == "linear")
    return {"linear_residuals": linear, "other_residuals": explanation.stored_bytes - linear}


def exact_memory(recipe: Recipe) -> StepMemory:
    """Returns the memory of the same step with `exact`, float32 weights and float32 moments.

    Without workspace, which only a compilation tells.
    """
    config = dataclasses.replace(
        recipe.config,
        method="exact",
        options=MethodOptions(),
        optimizer=OptimizerConfig(moment_dtype="float32"),
        in_backward=False,
        weight_dtype="float32",
        weight_rounding="nearest",
    )
    exact = build_recipe(config)
    state = jax.eval_shape(functools.partial(init_state, exact))
    return StepMemory(
        weights=tree_bytes(state.model),
        gradients=tree_bytes(state.model),
        optimizer=tree_bytes(state.optimizer),
        **_residual_bytes(explain_step(exact, state)),
    )


def gradient_bytes(recipe: Recipe, state: TrainState) -> dict[str, int]:
    """Returns, by path of the parameter, the bytes of its gradient that exist at once.

    With in-backward updates, the gradient of one layer exists at a time. A factor that the weights
    of an input group share counts for the first of them. A basis belongs to the optimizer state
    and is not counted.
    """
    config = dataclasses.replace(recipe.config, accumulate=1)
    undivided = dataclasses.replace(recipe, config=config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = whole_batch_shapes(config), key, state.context

    def gradient(state: TrainState, *arguments: Any) -> Any:
        return gradient_function(undivided, state, refresh=False)(state.model, *arguments)[1]

    grads = jax.eval_shape(gradient, state, *arguments)
    loss = loss_function(config, recipe.storage, recipe.config.lora)
    groups = actjax.input_groups(loss, state.model, *arguments)
    sizes, counted = {}, set()
    for name, g in named_leaves(grads, is_leaf=lambda x: isinstance(x, actjax.LowRank)).items():
        parts = [g]
        if isinstance(g, actjax.LowRank):
            first = g.basis_name is None and groups[name] not in counted
            parts = [g.left, g.right] if first else [g.right]
            counted.add(groups[name])
        one_layer = config.in_backward and name.startswith("layers.")
        sizes[name] = tree_bytes(parts) // (config.model_config.num_layers if one_layer else 1)
    return sizes


def print_model(console: Console, recipe: Recipe, state: TrainState) -> None:
    """Prints the model and the method, which are known before anything is traced."""
    config, model_config = recipe.config, recipe.config.model_config
    shapes = jax.eval_shape(lambda: Decoder(model_config, jax.random.key(0)))
    parameters = count_parameters(shapes, model_config)
    trained = count_parameters(state.model, model_config)
    share = (
        "" if recipe.config.lora is None else f" ({trained / 1e6:,.2f} M in adapters are trained)"
    )
    console.print(
        f"[bold]{config.title}[/bold]: {parameters / 1e6:,.1f} M parameters{share},"
        f" {model_config.num_layers} layers of {model_config.hidden_size},"
        f" method [bold]{config.method}[/bold],"
        f" {config.batch_size} x {config.seq_len} tokens per step"
    )
    published, stored = model_config.ffn_size, model_config.stored_ffn_size
    if stored != published:
        console.print(f"feed-forward width: {published}, stored as {stored} with zeros")
    console.print(f"{config.method}: {recipe.method.summary}")
    if config.trains_bfloat16:
        how = {"nearest": "to nearest", "stochastic": "stochastically"}[config.weight_rounding]
        console.print(f"weights: bfloat16, rounded {how} after each update")


def print_tables(
    console: Console, recipe: Recipe, explanation: actjax.Explanation, memory: StepMemory
) -> None:
    """Prints what each site stores, and the memory of a step by category."""
    console.print(explanation)
    compares = recipe.config.lora is None and recipe.config.method != "exact"
    console.print(memory_table(memory, exact_memory(recipe) if compares else None))


def print_host(console: Console, recipe: Recipe, state: TrainState) -> None:
    """Prints what a run takes of the memory of the host, beside that of its devices.

    Args:
      console: where to print.
      recipe: the run.
      state: the training state, or its shapes.
    """
    saved = tree_bytes(dataclasses.replace(state, frozen=None)) // jax.process_count()
    kept = bytes_on_host(recipe, state.optimizer) // jax.process_count()
    parts = [
        f"{_mib(resident_bytes())} MiB now",
        f"{_mib(saved)} more while a checkpoint is written",
    ]
    parts += [f"{_mib(kept)} of optimizer states"] if kept else []
    console.print(f"memory of the host: {', '.join(parts)}", highlight=False)


def resident_bytes() -> int:
    """Returns the memory that this process has at the moment, in bytes."""
    return psutil.Process().memory_info().rss


def memory_table(memory: StepMemory, exact: StepMemory | None = None) -> Table:
    """Returns the categories as a table, in MiB.

    Args:
      memory: of the run.
      exact: of the same run with `exact` and without workspace, to compare; None for no comparison.
    """
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("memory of a step", "total")
    table.add_column("MiB", _mib(memory.total), justify="right")
    if exact is not None:
        table.add_column("exact, float32", justify="right")
    columns = [dataclasses.asdict(x) for x in (memory, exact) if x is not None]
    for column in columns:
        del column["workspace"], column["process"]
    for name in columns[0]:
        table.add_row(name.replace("_", " "), *(_mib(column[name]) for column in columns))
    if exact is not None:
        table.add_row("without workspace", *(_mib(sum(column.values())) for column in columns))
    if memory.workspace is not None:
        table.add_row("workspace", _mib(memory.workspace))
    if memory.process is not None:
        table.add_row("Python, JAX, its compiler", _mib(memory.process))
    return table


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
