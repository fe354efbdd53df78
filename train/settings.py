"""The settings of a run, kept beside it as `settings.json`."""

import dataclasses
import json
import pathlib
from typing import Any

from train.config import RunConfig
from train.options import RENAMED

_NOT_COMPARED = ("out", "resume", "weight_dtype", "weight_rounding")
"""Settings whose change is not reported. The identity of a checkpoint covers the last two."""

_REMOVED = {"options.moments": "keep", "options.stagger": False}
"""Settings that were removed, and their values in runs that do the same now."""


def write_settings(folder: pathlib.Path, config: RunConfig) -> None:
    """Writes the settings of a run into its folder."""
    text = json.dumps(dataclasses.asdict(config), indent=2, default=str)
    (folder / "settings.json").write_text(text + "\n")


def changed_settings(folder: pathlib.Path, config: RunConfig) -> list[str]:
    """Returns what differs from the written settings, such as "steps: 300, now 600".

    Returns nothing if no settings were written or they cannot be read.
    """
    try:
        written = json.loads((folder / "settings.json").read_text())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(written, dict):
        return []
    before = flat(written)
    method = before.get("method")
    before["method"] = RENAMED.get(str(method), method)
    before = {k: v for k, v in before.items() if k not in _REMOVED or v != _REMOVED[k]}
    now = flat(json.loads(json.dumps(dataclasses.asdict(config), default=str)))
    return [
        f"{name}: {before.get(name)}, now {now.get(name)}"
        for name in {**before, **now}
        if name not in _NOT_COMPARED and before.get(name) != now.get(name)
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries as one dictionary, with names joined by dots."""
    joined: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            joined |= flat(value, f"{prefix}{key}.")
        else:
            joined[prefix + key] = value
    return joined
