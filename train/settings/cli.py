"""Command lines: flags from a dataclass, a help page like a manual, errors that name them.

`tyro` turns arguments into the dataclass. The help page is written here, because flags stand under
headings by their purpose and not by the dataclass that holds them.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import pathlib
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import tyro
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from actjax._host import read_right
from train.settings.messages import near_hint
from train.settings.options import (
    ADAPTERS,
    FLAG_METHODS,
    FORMER_CHOICES,
    FORMER_FLAGS,
    FULL_WEIGHTS,
    REMOVED_FLAGS,
    default_of,
    flag_name,
)

T = TypeVar("T")

Headings = dict[str, tuple[str, ...]]
"""By heading: names of fields ("steps"), of fields in a field that holds a dataclass ("data.data"),
or of such a field for all that it holds ("options"). A flag stands under the first that names it.
"""

_NAMING = ("--model", "--data", "--checkpoint")
"""Flags that name a file or a folder, beside those whose type is a path."""
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", pathlib.Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command line.

    Attributes:
      path: names of the fields that lead to it, such as "data.data".
      kind: its type; for an optional value, the type of the value.
      default: its default; `dataclasses.MISSING` if it is required.
      help: its description.
      has_opposite: whether it is a switch with `--no-NAME` beside it.
      is_optional: whether None, which neither switch gives, is its default.
    """

    path: str
    kind: Any
    default: Any
    help: str
    has_opposite: bool = False
    is_optional: bool = False

    @property
    def name(self) -> str:
        """The flag, such as "--batch-size"."""
        return flag_name(self.path.rpartition(".")[2])

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have; none if they are not a list."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def usage(self) -> str:
        """The flag and its value, as the help page shows them."""
        if self.kind is bool:
            return self.name
        if get_origin(self.kind) is tuple:
            return f"{self.name} TEXT ..."
        return f"{self.name} {_METAVARS.get(self.kind, 'NAME' if self.choices else 'VALUE')}"

    def methods(self, known: Collection[str]) -> list[str]:
        """Returns which of the known methods use it."""
        return [m for m in FLAG_METHODS.get(self.path.rpartition(".")[2], known) if m in known]

    def describe(self, methods: Collection[str]) -> str:
        """Returns the help, the choices, the methods that the flag is for, and the default.

        Args:
          methods: those of the program.
        """
        parts = [self.help]
        if self.choices:
            parts.append(f"One of {', '.join(self.choices)}.")
        if len(self.methods(methods)) < len(methods):
            parts.append(f"For {', '.join(self.methods(methods))}.")
        if self.default is dataclasses.MISSING:
            parts.append("(required)")
        elif self.kind is bool and not self.is_optional:
            parts.append(f"(default: {'on' if self.default else 'off'})")
        elif self.default not in (None, "", ()):
            shown = " ".join(self.default) if isinstance(self.default, tuple) else self.default
            parts.append(f"(default: {shown})")
        return " ".join(parts)


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
        by flag the names that it takes, and a line about each, for the help page.
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
    _check_arguments(args, {flag.name: flag for flag in flags_of(config)}, prog)
    refused = io.StringIO()
    try:
        with contextlib.redirect_stderr(refused):
            return from_arguments(config, args, prog=prog)
    except ValueError as error:
        _fail(str(error))
    except SystemExit:
        _fail(_unboxed(refused.getvalue()))


def from_arguments(config: type[T], args: Sequence[str], prog: str | None = None) -> T:
    """Returns the settings that arguments give, without a help page."""
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
    lists = {name for name, flag in flags.items() if get_origin(flag.kind) is tuple}
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
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _check_arguments(args: Sequence[str], flags: Mapping[str, Flag], prog: str) -> None:
    """Exits with an error and the nearest name for an unknown flag or an unknown choice."""
    switches = (name for name, flag in flags.items() if flag.has_opposite)
    known = [*flags, *(f"--no-{name.removeprefix('--')}" for name in switches)]
    for index, argument in enumerate(args):
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            continue
        name = match[1].replace("_", "-")
        value = args[index + 1] if match[2] is None and index + 1 < len(args) else match[2]
        if name not in known:
            if name in FORMER_FLAGS:
                _fail(f"`{name}` is now {FORMER_FLAGS[name].format(value=value or '...')}.")
            if removed := REMOVED_FLAGS.get(name.replace("--no-", "--")):
                _fail(f"`{match[1]}` was removed: {removed}")
            hint = near_hint(name, known, cutoff=0.6)
            _fail(f"unknown flag `{match[1]}`.{hint} See `{prog} --help`.")
        flag = flags.get(name)
        if match[2] is not None and (flag is None or flag.kind is bool):
            _fail(f"`{name}` is a switch and takes no value, got {match[2]!r}: pass `{name}`.")
        if flag is None:  # A switch that is turned off.
            continue
        names_path = flag.kind is pathlib.Path or name in _NAMING
        if (value == "" and names_path) or (get_origin(flag.kind) is tuple and not value):
            _fail(f"`{name}` is empty: give it a value, or leave it out.")
        former = FORMER_CHOICES.get(name, {}).get(str(value))
        if former is not None and value not in flag.choices:
            _fail(f"`{name} {value}` was removed: {former}")
        if flag.choices and value is not None and value not in flag.choices:
            _fail(
                f"`{name}` must be one of {', '.join(flag.choices)}, got {value!r}."
                f"{near_hint(value, flag.choices)}"
            )


def flags_of(config: Any, path: str = "", default: Any = None) -> list[Flag]:
    """Returns the flags of a dataclass, and of the dataclasses in its fields.

    Args:
      config: the dataclass.
      path: of the field that holds it, followed by a dot.
      default: an instance whose values are the defaults.
    """
    hints, marked = (typing.get_type_hints(config, include_extras=e) for e in (False, True))
    texts, flags = field_texts(config), []
    for field in dataclasses.fields(config):
        markers = getattr(marked[field.name], "__metadata__", ())
        if tyro.conf.Fixed in markers:
            continue
        value = default_of(field) if default is None else getattr(default, field.name)
        kind, name = _without_none(hints[field.name]), path + field.name
        if dataclasses.is_dataclass(kind):
            flags += flags_of(kind, f"{name}.", value)
        else:
            is_optional = kind is bool and kind is not hints[field.name]
            has_opposite = kind is bool and tyro.conf.FlagCreatePairsOff not in markers
            text = texts.get(field.name, "")
            flags.append(Flag(name, kind, value, text, has_opposite, is_optional))
    return flags


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [arg for arg in get_args(kind) if arg is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


@functools.cache
def field_texts(config: type) -> dict[str, str]:
    """Returns the string after each field of a dataclass, with its line breaks removed."""
    texts: dict[str, str] = {}
    for base in reversed([c for c in config.__mro__ if dataclasses.is_dataclass(c)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


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
    for heading, flags in under_headings(flags_of(config), config.HEADINGS).items():
        if not flags:
            continue
        parts += [Text(heading, style="bold"), _table(_rows(flags, choices)), Text()]
    parts.append(Text("A switch that is on is turned off by --no-NAME, for example --no-resume."))
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
