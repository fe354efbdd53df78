"""Settings from a YAML file: `--config run.yaml`.

Each key is the name of a setting, `batch_size` or `batch-size`. A value becomes the argument that
the same flag has on the command line: it is read as the flag's type and not by YAML's own rules,
which take 1e-3 for text and 2024-01-01 for a date.
"""

import os
import pathlib
import re
from collections.abc import Collection, Mapping

import yaml

from models.plain_files import read_text
from train.settings.flags import Flag, former_flag
from train.settings.messages import near_hint

_TAG = "tag:yaml.org,2002:"
_TEXT = tuple(_TAG + name for name in ("str", "int", "float", "timestamp"))
"""Tags of the values whose letters are kept."""
_SWITCHES = yaml.SafeLoader.bool_values
"""By text, such as "yes" or "off", whether a switch is on."""
_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}


def read_arguments(
    path: pathlib.Path, flags: Mapping[str, Flag], prog: str, ignored: Collection[str] = ()
) -> dict[str, list[str]]:
    """Returns the arguments of the settings in a file, by flag. `null` stands for the default.

    Args:
      path: the file.
      flags: those of the program, by name.
      prog: the command.
      ignored: further flags, of which the command is independent.

    Raises:
      ValueError: the file cannot be read or is not YAML, a key is unknown or given twice, or a
        value has the wrong type.
    """
    arguments: dict[str, list[str]] = {}
    seen: set[str] = set()
    for key, value in _entries(path):
        name = "--" + key.replace("_", "-")
        try:
            if name in seen:
                raise ValueError("it is given twice: keep one.")
            seen.add(name)
            if name in ignored and name not in flags:
                continue
            if name not in flags:
                text = value.value if isinstance(value, yaml.ScalarNode) else None
                known = [flag.key for flag in flags.values()]
                raise ValueError(
                    former_flag(name, text)
                    or f"unknown setting.{near_hint(key, known, 0.6)} See `{prog} --help`."
                )
            arguments[name] = _arguments(flags[name], value)
        except ValueError as error:
            raise ValueError(f"`--config` {path}, `{key}`: {error}") from error
    return arguments


def _entries(path: pathlib.Path) -> list[tuple[str, yaml.Node]]:
    """Returns the keys and values at the top level of a file."""
    try:
        root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"`--config` {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`--config` {path} is not YAML: {reason}.") from error
    if root is None or root.tag == _TAG + "null":  # A file of comments.
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"`--config` {path} must have a line `key: value` for each setting.")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise ValueError(
                f"`--config` {path}, line {line}: a key must be the name of a setting."
            )
    return [(key.value, value) for key, value in root.value]


def _arguments(flag: Flag, value: yaml.Node) -> list[str]:
    """Returns the arguments of a setting; none if its value stands for the default."""
    if value.tag == _TAG + "null":
        return []
    if flag.is_list:
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        texts = [_text(flag, item) for item in items]
        flag.check(texts[0] if texts else None)
        if wrong := [text for text in texts if text.startswith("--")]:
            raise ValueError(f"a value of a list cannot begin with --, got {wrong[0]!r}.")
        return [f"{flag.name}={text}" for text in texts]
    text = _text(flag, value)
    if flag.kind is bool:
        if _SWITCHES[text.lower()]:
            return [flag.name]
        return [flag.name.replace("--", "--no-", 1)] if flag.has_opposite else []
    flag.check(text)
    return [f"{flag.name}={text}"]


def _text(flag: Flag, value: yaml.Node) -> str:
    """Returns a value as it is written on a command line."""
    wanted = _WANTED.get(flag.kind, "text")
    if not isinstance(value, yaml.ScalarNode):
        got = "a list" if isinstance(value, yaml.SequenceNode) else "a mapping"
        raise ValueError(f"it must be {wanted}, got {got}.")
    text, is_text = value.value, value.tag in _TEXT
    if flag.kind is bool:
        is_text = value.tag == _TAG + "bool"
    elif flag.kind in (int, float) and is_text:
        if flag.kind is float and re.fullmatch(r"[-+]?\.(inf|nan)", text, re.IGNORECASE):
            text = text.replace(".", "")  # YAML's form.
        try:
            flag.kind(text)
        except ValueError:
            is_text = False
    if not is_text:
        hint = ": put it into quotes" if wanted == "text" else ""
        raise ValueError(f"it must be {wanted}, got {value.value}{hint}.")
    return os.path.expanduser(text) if flag.names_path else text
