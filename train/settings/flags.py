"""Flags of a dataclass: names, types, defaults and descriptions."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import textwrap
import types
import typing
from collections.abc import Collection
from typing import Any, Literal, get_args, get_origin

import tyro

from train.settings.messages import near_hint
from train.settings.options import (
    FLAG_METHODS,
    FORMER_CHOICES,
    FORMER_FLAGS,
    RARE,
    REMOVED_FLAGS,
    default_of,
)

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
      is_rare: whether it is no flag, but a setting of `--config` files alone.
    """

    path: str
    kind: Any
    default: Any
    help: str
    has_opposite: bool = False
    is_optional: bool = False
    is_rare: bool = False

    @property
    def key(self) -> str:
        """Its name in a `--config` file, such as "batch_size"."""
        return self.path.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The flag, such as "--batch-size"."""
        return "--" + self.key.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def names_path(self) -> bool:
        """Whether its value names a file or a folder."""
        return self.kind is pathlib.Path or self.name in _NAMING

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have; none if they are not a list."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def usage(self) -> str:
        """The flag and its value, as the help page shows them."""
        name = self.key if self.is_rare else self.name
        if self.kind is bool:
            return name
        if self.is_list:
            return f"{name} TEXT ..."
        return f"{name} {_METAVARS.get(self.kind, 'NAME' if self.choices else 'VALUE')}"

    def methods(self, known: Collection[str]) -> list[str]:
        """Returns which of the known methods use it."""
        return [m for m in FLAG_METHODS.get(self.key, known) if m in known]

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

    def check(self, value: str | None) -> None:
        """Raises a `ValueError` for an empty value, or one that is not among the choices.

        Args:
          value: the first value; None if it is missing, which is an error of a list alone.
        """
        if (value == "" and self.names_path) or (self.is_list and not value):
            raise ValueError(f"`{self.name}` is empty: give it a value, or leave it out.")
        if not self.choices or value is None or value in self.choices:
            return
        if former := FORMER_CHOICES.get(self.name, {}).get(value):
            raise ValueError(f"`{self.name} {value}` was removed: {former}")
        raise ValueError(
            f"`{self.name}` must be one of {', '.join(self.choices)}, got {value!r}."
            f"{near_hint(value, self.choices)}"
        )


def former_flag(name: str, value: str | None) -> str:
    """Returns what to pass instead of a flag of earlier versions; "" if there was none.

    Args:
      name: such as "--bits" or "--no-rotate".
      value: its value, if it has one.
    """
    if name in FORMER_FLAGS:
        return f"`{name}` is now {FORMER_FLAGS[name].format(value=value or '...')}."
    removed = REMOVED_FLAGS.get(name.replace("--no-", "--"))
    return f"`{name}` was removed: {removed}" if removed else ""


def flags_of(config: Any, path: str = "", default: Any = None) -> list[Flag]:
    """Returns the flags of a dataclass, and of the dataclasses in its fields.

    Args:
      config: the dataclass. Its `RARE`, if it has one, replaces `train.settings.options.RARE`.
      path: of the field that holds it, followed by a dot.
      default: an instance whose values are the defaults.
    """
    hints, marked = (typing.get_type_hints(config, include_extras=e) for e in (False, True))
    rare = getattr(config, "RARE", RARE)
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
            is_rare = field.name in rare
            flags.append(Flag(name, kind, value, text, has_opposite, is_optional, is_rare))
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
