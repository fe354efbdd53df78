"""The settings of a run, kept beside it as `settings.json`."""

import dataclasses
import json
import pathlib
from typing import Any

from train.config import RunConfig

_OF_NO_CONSEQUENCE = ("out", "resume")


def write_settings(folder: pathlib.Path, config: RunConfig) -> None:
    """Writes the settings of a run into its folder."""
    text = json.dumps(dataclasses.asdict(config), indent=2, default=str)
    (folder / "settings.json").write_text(text + "\n")


def changed_settings(folder: pathlib.Path, config: RunConfig) -> list[str]:
    """Returns what differs from the settings that were written, such as "steps: 300, now 600".

    Nothing if there are none, or they cannot be read.
    """
    try:
        before = flat(json.loads((folder / "settings.json").read_text()))
    except (OSError, ValueError):
        return []
    now = flat(json.loads(json.dumps(dataclasses.asdict(config), default=str)))
    return [
        f"{name}: {before.get(name)}, now {now.get(name)}"
        for name in {**before, **now}
        if name not in _OF_NO_CONSEQUENCE and before.get(name) != now.get(name)
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries as one, its names joined by dots."""
    joined: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            joined |= flat(value, f"{prefix}{key}.")
        else:
            joined[prefix + key] = value
    return joined
