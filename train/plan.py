"""Prints the memory of a training step, and finds settings that fit: `python -m train.plan`.

The real step is compiled, for this machine or for a GPU that need not be there, and the figures are
those of the compiled program. Nothing is trained. Without `--tokenizer` and `--model-vocab-size`
the model has the vocabulary of its preset, whereas train.pretrain takes that of its tokenizer.

With `--checkpoint` and `--measure`, the error of each method's gradient is measured too, with the
weights of a checkpoint on the text of `--data`. No other settings tell what a method does to a
model that is already trained.

With `--budget`, the fastest step that fits is found, and the command that runs it is printed. Other
settings, such as `--data`, go into that command.

With `--mesh`, the step of several devices is compiled, and all figures are those of one of them:
its memory, and the bytes that it gathers, reduces and moves in a step.

The methods lora, qlora and hyc_lora are those of train.finetune, with a checkpoint or a preset.
"""

import dataclasses
import math
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import ClassVar

import jax
import tyro
from rich.console import Console

from models.checkpoints import find_checkpoint, read_dimensions
from train.planning.devices import DEVICES, HERE, check_dtype
from train.planning.estimate import Compiled, bytes_of_device, compile_plan, make_plan
from train.planning.gpus import GIB
from train.planning.measured import MeasureConfig, Measured, open_measured, table_of_errors
from train.planning.stages import METHODS, OPTIONS, stages
from train.planning.tables import chosen_flags, flags, rare_settings, size_text, table_of
from train.run.gradient_error import WHOLE
from train.run.loop import make_console
from train.run.sharding import mesh_sizes
from train.settings import cli
from train.settings.cli import Headings
from train.settings.config import AdapterConfig, DataConfig, FinetuneConfig, PretrainConfig
from train.settings.flags import flags_of
from train.settings.messages import naming_flag
from train.settings.methods import METHODS as ALL_METHODS
from train.settings.options import (
    ADAPTERS,
    FLAG_METHODS,
    FULL_WEIGHTS,
    flag_name,
    given_fields,
    used_options,
)
from train.settings.resolve import dimensions, resolve
from train.text.tokenizer_files import load_tokenizer

ALL = "all"


@dataclasses.dataclass(frozen=True)
class PlannedAdapters(AdapterConfig):
    """Adapters without the settings that the memory of a step does not depend on."""

    lora_alpha: tyro.conf.Fixed[float] = AdapterConfig.lora_alpha
    calibration_batches: tyro.conf.Fixed[int] = AdapterConfig.calibration_batches
    recalibrate_every: tyro.conf.Fixed[int] = AdapterConfig.recalibrate_every
    merge: tyro.conf.Fixed[bool] = AdapterConfig.merge


