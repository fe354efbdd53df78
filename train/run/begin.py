"""How a run begins: its checks, its compiled step, its opening table and its state."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from rich.console import Console

from actjax.formats.packing import BITS
from models import ModelConfig, digests
from train.run import hosts
from train.run.boards import check_installed
from train.run.checkpoint import Checkpoints
from train.run.export import ADAPTER, MODEL, TOKENIZER, save_tokenizer
from train.run.lock import run_lock
from train.run.loop import Run, compile_step
from train.run.metrics import read_metrics
from train.run.program import writing_into
from train.run.progress import saying
from train.run.recipe import Recipe, build_recipe
from train.run.report import (
    explain_step,
    print_host,
    print_model,
    print_tables,
    resident_bytes,
    step_memory,
    tree_bytes,
)
from train.run.saved_settings import as_json, changed_rate, changed_settings, write_settings
from train.run.sharding import reformatted, with_sharding
from train.run.state import shardings_of_run
from train.run.step import TrainState, init_state
from train.settings.config import RunConfig
from train.settings.messages import naming_flag
from train.settings.options import flag_name
from train.settings.resolve import ResolvedConfig
from train.text.data import ValidationSet
from train.text.pairs import PairValidation
from train.text.tokenizer import Tokenizer

C = TypeVar("C", bound=RunConfig)


def begin(
    user_config: RunConfig,
    recipe: Recipe,
    mesh: Mesh,
    console: Console,
    *,
    batches: Any,
    validation: ValidationSet | PairValidation,
    summary: str,
    remarks: Sequence[str] = (),
    first_state: Callable[[TrainState], TrainState],
    frozen: Callable[[Any], Any] = lambda _: None,
    tokenizer: Tokenizer,
    fingerprint: str,
    **parts: Any,
) -> Run:
    """Returns a run at its first step or at its last checkpoint, and prints what it is.

    Args:
      user_config: the settings as the user gave them, for `settings.json`.
      recipe: what each step does.
      mesh: the devices.
      console: where to print.
      batches: the training data, at its beginning.
      validation: the held-out data.
      summary: a line about both for the user.
      remarks: further lines, about how they were read.
      first_state: from shardings to the state before the first step.
      frozen: from shardings to `TrainState.frozen`, which is in no checkpoint of a run.
      tokenizer: its tokenizer.
      fingerprint: fingerprint of its data.
      **parts: further parts of its identity, which a checkpoint must agree with.

    Raises:
      ValueError: settings that do not fit each other or the checkpoint, or another run is in the
        folder.
    """
    config = recipe.config
    parts = {
        "model": config.model_config,
        "data": fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "weight_dtype": config.weight_dtype,
        "seed": config.seed,
        "optimizer": recipe.optimizer_form,
        "calibrated": recipe.calibration_form,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        **stored_form(config.model_config),
        **parts,
    }
    identity = as_json(parts)
    shapes = jax.eval_shape(functools.partial(init_state, recipe))
    print_model(console, recipe, shapes)
    with contextlib.ExitStack() as on_error:
        compiling = on_error.enter_context(contextlib.ExitStack())
        said = "compiling a step, which takes a minute or more on a CPU"
        compiling.enter_context(saying(console, said))
        # A new run whose codecs do not fit writes nothing.
        explanation = None if config.resume else explain_step(recipe, shapes)
        hosts.check_equal(_shared_settings(user_config, identity))
        with hosts.failing_together():
            if hosts.is_main():
                check_installed(config.log_to)
                _check_folder(config.folder)
                with naming_flag("--out"):
                    on_error.enter_context(run_lock(config.folder))
        hosts.check_shared(config.folder)
        shardings = shardings_of_run(recipe, shapes, mesh)
        with naming_flag("--out"):
            for path in (config.folder, config.folder / TOKENIZER) if config.resume else ():
                digests.check(path)
            checkpoints = _open_checkpoints(config)
            state, bits = _restored(checkpoints, batches, shapes, shardings, identity)
        batches.start_prefetch()  # The first batch takes seconds, as does compiling the step.
        if bits:
            recipe = build_recipe(config, bits)
        explanation = explanation or explain_step(recipe, shapes)
        train_step = compile_step(recipe, mesh, shapes, shardings)
        memory = step_memory(recipe, shapes, explanation)
        temporaries = train_step.memory_analysis().temp_size_in_bytes * mesh.size
        process = None
        if on_cpu := mesh.devices.flat[0].platform == "cpu":
            process = resident_bytes() - (0 if state is None else tree_bytes(state))
        compiling.close()
        memory = memory.with_workspace(temporaries, process)
        print_tables(console, recipe, explanation, memory)
        if not on_cpu:
            print_host(console, recipe, shapes)
        for warning in config.warnings:
            console.print(f"[bold yellow]warning[/bold yellow]: {warning}")
        for line in (summary, *remarks):
            console.print(line, markup=False, highlight=False, emoji=False)
        if state is None:
            with saying(console, "making the weights and the states of the optimizer"):
                state = first_state(shardings)
        else:
            with saying(console, "reading the checkpoint", first=False):
                state = dataclasses.replace(state, frozen=frozen(shardings.frozen))
            console.print(f"resuming from step {int(state.step)} in {config.folder}")
            if changed := changed_settings(config.folder, user_config):
                text = "; ".join(changed)
                console.print(f"[yellow]with other settings than before[/yellow]: {text}")
            if rate := changed_rate(config.folder, config, int(state.step)):
                console.print(f"[bold yellow]warning[/bold yellow]: {rate}")
        state = reformatted(state)
        with writing_into(config.folder):
            if hosts.is_main() and int(state.step) < config.steps:
                write_settings(config.folder, user_config)
            save_tokenizer(tokenizer, config.folder, is_new=int(state.step) == 0)
        lock = on_error.pop_all()
    return Run(recipe, mesh, train_step, state, batches, validation, checkpoints, lock, identity)


def stored_form(model: ModelConfig) -> dict[str, int]:
    """Returns the width of feed-forward weights with their padding, if they have any.

    It is a part of the identity of a run: earlier versions stored weights without padding.
    """
    stored = model.stored_ffn_size
    return {} if stored == model.ffn_size else {"stored_ffn_size": stored}


def in_epochs(user_config: C, config: ResolvedConfig, rows: Callable[[float], float]) -> C:
    """Returns settings whose number of steps follows from `--epochs`, if that is given.

    Args:
      user_config: the settings as the user gave them.
      config: the resolved settings.
      rows: from epochs to the number of rows in them.

    Raises:
      ValueError: `--steps` is given too.
    """
    if user_config.epochs is None:
        return user_config
    if user_config.steps != type(user_config).steps:
        raise ValueError("`--epochs` and `--steps` exclude each other: drop one.")
    steps = math.ceil(rows(user_config.epochs) / config.batch_size)
    return dataclasses.replace(user_config, steps=max(1, steps))


def _shared_settings(user_config: RunConfig, identity: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that several processes of a run must have in common, by name.

    Paths may differ between hosts. Their contents must not: hashes of them are in the identity.
    """
    settings = flatten_dict(dataclasses.asdict(user_config), sep=".")
    flags = {
        f"`{flag_name(name.rpartition('.')[2])}`": x
        for name, x in settings.items()
        if name == "out" or not (isinstance(x, pathlib.PurePath) or name in _PATHS)
    }
    parts = {f"the content of `{name}`": x for name, x in identity.items()}
    versions = {"the version of JAX": jax.__version__, "the source code": hosts.code_digest()}
    return {**flags, **parts, **versions}


