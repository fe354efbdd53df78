"""Says what memory a training step takes, and how to make it fit: `python -m train.plan --help`.

The real step is compiled, for this machine or for a GPU that need not be there, and the figures
are those of the compiled program. Nothing is trained. With `--budget`, it looks for the fastest
step that fits and prints the command that runs it.
"""

import dataclasses
import functools
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import actjax
from models import ModelConfig, preset
from train.config import PretrainConfig
from train.devices import GIB, GPUS, HERE, compile_for, description_of, gpu
from train.flops import causal_loop_length, matmul_flops
from train.methods import METHODS
from train.report import StepMemory, explain_step, step_memory, tree_bytes
from train.step import (
    Recipe,
    TrainState,
    batch_shapes,
    init_state,
    make_recipe,
    make_refresh_step,
    make_train_step,
)

ALL = "all"
_BUS = 25e9
"""Bytes a second between host and device: 16 lanes of PCIe 4."""
_HERE = 2e11, 2e10
"""Operations and bytes a second that this machine is taken to have: only ratios matter."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What to plan."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(method=ALL, weight_dtype="bfloat16")
    )
    """The run. Here `--method` is `all` by default, and `--weight-dtype` bfloat16."""
    device: str = HERE
    """What to compile for: here, or h100, h200, a100_80, a100_40, rtx_4090, rtx_3090, l4, a10g."""
    budget: str = ""
    """Memory that a step may take, such as 24GiB. The fastest plan that fits is looked for, first
    with full-rank updates and four bits or more, then with fewer bits, then in a subspace, the
    largest first."""

    def __post_init__(self) -> None:
        if self.device != HERE:
            gpu(self.device)
        if self.budget:
            parse_bytes(self.budget)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to train, and what is known of it before it is compiled.

    Attributes:
      config: the run.
      memory: by category, without workspace.
      flops: of all products of a step.
      seconds: how long a step should take at the device's best, by operations and bytes.
    """

    config: PretrainConfig
    memory: StepMemory
    flops: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A plan, compiled.

    Attributes:
      plan: what was known before.
      peak: bytes that exist at once: of the step, or of one that changes the subspace if larger.
      temporaries: those of the step that are neither weights nor states.
    """

    plan: Plan
    peak: int
    temporaries: int


def main() -> None:
    """Reads the command line, and prints a table or a plan. Exits with 1 if nothing fits."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        config = tyro.cli(
            PlanConfig,
            prog="python -m train.plan",
            description=__doc__,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        fits = run(config, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if fits else 1)


def run(config: PlanConfig, console: Console) -> bool:
    """Does what the command line says.

    Returns:
      False if a budget was given and nothing fits it.

    Raises:
      ValueError: settings that do not fit one another, an unknown model, method or device.
    """
    if config.device != HERE:
        # The plugin would ask for a driver that is not there.
        jax.config.update("jax_platforms", "cpu")
    if config.budget:
        return search(config, console)
    names = list(METHODS) if config.train.method == ALL else [config.train.method]
    rows = []
    for name in names:
        plan = make_plan(dataclasses.replace(config.train, method=name), config.device)
        rows.append(compile_plan(plan, config.device))
        console.print(f"{name}: {rows[-1].peak / GIB:.2f} GiB", highlight=False)
    console.print(table_of(rows, config))
    return True


def search(config: PlanConfig, console: Console) -> bool:
    """Looks for the fastest plan within the budget, prints it, and returns whether there is one."""
    began = time.time()
    budget, model_config = parse_bytes(config.budget), preset(config.train.model)
    tried: list[Compiled] = []
    for title, configs in stages(config.train, model_config):
        # Weights and states alone first: what is kept besides takes a trace to know.
        near = [one for one in configs if _of_parameters(one) <= budget]
        plans = [make_plan(one, config.device) for one in near]
        possible = [p for p in plans if p.memory.total <= budget]
        console.print(
            f"{title}: {len(configs)} plans, of which {len(configs) - len(possible)} keep more than"
            f" {config.budget} whatever their workspace",
            highlight=False,
        )
        for plan in sorted(possible, key=lambda p: p.seconds):
            tried.append(compile_plan(plan, config.device))
            console.print(
                f"  {flags(plan.config)}: {tried[-1].peak / GIB:.2f} GiB", highlight=False
            )
            if tried[-1].peak <= budget:
                console.print(table_of(tried, config))
                console.print(
                    f"found in {time.time() - began:.0f} s; leave half a GiB for the driver:\n",
                    highlight=False,
                )
                print(f"python -m train.pretrain {flags(plan.config)}")
                return True
    if tried:
        console.print(table_of(tried, config))
    console.print(
        f"nothing fits {config.budget}: fewer tokens (`--batch-size`, `--seq-len`), or a smaller"
        " model."
    )
    return False


