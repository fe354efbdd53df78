"""Records: objects from files, and templates that make texts of their fields."""

import pathlib
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from train.text.tables import SUFFIXES as TABLES
from train.text.text_files import Record, files_under, records_in, suffix_of

ACCEPTED = (
    "a .jsonl file with one JSON object per line, a .json file with an array of objects or one "
    "object per line, either of them also as .gz, a .parquet or .arrow file, or a folder of such "
    "files"
)
_SUFFIXES = (".json", ".jsonl", *TABLES)
_INFORMATION = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files of a folder that `datasets` saved, beside its records."""


def read_records(data: str | pathlib.Path, flag: str) -> list[Record]:
    """Returns the records of a file, or of all such files under a folder in the order of names.

    Args:
      data: the path.
      flag: flag of the path, for messages.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: a line is not a JSON object, or there are no records.
    """
    path = pathlib.Path(data).expanduser()
    if not str(data) or not path.exists():
        raise FileNotFoundError(f"`{flag}` is '{data}': there is no such path. Give {ACCEPTED}.")
    files = [path]
    if (path / "dataset_dict.json").is_file():
        parts = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise ValueError(
            f"`{flag}` is '{data}', which has several data sets: name one of"
            f" {', '.join(f'{path}/{part}' for part in parts)}."
        )
    if path.is_dir():
        files = [file for file in files_under(path, _SUFFIXES) if file.is_file()]
        if any(suffix_of(file) == ".arrow" for file in files):
            files = [file for file in files if file.name not in _INFORMATION]
    elif suffix_of(path) not in _SUFFIXES:
        raise ValueError(f"`{flag}` is '{data}', which is not a file of records. Give {ACCEPTED}.")
    records = [record for file in files for record in records_in(file, flag)]
    if not records:
        raise ValueError(f"`{flag}` is '{data}': it has no records. Give {ACCEPTED}.")
    return records


class FieldTemplate(string.Formatter):
    r"""A Python format string over the fields of a record, in which \n is a new line.

    Attributes:
      fields: names of the fields that it needs.
    """

    def __init__(
        self,
        flag: str,
        template: str,
        aliases: Mapping[str, str],
        mark: Callable[[str], str] = str,
    ) -> None:
        """Reads the template.

        Args:
          flag: flag of the template, for messages.
          template: the format string.
          aliases: fields by the names that stand for them in the template.
          mark: marks the names of special tokens in the texts of fields.

        Raises:
          ValueError: it is not a format string, or a field in it has no name.
        """
        self._flag, self._template, self._aliases = flag, template, aliases
        self._mark = mark
        # A shell passes \n as two characters.
        escapes = {"n": "\n", "t": "\t", "\\": "\\"}
        self._format = re.sub(r"\\([nt\\])", lambda match: escapes[match[1]], template)
        try:
            names = [
                _first_name(name) for _, name, *_ in self.parse(self._format) if name is not None
            ]
            if not all(names) or any(name.isdigit() for name in names):
                raise ValueError("each {} needs the name of a field")
        except ValueError as error:
            raise ValueError(
                f"`{flag}` is {template!r}: {error}. Write {{{{ and }}}} for literal braces."
            ) from error
        self.fields = {aliases.get(name, name) for name in names}

    def fill(self, fields: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> str:
        """Returns the text of a record.

        Args:
          fields: of the record.
          texts: texts by names that come before the fields. {options} can be a text here while
            {options[0]} is a field of the record.

        Raises:
          ValueError: a field is missing, or is neither text nor a number.
        """
        try:
            return self.vformat(self._format, [texts or {}], fields)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"`{self._flag}` does not fit it ({error})") from error

    def format_field(self, value: Any, format_spec: str) -> str:
        """Returns a field as text."""
        try:
            return self._mark(super().format_field(value, format_spec))
        except ValueError as error:
            raise ValueError(f"`{self._flag}` does not fit it ({error})") from error

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns the value of a name in braces, and the name."""
        (texts,) = args
        if field_name in texts:
            return texts[field_name], field_name
        name = _first_name(field_name)
        field = self._aliases.get(name, name)
        value, used = super().get_field(field_name, (), {name: field_of(kwargs, field)})
        if not isinstance(value, str | int | float):
            path = field + field_name.removeprefix(name)
            raise ValueError(f"field '{path}' is {type(value).__name__}, not text or a number")
        return value, used


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field. Raises a ValueError if it is missing."""
    if name not in fields:
        raise ValueError(
            f"there is no field '{name}', only {quoted(fields)} (flags that end in `-field` or"
            " `-template` choose other fields)"
        )
    return fields[name]


def quoted(names: Iterable[str]) -> str:
    """Returns names in quotes, for messages."""
    return ", ".join(f"'{name}'" for name in names) or "none"


def _first_name(field_name: str) -> str:
    """Returns `a` for `a`, `a[0]` and `a.b`."""
    return re.split(r"[.\[]", field_name, maxsplit=1)[0]