@dataclasses.dataclass(frozen=True)
class PlannedConfig(PretrainConfig):
    """A run without the settings that its step does not depend on."""

    adapter: PlannedAdapters = PlannedAdapters()
    distributed: tyro.conf.Fixed[bool] = False
    out: tyro.conf.Fixed[pathlib.Path | None] = None
    resume: tyro.conf.Fixed[bool] = False
    epochs: tyro.conf.Fixed[float | None] = None
    export: tyro.conf.Fixed[pathlib.Path | None] = None
    log_to: tyro.conf.Fixed[tuple[str, ...]] = PretrainConfig.log_to
    log_every: tyro.conf.Fixed[int] = PretrainConfig.log_every
    eval_every: tyro.conf.Fixed[int] = PretrainConfig.eval_every
    eval_batches: tyro.conf.Fixed[int] = PretrainConfig.eval_batches
    save_every: tyro.conf.Fixed[int] = PretrainConfig.save_every
    keep: tyro.conf.Fixed[int] = PretrainConfig.keep


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The settings of a plan.

    Raises:
      ValueError: an unknown device, a size that cannot be read, or a setting without effect here.
    """

    train: PlannedConfig = PlannedConfig(method=ALL, weight_dtype="bfloat16")
    """The run. Here `--method` is `all` by default, and `--weight-dtype` bfloat16."""
    device: str = HERE
    """Device to compile for."""
    budget: str = ""
    """Memory that a step may take, such as 24GiB. The search tries full-rank updates with four bits
    or more first, then fewer bits, then subspaces, the largest first."""
    measuring: MeasureConfig = MeasureConfig()
    """How the error of gradients is measured."""

    HEADINGS: ClassVar[Headings] = {
        "Common flags": (
            *("model", "checkpoint", "device", "budget"),
            *("method", "batch_size", "seq_len", "weight_dtype", "steps"),
        ),
        "Measuring": ("measuring",),
        "Adapters": ("adapter",),
        **{k: v for k, v in PretrainConfig.HEADINGS.items() if k != "Common flags"},
    }
    """Order of the help page."""

    def __post_init__(self) -> None:
        train = self.train
        check_dtype(self.device, train.compute_dtype)
        mesh_sizes(train.mesh)
        self._check_measuring()
        if self.budget:
            parse_budget(self.budget)
            self._check_searched()
        if train.options.codec and train.method == ALL:
            raise ValueError(
                "`--codec` is for one method: add `--method`, one of"
                f" {', '.join(FLAG_METHODS['codec'])}."
            )

    def _check_measuring(self) -> None:
        flags = [flag_name(name) for name in given_fields(self.measuring)]
        if flags and not self.train.checkpoint:
            raise ValueError(f"`{flags[0]}` needs trained weights: add `--checkpoint`.")
        if flags and self.train.method in ADAPTERS:
            raise ValueError(
                f"`{flags[0]}` compares gradients of all weights, and `--method"
                f" {self.train.method}` trains adapters: drop one of both."
            )
        if self.measuring.error and not self.budget:
            raise ValueError(
                f"`--error {self.measuring.error}` is for the search of `--budget`: add `--budget`,"
                " or pass `--measure` to see the error of every method."
            )
        if flags and not self.measuring.wanted:
            raise ValueError(f"`{flags[0]}` has no effect without `--measure`: add it, or drop it.")

    def _check_searched(self) -> None:
        """Raises a `ValueError` for settings that the search would overwrite or never try."""
        train = self.train
        chosen = {name for name in given_fields(train.options) if name in OPTIONS}
        chosen |= set() if train.in_backward is None else {"in_backward"}
        chosen |= {"moment_dtype"} if train.optimizer.moment_dtype != "auto" else set()
        if chosen:
            shown = ", ".join(f"`{flag_name(name)}`" for name in sorted(chosen))
            raise ValueError(f"{shown}: the search of `--budget` chooses it. Drop it.")
        if train.method not in (ALL, *METHODS):
            raise ValueError(
                f"`--method {train.method}` is not part of the search of `--budget`, which tries"
                f" {', '.join(METHODS)}: choose one of them, or drop `--budget`."
            )

    @staticmethod
    def ignored() -> set[str]:
        """Returns the flags of a run that a plan is independent of: its file can be planned."""
        of_run = {
            flag.name for config in (PretrainConfig, FinetuneConfig) for flag in flags_of(config)
        }
        return of_run - {"--loss"}  # A step of preferences takes other memory.

    @staticmethod
    def choices() -> dict[str, dict[str, str]]:
        """Returns the names that flags take, and a line about each."""
        methods = {ALL: "every method that trains all weights"}
        methods |= PretrainConfig.choices()["--method"]
        methods |= {name: ALL_METHODS[name].summary for name in ADAPTERS}
        cards = {name: f"{card.name}, {card.memory // GIB} GiB" for name, card in DEVICES.items()}
        devices = {HERE: "the devices of this machine", **cards}
        return {**PretrainConfig.choices(), "--method": methods, "--device": devices}


def main() -> None:
    """Reads the command line, and prints a table or a plan. Exits with 1 if nothing fits."""
    config = cli.parse(PlanConfig, "python -m train.plan", description=__doc__)
    try:
        fits = run(config, make_console())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if fits else 1)


def run(config: PlanConfig, console: Console) -> bool:
    """Plans with the given settings: the program behind the command line.

    Returns:
      False if a budget was given and nothing fits it.

    Raises:
      ValueError: settings that do not fit each other, an unknown model, method or device.
      OSError: a tokenizer that cannot be read.
    """
    if config.device != HERE:
        # The CUDA plugin would ask for a driver, which is not there.
        jax.config.update("jax_platforms", "cpu")
    train, checkpoint = config.train, pathlib.Path(config.train.checkpoint).expanduser()
    if train.checkpoint:
        with naming_flag("--checkpoint"):
            weights = config.measuring.wanted
            checkpoint = find_checkpoint(train.checkpoint, train.download, weights=weights)
            read_dimensions(checkpoint)  # Raises for a checkpoint that cannot be read.
    elif train.data.tokenizer is not None:
        size = load_tokenizer(train.data.tokenizer).vocab_size
        train = dataclasses.replace(train, model_vocab_size=dimensions(train, size).vocab_size)
    config = dataclasses.replace(config, train=train)
    if train.method != ALL:
        resolve(train, dimensions(train))  # Raises for flags that the method does not use.
    measured = None
    if config.measuring.wanted:
        measured = open_measured(config.measuring, train, checkpoint)
    if config.budget:
        return search(config, console, measured)
    names = FULL_WEIGHTS if train.method == ALL else (train.method,)
    rows = []
    for name in names:
        options = used_options(name, train.options)
        plan = make_plan(dataclasses.replace(train, method=name, options=options), config.device)
        rows.append(compile_plan(plan, config.device))
        line = f"{name}: {size_text(rows[-1].peak)}"
        if measured is not None:
            line += f", error {measured.errors(plan.config)[WHOLE].error:.4f}"
        console.print(line, highlight=False)
    console.print(table_of(rows, config.train, config.device))
    if measured is not None:
        _print_errors(rows, measured, console)
    return True


def _print_errors(rows: list[Compiled], measured: Measured, console: Console) -> None:
    errors = {chosen_flags(row.plan.config): measured.errors(row.plan.config) for row in rows}
    console.print(table_of_errors(errors, measured))


def search(config: PlanConfig, console: Console, measured: Measured | None = None) -> bool:
    """Prints the fastest plan within the budget, and returns whether there is one.

    Args:
      config: what to plan.
      console: where tables are printed.
      measured: what errors are measured on; None if they do not matter.
    """
    began, budget = time.time(), parse_budget(config.budget)
    methods = METHODS if config.train.method == ALL else (config.train.method,)
    tried: list[Compiled] = []
    fitting: list[Compiled] = []
    for title, configs in stages(config.train, dimensions(config.train), methods):
        for compiled in _by_speed(title, configs, config, console):
            tried.append(compiled)
            if compiled.peak > budget:
                continue
            fitting.append(compiled)
            if measured is not None:
                error = measured.errors(compiled.plan.config)[WHOLE].error
                console.print(f"    error of its gradient: {error:.4f}", highlight=False)
                if measured.config.error and not error <= measured.config.error:
                    continue
            console.print(table_of(tried, config.train, config.device))
            if measured is not None:
                _print_errors(fitting, measured, console)
            console.print(
                f"found in {time.time() - began:.0f} s; leave 0.5 GiB for the driver:\n",
                highlight=False,
            )
            command = _command(compiled.plan.config, config)
            if rare := rare_settings(compiled.plan.config):
                console.print("write this into plan.yaml:\n", *rare, "", sep="\n", highlight=False)
                command += " --config plan.yaml"
            print(command)
            return True
    if tried:
        console.print(table_of(tried, config.train, config.device))
    if measured is not None and fitting:
        _print_errors(fitting, measured, console)
        console.print(
            f"{len(fitting)} plans fit {config.budget}, and the error of none is at most"
            f" {config.measuring.error}: raise `--error` or `--budget`."
        )
        return False
    console.print(
        f"nothing fits {config.budget}: fewer tokens (`--batch-size`, `--seq-len`), or a smaller"
        " model."
    )
    return False


def _command(train: PretrainConfig, config: PlanConfig) -> str:
    """Returns the command that runs a plan."""
    if not train.checkpoint:
        return f"python -m train.pretrain {flags(train)}"
    # Without the settings that only pretraining has.
    text = {name: getattr(train.data, name) for name in ("data", "tokenizer", "text_field")}
    shared = dataclasses.replace(train, checkpoint="", model_vocab_size=0, data=DataConfig(**text))
    checkpoint = shlex.quote(train.checkpoint)
    command = f"python -m train.finetune --checkpoint {checkpoint} {flags(shared)}"
    if template := config.measuring.template:
        # The errors are of gradients in which all tokens count, as those of a completion do.
        command += f" --prompt-template '' --completion-template {shlex.quote(template)}"
    return command


def _by_speed(
    title: str, configs: list[PretrainConfig], config: PlanConfig, console: Console
) -> Iterator[Compiled]:
    """Yields the compiled plans of a stage, the fastest first, without those that cannot fit."""
    budget = parse_budget(config.budget)
    # Weights and optimizer states first: an estimate of the other parts takes a trace.
    plans = [make_plan(c, config.device) for c in configs if bytes_of_device(c) <= budget]
    devices = math.prod(mesh_sizes(config.train.mesh).values())
    possible = [plan for plan in plans if plan.memory.total / devices <= budget]
    console.print(
        f"{title}: {len(configs)} plans, {len(configs) - len(possible)} of them above"
        f" {config.budget} without workspace",
        highlight=False,
    )
    for plan in sorted(possible, key=lambda p: p.seconds):
        compiled = compile_plan(plan, config.device)
        console.print(f"  {flags(plan.config)}: {size_text(compiled.peak)}", highlight=False)
        yield compiled


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_budget(text: str) -> int:
    """Returns a number of bytes from text such as 24GiB. Without a unit, at least a MiB of bytes.

    Raises:
      ValueError: text that is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    # A bare 24 does not mean 24 bytes.
    smallest = 0 if match is not None and match[2] else 2**20 - 1
    if match is None or match[2] not in _UNITS or float(match[1]) <= smallest:
        raise ValueError(f"`--budget` must be a size such as 24GiB or 16GB, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


if __name__ == "__main__":
    main()
