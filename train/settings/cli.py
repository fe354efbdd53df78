"""Command lines: flags from a dataclass, a help page like a manual, errors that name them.

`tyro` turns arguments into the dataclass. The help page is written here, because flags stand under
headings by their purpose and not by the dataclass that holds them.
"""

import contextlib
import inspect
import io
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import tyro
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from actjax._host import read_right
from train.settings.config_file import read_arguments
from train.settings.flags import Flag, flags_of, former_flag
from train.settings.messages import near_hint
from train.settings.options import ADAPTERS, FULL_WEIGHTS

T = TypeVar("T")

Headings = dict[str, tuple[str, ...]]
"""By heading: names of fields ("steps"), of fields in a field that holds a dataclass ("data.data"),
or of such a field for all that it holds ("options"). A flag stands under the first that names it.
"""

_CONFIG = Flag(
    "config",
    pathlib.Path,
    None,
    "YAML file of settings: a key for each flag, such as `batch_size: 16`, and a list for several"
    " values. Flags of the command line win over it.",
)

_LENGTHS = {"--steps", "--epochs"}
_ELSEWHERE = {
    "--lr": "--learning-rate",
    "--max-steps": "--steps",
    "--num-train-epochs": "--epochs",
    "--per-device-train-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--accumulate",
    "--max-seq-length": "--seq-len",
    "--max-length": "--seq-len",
    "--model-name-or-path": "--checkpoint",
    "--output-dir": "--out",
    "--gradient-checkpointing": "--remat",
}
"""Flags by the names that transformers and TRL give them."""


def parse(
    config: type[T],
    prog: str,
    *,
    description: str | None = None,
    args: Sequence[str] | None = None,
) -> T:
    """Returns the settings that a command line gives.

    Prints the help page and exits with 0 for `--help`. Prints an error and exits with 2 for an
    unknown flag, a value that a flag cannot have, or settings that the dataclass refuses.

    Args:
      config: a dataclass. Its `HEADINGS` order the help page. Its `choices()`, if it has them, are
        by flag the names that it takes, and a line about each, for the help page. Its `ignored()`,
        if it has them, are flags that a file of settings may have without an effect.
      prog: the command.
      description: first paragraphs of the help page; by default the docstring of `config`.
      args: the command line; by default that of the process.
    """
    read_right()
    args = list(sys.argv[1:] if args is None else args)
    if {"-h", "--help"} & set(args):
        width = None if sys.stdout.isatty() else 100
        choices = getattr(config, "choices", dict)()
        Console(width=width).print(help_page(config, prog, description, choices))
        sys.exit(0)
    flags = {flag.name: flag for flag in flags_of(config)}
    refused = io.StringIO()
    try:
        args, path = _without_config(args)
        given = _check_arguments(args, flags, prog)
        if path is not None:
            ignored = getattr(config, "ignored", frozenset)()
            in_file = read_arguments(path, flags, prog, ignored)
            if given & _LENGTHS:  # Of the run: one takes the place of the other.
                given |= _LENGTHS
            args += [x for name, joined in in_file.items() if name not in given for x in joined]
        with contextlib.redirect_stderr(refused):
            return from_arguments(config, args, prog=prog)
    except ValueError as error:
        _fail(str(error))
    except SystemExit:
        _fail(_unboxed(refused.getvalue()))


def from_arguments(config: type[T], args: Sequence[str], prog: str | None = None) -> T:
    """Returns the settings that arguments give, rare ones too, without a help page."""
    args = _plain(list(args), {flag.name: flag for flag in flags_of(config)})
    return tyro.cli(config, prog=prog, args=args, config=(tyro.conf.OmitArgPrefixes,))


def _unboxed(text: str) -> str:
    """Returns the message that tyro prints in a box of several lines, as one line."""
    lines = (line.strip("│| ") for line in text.splitlines())
    joined = " ".join(line for line in lines if line.strip("╭╮╰╯─+- "))
    message = joined[max(0, joined.find("Error parsing ")) :].partition(" For full helptext")[0]
    if message.startswith("Error parsing --"):
        return message
    return re.sub(r"^Error parsing [\w.]+: ", "", message)  # Messages of ours name the flag.


def _plain(args: list[str], flags: Mapping[str, Flag]) -> list[str]:
    """Returns arguments in the form that tyro takes.

    Switches of optional values get a value. A flag with several values may be given several times;
    its values are joined.
    """
    lists = {name for name, flag in flags.items() if flag.is_list}
    values: dict[str, list[str]] = {}
    plain: list[str] = []
    current: list[str] = plain
    for argument in args:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else ""
        switch = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        if name in lists:
            current = values.setdefault(name, [])
            current += [value] if equals else []
        elif switch in flags and flags[switch].is_optional:
            plain += [switch, str(switch == name)]
            current = plain
        else:
            current = plain if name else current
            current.append(argument)
    return [*plain, *(x for name, joined in values.items() for x in (name, *joined))]