def stages(
    train: PretrainConfig, model_config: ModelConfig
) -> Iterator[tuple[str, list[PretrainConfig]]]:
    """Yields plans to choose among, by what they cost in quality."""
    names = None if train.method == ALL else {train.method}
    shares = (4, 8, 16, 32)
    levels = [
        ("full rank, four bits or more", _full_rank((16, 8, 4))),
        ("full rank, fewer bits", _full_rank((3, 2))),
        *(
            (f"in a subspace of rank d/{n}, four bits or more", _subspace(model_config, n, (8, 4)))
            for n in shares
        ),
        *(
            (f"in a subspace of rank d/{n}, two bits", _subspace(model_config, n, (2,)))
            for n in shares
        ),
    ]
    for title, choices in levels:
        configs = [
            _with(train, name, **changes) for name, changes in choices if not names or name in names
        ]
        if configs:
            yield title, list(dict.fromkeys(configs))


Choice = tuple[str, dict[str, Any]]


def _full_rank(bits: Iterable[int]) -> Iterator[Choice]:
    """Yields methods and what they are told: storage, each with every way to update."""
    storage: list[Choice] = []
    for n in bits:
        if n == 16:
            storage += [("exact", {}), ("quantized", {"bits": 16}), ("remat", {})]
            storage += [("remat", {"offload": True})]
            continue
        storage += [("quantized", {"bits": n, "sites": ("gate", "up")}), ("quantized", {"bits": n})]
        storage += [("gact", {"bits": n}), ("compressed_remat", {"bits": n})]
        storage += [("quantized", {"bits": n, "offload": True})]
    for name, changes in storage:
        yield name, changes
        yield name, {**changes, "moment_dtype": "8bit"}
        yield name, {**changes, "moment_dtype": "8bit", "in_backward": True}


