"""JSON files of checkpoints and adapters."""

import json
import pathlib
from typing import Any


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds no JSON object; the message names the file.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: its JSON is nested too deeply.") from error
    except ValueError as error:
        raise ValueError(f"{path}: it is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(fields).__name__}.")
    return fields