def _fail(message: str) -> NoReturn:
    # A value that the message repeats may have several lines.
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _without_config(args: Sequence[str]) -> tuple[list[str], pathlib.Path | None]:
    """Returns arguments without `--config` and its value, and that value.

    Raises:
      ValueError: it is given twice, or without a value.
    """
    others: list[str] = []
    paths: list[str] = []
    rest = iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == _CONFIG.name:
            paths.append(value if equals else next(rest, ""))
        else:
            others.append(argument)
    if any(not path or path.startswith("--") for path in paths):
        raise ValueError("`--config` is empty: give it a YAML file, or leave it out.")
    if len(paths) > 1:
        raise ValueError(f"`--config` is given {len(paths)} times: write one file.")
    return others, pathlib.Path(paths[0]) if paths else None


def _hint(name: str, known: Sequence[str]) -> str:
    """Returns the flag that an unknown one may mean: by its name elsewhere, or the nearest."""
    meant = _ELSEWHERE.get(name)
    return f" Did you mean {meant}?" if meant in known else near_hint(name, known, cutoff=0.6)


def _check_arguments(args: Sequence[str], flags: Mapping[str, Flag], prog: str) -> set[str]:
    """Returns the names of the flags that are given.

    Raises:
      ValueError: an unknown flag or an unknown choice, with the nearest name.
    """
    given: set[str] = set()
    plain = {name: flag for name, flag in flags.items() if not flag.is_rare}
    switches = (name for name, flag in plain.items() if flag.has_opposite)
    known = [*plain, *(f"--no-{name.removeprefix('--')}" for name in switches)]
    for index, argument in enumerate(args):
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            continue
        name = match[1].replace("_", "-")
        value = args[index + 1] if match[2] is None and index + 1 < len(args) else match[2]
        if name not in known:
            raise ValueError(
                _of_config_file(name, value, flags)
                or former_flag(name, value)
                or f"unknown flag `{match[1]}`."
                f"{_hint(name, [*known, _CONFIG.name])} See `{prog} --help`."
            )
        flag = flags.get(name)
        if match[2] is not None and (flag is None or flag.kind is bool):
            raise ValueError(
                f"`{name}` is a switch and takes no value, got {match[2]!r}: pass `{name}`."
            )
        given.add(name if flag else name.replace("--no-", "--"))
        if flag is not None:  # Not a switch that is turned off.
            flag.check(value)
    return given


def _of_config_file(name: str, value: str | None, flags: Mapping[str, Flag]) -> str:
    """Returns how to give a setting that is no flag; "" if the name is none of a setting."""
    is_off = name not in flags
    flag = flags.get(name.replace("--no-", "--"))
    if flag is None or not flag.is_rare or (is_off and flag.kind is not bool):
        return ""
    if flag.kind is bool:
        value = "false" if is_off else "true"
    return (
        f"`{name}` is a setting of `--config` files: write `{flag.key}: {value or '...'}` into a"
        " YAML file and pass `--config FILE`."
    )


def under_headings(flags: Sequence[Flag], headings: Headings) -> dict[str, list[Flag]]:
    """Returns flags by heading.

    Raises:
      ValueError: a flag that no heading names.
    """
    left = list(flags)
    by_heading: dict[str, list[Flag]] = {}
    for heading, names in headings.items():
        by_heading[heading] = []
        for name in names:
            taken = [f for f in left if f".{name}." in f".{f.path}."]
            by_heading[heading] += taken
            left = [f for f in left if f not in taken]
    if left:
        raise ValueError(f"no heading names {', '.join(flag.path for flag in left)}.")
    return by_heading


def help_page(
    config: Any, prog: str, description: str | None, choices: Mapping[str, Mapping[str, str]]
) -> Group:
    """Returns the help page; its text wraps to the width of the terminal."""
    text = inspect.cleandoc(description or config.__doc__ or "").partition("\nRaises:")[0]
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    parts: list[Any] = [Text(f"usage: {prog} [flags]\n", style="bold")]
    parts += [Text(f"{paragraph}\n") for paragraph in paragraphs]
    every = flags_of(config)
    by_heading = under_headings([f for f in every if not f.is_rare], config.HEADINGS)
    by_heading["Common flags"].append(_CONFIG)
    for heading, flags in by_heading.items():
        if flags:
            parts += [Text(heading, style="bold"), _table(_rows(flags, choices)), Text()]
    parts.append(Text("A switch that is on is turned off by --no-NAME, for example --no-resume."))
    if rare := [f for f in every if f.is_rare]:
        heading = Text("\nIn a --config file alone", style="bold")
        parts += [heading, _table(_rows(rare, choices))]
    return Group(*parts)


def _rows(
    flags: Sequence[Flag], choices: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, Any]]:
    methods = [name for name in choices.get("--method", {}) if name in (*FULL_WEIGHTS, *ADAPTERS)]
    for flag in flags:
        if methods and not flag.methods(methods):
            continue
        yield flag.usage, Text(flag.describe(methods))
        if flag.name in choices:
            yield "", _table(choices[flag.name].items(), indent=0)


def _table(rows: Any, indent: int = 2) -> Padding:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    for name, text in rows:
        table.add_row(Text(name), text)
    return Padding(table, (0, 0, 0, indent))
