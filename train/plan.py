"""Prints the memory of a training step, and finds settings that fit: `python -m train.plan`.

The real step is compiled, for this machine or for a GPU that need not be there, and the figures are
those of the compiled program. Nothing is trained. Without `--tokenizer` and `--model-vocab-size`
the model has the vocabulary of its preset, whereas train.pretrain takes that of its tokenizer.

With `--checkpoint` and `--measure`, the error of each method's gradient is measured too, with the
weights of a checkpoint on the text of `--data`. No other settings tell what a method does to a
model that is already trained.

With `--budget`, the fastest step that fits is found by prediction, and the command that runs it is
printed. Other settings, such as `--data`, go into that command. The same flag of train.pretrain and
train.finetune runs the step that is found.

With `--mesh`, the step of several devices is compiled, and all figures are those of one of them:
its memory, and the bytes that it gathers, reduces and moves in a step.

The methods lora, qlora and hyc_lora are those of train.finetune, with a checkpoint or a preset.
"""

import dataclasses
import functools
import pathlib
import shlex
import sys
import time
from typing import ClassVar

import jax
import tyro
from rich.console import Console

from models.checkpoints import find_checkpoint, read_dimensions
from train.planning.budget import budget_bytes, check_searched, methods_of, nothing_fits
from train.planning.devices import DEVICES, HERE, check_dtype
from train.planning.estimate import Compiled, Config, compile_plan
from train.planning.measured import MeasureConfig, Measured, open_measured, table_of_errors
from train.planning.search import search
from train.planning.tables import chosen_flags, flags, rare_settings, size_text, table_of
from train.run.gpus import GIB
from train.run.gradient_error import WHOLE
from train.run.program import make_console
from train.run.progress import saying
from train.run.report import resident_bytes
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

    method: str = ALL
    """Method: how activations are stored for the backward pass."""
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

    train: PlannedConfig = PlannedConfig(weight_dtype="bfloat16")
    """The run. Here `--method` is `all` by default, and `--weight-dtype` bfloat16."""
    device: str = HERE
    """Device to compile for."""
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
        if train.budget:
            check_searched(train)
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
        if self.measuring.error and not self.train.budget:
            raise ValueError(
                f"`--error {self.measuring.error}` is for the search of `--budget`: add `--budget`,"
                " or pass `--measure` to see the error of every method."
            )
        if flags and not self.measuring.wanted:
            raise ValueError(f"`{flags[0]}` has no effect without `--measure`: add it, or drop it.")

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
    if train.budget:
        return choose(config, console, measured)
    names = FULL_WEIGHTS if train.method == ALL else (train.method,)
    rows = []
    for name in names:
        options = used_options(name, train.options)
        one = dataclasses.replace(train, method=name, options=options)
        with saying(console, f"compiling {name}", first=False):
            rows.append(compile_plan(one, config.device))
        line = f"{name}: {size_text(rows[-1].peak)}"
        if languages := rows[-1].languages:
            line += f", kernels in {' and '.join(languages)}"
        if measured is not None:
            line += f", error {measured.errors(one)[WHOLE].error:.4f}"
        console.print(line, highlight=False)
    console.print(table_of(rows, config.train, config.device))
    if _shares_memory(config.device):
        console.print(f"beside the peak, a run takes {_besides(config.device)}", highlight=False)
    if measured is not None:
        _print_errors(rows, measured, console)
    return True


def _besides(device: str) -> str:
    """Returns what is in the memory of a device beside a step. This process has compiled one."""
    if _shares_memory(device):
        return f"{size_text(resident_bytes())} for Python, JAX and its compiler"
    return "0.5 GiB for the driver"


def _shares_memory(device: str) -> bool:
    """Returns whether a device is the CPU, whose memory the program has its place in too."""
    return device == HERE and jax.default_backend() == "cpu"


def _print_errors(rows: list[Compiled], measured: Measured, console: Console) -> None:
    errors = {chosen_flags(row.config): measured.errors(row.config) for row in rows}
    console.print(table_of_errors(errors, measured))


def choose(config: PlanConfig, console: Console, measured: Measured | None = None) -> bool:
    """Prints the fastest plan within the budget, and returns whether there is one.

    Args:
      config: what to plan.
      console: where tables are printed.
      measured: what errors are measured on; None if they do not matter.

    Raises:
      ValueError: settings that fit no method, or a device that does not tell its free memory.
    """
    began, train = time.time(), config.train
    refused: list[Compiled] = []

    def accept(compiled: Compiled) -> bool:
        if measured is None:
            return True
        error = measured.errors(compiled.config)[WHOLE].error
        console.print(f"    error of its gradient: {error:.4f}", highlight=False)
        if not measured.config.error or error <= measured.config.error:
            return True
        refused.append(compiled)
        return False

    found = search(
        train,
        config.device,
        budget_bytes(train.budget, config.device),
        methods=methods_of(train, adapters=False),
        say=functools.partial(console.print, highlight=False, markup=False),
        accept=accept,
    )
    if rows := [*found.fitting, *refused]:
        console.print(table_of(rows, train, config.device))
        if measured is not None:
            _print_errors(rows, measured, console)
    if found.best is None and refused:
        console.print(
            f"{len(refused)} plans fit {train.budget}, and the error of none is at most"
            f" {config.measuring.error}: raise `--error` or `--budget`."
        )
    elif found.best is None:
        console.print(nothing_fits(train.budget, found), highlight=False, markup=False)
    if found.best is None:
        return False
    console.print(
        f"found in {time.time() - began:.0f} s; leave {_besides(config.device)}:\n",
        highlight=False,
    )
    command = _command(found.best.config, config)
    if rare := rare_settings(found.best.config):
        console.print("write this into plan.yaml:\n", *rare, "", sep="\n", highlight=False)
        command += " --config plan.yaml"
    print(command)
    return True


def _command(chosen: Config, config: PlanConfig) -> str:
    """Returns the command that runs a plan."""
    assert isinstance(chosen, PretrainConfig)
    train = dataclasses.replace(chosen, budget="")
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


if __name__ == "__main__":
    main()