_PATHS = ("checkpoint", "data.data", "data.validation")
"""Settings that name files, beside those of the type of a path."""


def _check_folder(folder: pathlib.Path) -> None:
    """Makes the folder of a run. Raises a `ValueError` if a run could not use it."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`--out` {str(folder)!a} has letters that this locale does not have: set"
            " LC_ALL=C.UTF-8, or give another path."
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`--out` {folder} cannot be made a folder: {error}. Give another path."
        ) from error
    with naming_flag("--out"):
        # A run could not write or read these.
        for name in ("lock", "metrics.jsonl", "settings.json", "loss.png"):
            if (folder / name).is_dir():
                raise ValueError(f"{folder / name} is a folder, and a run writes a file there.")
        for name in ("checkpoints", "tensorboard", ADAPTER, MODEL, TOKENIZER):
            if (folder / name).exists() and not (folder / name).is_dir():
                raise ValueError(f"{folder / name} is a file, and a run writes a folder there.")
        read_metrics(folder / "metrics.jsonl")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{folder} cannot be written: permission denied.")


def _check_not_foreign(folder: pathlib.Path) -> None:
    """Raises a `ValueError` if a new run would replace a folder that it did not write."""
    # A run that ended before its first checkpoint leaves its tokenizer and its settings.
    names = [MODEL, ADAPTER, *([] if (folder / "settings.json").exists() else [TOKENIZER])]
    for name in names:
        if (folder / name).is_dir() and any((folder / name).iterdir()):
            raise ValueError(
                f"`--out` {folder} has a folder '{name}' and no checkpoint of a run, which would"
                " replace that folder: pass another `--out`."
            )


def _open_checkpoints(config: ResolvedConfig) -> Checkpoints:
    checkpoints = Checkpoints(config.folder / "checkpoints", config.keep)
    latest = checkpoints.latest_step()
    if latest is None:
        _check_not_foreign(config.folder)
    if latest is not None and not config.resume:
        raise ValueError(
            f"`--out` {config.folder} holds a run at step {latest}: pass `--resume` to continue it,"
            " or another `--out`."
        )
    if latest is not None and latest > config.steps:
        raise ValueError(
            f"`--steps` {config.steps} is below the {latest} steps that the run in `--out`"
            f" {config.folder} has done: pass at least {latest}."
        )
    return checkpoints


def _restored(
    checkpoints: Checkpoints, batches: Any, shapes: Any, shardings: Any, identity: dict[str, Any]
) -> tuple[TrainState | None, dict[str, int]]:
    """Returns the state of the last checkpoint (None without one) and the bits that were chosen.

    Moves the data to the position that belongs to the state.
    """
    step = checkpoints.latest_step()
    if step is None:
        return None, {}
    saved, places = (dataclasses.replace(x, frozen=None) for x in (shapes, shardings))
    like = jax.tree.map(with_sharding, saved, places)
    state, progress = checkpoints.restore(step, like, identity)
    form = {"position": batches.get_state(), "bits": {}}
    if not _has_form(progress, form) or any(n not in BITS for n in progress["bits"].values()):
        raise ValueError(
            f"the position of checkpoint {step} is damaged ({progress}): remove its folder to"
            " resume from the one before."
        )
    batches.set_state(progress["position"])
    return state, progress["bits"]


def _has_form(tree: Any, form: Any) -> bool:
    """Returns whether plain JSON has the entries of another, with values of the same types."""
    if isinstance(form, dict):
        return isinstance(tree, dict) and all(
            name in tree and _has_form(tree[name], value) for name, value in form.items()
        )
    if isinstance(form, int):
        return type(tree) is int and tree >= 0
    return isinstance(tree, type(form))