def _subspace(model_config: ModelConfig, share: int, bits: Iterable[int]) -> Iterator[Choice]:
    for n in bits:
        changes = {"bits": n, "rank": max(1, model_config.hidden_size // share)}
        yield "frugal_subspace", changes
        yield "frugal_subspace", {**changes, "offload": True}


def _with(train: PretrainConfig, method: str, **changes: Any) -> PretrainConfig:
    of_optimizer = {k: changes.pop(k) for k in ("moment_dtype",) if k in changes}
    of_run = {k: changes.pop(k) for k in ("in_backward",) if k in changes}
    return dataclasses.replace(
        train,
        method=method,
        options=dataclasses.replace(train.options, **changes),
        optimizer=dataclasses.replace(train.optimizer, **of_optimizer),
        **of_run,
    )


def make_plan(config: PretrainConfig, device: str) -> Plan:
    """Returns what is known of a run without compiling it.

    Raises:
      ValueError: an unknown method, or settings that do not fit one another.
    """
    memory = _memory(_without_moment_dtype(config))
    optimizer = tree_bytes(_shapes(make_recipe(config, preset(config.model))).optimizer)
    memory = dataclasses.replace(memory, optimizer=optimizer)
    explanation, flops = _gradient(_of_gradient(config))
    coded = [r for r in explanation.residuals if r.codec not in ("", "Exact()")]
    # A code is made from its activation, and read again; the activation read, and written.
    traffic = sum(2 * r.exact_bytes + 2 * r.stored_bytes for r in coded)
    traffic += 2 * (explanation.stored_bytes - sum(r.stored_bytes for r in coded))
    traffic += 3 * memory.weights + 2 * memory.optimizer + 2 * memory.gradients
    rate, bandwidth = _HERE if device == HERE else (GPUS[device].flops, GPUS[device].bandwidth)
    bus = 2 * sum(r.stored_bytes for r in coded if r.codec.startswith("Offloaded"))
    return Plan(config, memory, flops, flops / rate + traffic / bandwidth + bus / _BUS)


def _of_parameters(config: PretrainConfig) -> int:
    """Returns the bytes of weights and states."""
    state = _shapes(make_recipe(config, preset(config.model)))
    return tree_bytes((state.model, state.optimizer))


def _without_moment_dtype(config: PretrainConfig) -> PretrainConfig:
    optimizer = dataclasses.replace(config.optimizer, moment_dtype="float32")
    return dataclasses.replace(config, optimizer=optimizer)


def _of_gradient(config: PretrainConfig) -> PretrainConfig:
    """Returns settings without those that the gradient does not depend on."""
    return dataclasses.replace(_without_moment_dtype(config), in_backward=False)


# Plans differ in few things at a time, and a trace of a model takes a second or two.


@functools.cache
def _memory(config: PretrainConfig) -> StepMemory:
    recipe = make_recipe(config, preset(config.model))
    return step_memory(recipe, _shapes(recipe), _gradient(_of_gradient(config))[0])


@functools.cache
def _gradient(config: PretrainConfig) -> tuple[actjax.Explanation, int]:
    """Returns what a step keeps for its backward pass, and the operations of its products."""
    recipe = make_recipe(config, preset(config.model))
    state, whole = _shapes(recipe), batch_shapes(dataclasses.replace(config, accumulate=1))
    length = causal_loop_length(config.seq_len)
    flops = matmul_flops(make_train_step(recipe), state, whole, loop_length=length)
    return explain_step(recipe, state), flops


def compile_plan(plan: Plan, device: str) -> Compiled:
    """Compiles the steps of a plan.

    Raises:
      ValueError: the compiler for the device is not installed.
    """
    recipe = make_recipe(plan.config, preset(plan.config.model))
    state = _shapes(recipe)
    batch = batch_shapes(dataclasses.replace(plan.config, accumulate=1))
    peak, temporaries = _peak(make_train_step(recipe), state, batch, device)
    due = recipe.due_layers(0)
    if due is not None:
        refresh = make_refresh_step(recipe)
        refresh_peak, _ = _peak(lambda s, b: refresh(s, b, due), state, batch, device)
        peak = max(peak, refresh_peak)
    return Compiled(plan, peak, temporaries)


def _shapes(recipe: Recipe) -> TrainState:
    return jax.eval_shape(functools.partial(init_state, recipe))


def _peak(step: Any, state: Any, batch: Any, device: str) -> tuple[int, int]:
    with compile_for(description_of(device)) as place:
        program = jax.jit(step, donate_argnums=0).lower(place(state), place(batch)).compile()
    stats: Any = program.memory_analysis()
    live = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return live + stats.temp_size_in_bytes, stats.temp_size_in_bytes


def table_of(rows: list[Compiled], config: PlanConfig) -> Table:
    """Returns compiled plans as a table, in GiB."""
    train = config.train
    title = (
        f"{train.model}, {train.batch_size} x {train.seq_len}, weights {train.weight_dtype},"
        f" compiled for {config.device}; GiB"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("plan")
    for name in ("peak", "weights", "gradients", "states", "residuals", "workspace", "TFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        memory = row.plan.memory.with_workspace(row.temporaries)
        residuals = memory.linear_residuals + memory.other_residuals
        sizes = (
            row.peak,
            memory.weights,
            memory.gradients,
            memory.optimizer,
            residuals,
            memory.workspace or 0,
        )
        cells = [f"{size / GIB:.2f}" for size in sizes]
        table.add_row(_choice(row.plan.config), *cells, f"{row.plan.flops / 1e12:.2f}")
    return table


def flags(config: PretrainConfig) -> str:
    """Returns the flags of `train.pretrain` that differ from its defaults."""
    return shlex.join(_flags(config, PretrainConfig()))


def _choice(config: PretrainConfig) -> str:
    """Returns the flags that a plan chose."""
    neutral = PretrainConfig()
    chosen = dataclasses.replace(
        neutral,
        method=config.method,
        options=config.options,
        in_backward=config.in_backward,
        optimizer=dataclasses.replace(
            neutral.optimizer, moment_dtype=config.optimizer.moment_dtype
        ),
    )
    found = flags(chosen) or "--method exact"
    return found.removeprefix("--method ")


def _flags(config: Any, default: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _flags(value, usual)
        elif value != usual:
            if isinstance(value, bool):
                yield flag if value else flag.replace("--", "--no-", 1)
            else:
                yield flag
                yield from map(str, value if isinstance(value, tuple) else (value,))


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_bytes(text: str) -> int:
    """Returns a number of bytes from text such as 24GiB; without a unit, from a MiB on, of bytes.

    Raises:
      ValueError: text that is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    # Who writes 24 has not bytes in mind.
    smallest = 0 if match is not None and match[2] else 2**20 - 1
    if match is None or match[2] not in _UNITS or float(match[1]) <= smallest:
        raise ValueError(f"`--budget` must be a size such as 24GiB or 16GB, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


if __name__ == "__main__":
    main()
