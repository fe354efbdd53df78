"""The settings that `--budget` chooses for a run."""

import dataclasses
import functools
from typing import Any, TypeVar

from rich.console import Console

from models.json_files import read_object
from train.planning.devices import HERE, free_memory
from train.planning.estimate import Config
from train.planning.search import Found, search
from train.planning.tables import chosen_flags, flags, size_text, table_of
from train.settings.config import FinetuneConfig, PretrainConfig, run_folder
from train.settings.methods import METHODS
from train.settings.options import ADAPTERS, FULL_WEIGHTS, SEARCHED, flag_name, given_fields
from train.settings.sizes import AUTO, parse_budget

C = TypeVar("C", PretrainConfig, FinetuneConfig)


def budget_bytes(text: str, device: str) -> int:
    """Returns the bytes of `--budget`.

    Raises:
      ValueError: a device of this machine that does not tell what it has free.
    """
    return free_memory(device) if text == AUTO else parse_budget(text)


def methods_of(config: Config, *, adapters: bool) -> list[str]:
    """Returns the methods that a search tries: the given one, or all that are not for comparison.

    Args:
      config: the settings; the default of `--method` counts as not given.
      adapters: whether they train adapters, whose learning rates are others, or all weights.
    """
    if config.method in METHODS and config.method != type(config).method:
        return [config.method]
    names = ADAPTERS if adapters else FULL_WEIGHTS
    return [name for name in names if not METHODS[name].for_comparison]


def check_searched(config: Config) -> None:
    """Raises a `ValueError` for settings that a search would overwrite, or never try."""
    given = given_fields(config) | given_fields(config.options) | given_fields(config.optimizer)
    if chosen := [name for name in SEARCHED if name in given]:
        shown = ", ".join(f"`{flag_name(name)}`" for name in sorted(chosen))
        raise ValueError(f"{shown}: the search of `--budget` chooses it. Drop it.")
    if config.method in METHODS and METHODS[config.method].for_comparison:
        tuned = isinstance(config, FinetuneConfig)
        names = (*FULL_WEIGHTS, *(ADAPTERS if tuned else ()))
        known = [name for name in names if not METHODS[name].for_comparison]
        raise ValueError(
            f"`--method {config.method}` is not part of the search of `--budget`, which tries"
            f" {', '.join(known)}: choose one of them, or drop `--budget`."
        )


def nothing_fits(text: str, found: Found) -> str:
    """Returns a line on a budget that is too small."""
    least = "" if found.smallest is None else (
        f" the smallest plan, {chosen_flags(found.smallest.config)}, takes"
        f" {size_text(found.smallest.peak)};"
    )  # fmt: skip
    return (
        f"nothing fits {text}:{least} raise `--budget`, or take fewer tokens (`--batch-size`,"
        " `--seq-len`) or a smaller model."
    )


def settled(config: C, vocab_size: int, console: Console) -> C:
    """Returns the settings of a run: those that `--budget` chooses now, or chose when it began.

    Args:
      config: the settings as the user gave them.
      vocab_size: of the model.
      console: where to print a search.

    Raises:
      ValueError: as for `choose`; or `--budget` for a run that continues.
    """
    if config.budget and config.resume:
        raise ValueError(
            f"`--budget {config.budget}` chooses the settings of a new run, and `--resume` takes"
            f" them from the run in {run_folder(config)}: drop one of both."
        )
    if config.budget:
        return choose(config, vocab_size, console)
    return _resumed(config) if config.resume else config


def _resumed(config: C) -> C:
    """Returns settings with what `--budget` chose when the run began, unless it is given."""
    folder = run_folder(config)
    try:
        saved = read_object(folder / "settings.json")
        if not saved.get("budget"):
            return config
        options = _saved(config.options, saved["options"])
        optimizer = _saved(config.optimizer, saved["optimizer"])
        chosen = _saved(config, saved, ("budget", "method", "weight_dtype"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return config  # The checkpoint is what tells whether settings fit.
    return dataclasses.replace(chosen, options=options, optimizer=optimizer, out=folder)


def _saved(config: Any, saved: dict[str, Any], others: tuple[str, ...] = ()) -> Any:
    """Returns a dataclass with the saved values of what a search chooses, unless it is given."""
    names = [
        n for n in (*SEARCHED, *others) if hasattr(config, n) and n not in given_fields(config)
    ]
    values = {name: saved[name] for name in names}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return dataclasses.replace(config, **values | lists)


def choose(config: C, vocab_size: int, console: Console) -> C:
    """Searches the settings of a run, prints them as a table and as a command, and returns them.

    The weights are in bfloat16 unless `--weight-dtype` says otherwise.

    Args:
      config: the settings as the user gave them, with `--budget`.
      vocab_size: of the model.
      console: where to print.

    Raises:
      ValueError: a budget that nothing fits, or settings that the search would overwrite.
    """
    check_searched(config)
    if config.distributed:
        raise ValueError(
            "`--budget` is for one process: plan with `python -m train.plan --mesh`, and pass its"
            " flags with `--distributed`."
        )
    size = budget_bytes(config.budget, HERE)
    dtype = "bfloat16" if config.weight_dtype == "auto" else config.weight_dtype
    asked = dataclasses.replace(config, weight_dtype=dtype)
    is_pretraining = isinstance(asked, PretrainConfig)
    if isinstance(asked, PretrainConfig) and not asked.checkpoint:
        data = dataclasses.replace(asked.data, vocab_size=min(asked.data.vocab_size, vocab_size))
        asked = dataclasses.replace(asked, model_vocab_size=vocab_size, data=data)
    console.print(f"searching the fastest step within {size_text(size)}", style="dim")
    say = functools.partial(console.print, highlight=False, markup=False)
    methods = methods_of(config, adapters=not is_pretraining)
    found = search(asked, HERE, size, methods=methods, say=say)
    if found.best is None:
        raise ValueError(f"`--budget`: {nothing_fits(config.budget, found)}")
    console.print(table_of(found.fitting, asked, HERE))
    best = found.best.config
    changes = {name: getattr(best, name) for name in ("method", "options", "optimizer",
               "in_backward", "accumulate", "weight_dtype")}  # fmt: skip
    chosen = dataclasses.replace(config, **changes)
    program = "train.pretrain" if is_pretraining else "train.finetune"
    command = f"python -m {program} {flags(dataclasses.replace(chosen, budget=''))}"
    console.print(f"the same as: {command}", highlight=False, markup=False, soft_wrap=True)
    return chosen
