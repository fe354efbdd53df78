"""JSON files of checkpoints and adapters."""

import json
import pathlib
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from models.plain_files import check_plain


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds no JSON object; the message names the file.
    """
    check_plain(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: its JSON is nested too deeply.") from error
    except ValueError as error:
        raise ValueError(f"{path}: it is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(fields).__name__}.")
    return fields


def check_fields(
    fields: Mapping[str, Any], known: Collection[str], fixed: Mapping[str, Any]
) -> None:
    """Checks that every field of a description is understood.

    A field of any other name must be null, false, zero or empty: files write features that they do
    not use so.

    Args:
      fields: content of the file.
      known: fields that are read, and fields that never change the numbers.
      fixed: fields with only one supported value, and this value; null stands for it.

    Raises:
      ValueError: a field that changes the computation, or may do so; the message names it.
    """
    for name, value in fields.items():
        if name in fixed:
            if value not in (fixed[name], None):
                raise ValueError(
                    f"`{name}` is {reprlib.repr(value)}: only {fixed[name]!r} is supported."
                )
        elif value and name not in known:
            raise ValueError(
                f"`{name}` is {reprlib.repr(value)}: this field changes the computation, or is not"
                " known to this library. Remove it only if you know that it changes no number."
            )
