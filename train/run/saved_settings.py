"""The settings of a run, kept beside it as `settings.json`."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from models import digests
from models.json_files import read_object
from train.run.optimizer import learning_rate_schedule
from train.settings.config import RunConfig
from train.settings.options import RENAMED
from train.settings.resolve import ResolvedConfig

_NOT_COMPARED = ("budget", "out", "resume", "download", "log_to", "weight_dtype", "weight_rounding")
"""Settings whose change is not reported. The identity of a checkpoint covers the last two."""

_REMOVED = {
    **{f"options.{name}": value for name, value in {
        "ratio": 1 / 512, "points": 0, "tolerance": float("inf"), "power_iterations": 0,
        "sketch": "gaussian", "moments": "keep", "stagger": False, "bits": 0, "sites": [],
        "group": 128, "rounding": "nearest", "same_bits": False, "levels": "auto", "rotate": False,
        "balance": True, "outlier_fraction": 0.0, "scaling": "group",
    }.items()},
    **{f"optimizer.{name}": value for name, value in {
        "final_learning_rate": 0.1, "factored_second_moment": False, "projection_rank": 0,
        "projection_gap": 200, "projection_scale": 0.0,
    }.items()},
    "data.readers": 1,
    "in_backward": False,
}  # fmt: skip
"""Settings that were removed, or have None for the default of a method now, and their values in
runs that do the same."""


def as_json(tree: Any) -> Any:
    """Returns plain JSON: dataclasses become dictionaries, and what JSON lacks becomes text."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return str(value)

    return json.loads(json.dumps(tree, default=plain))


def write_settings(folder: pathlib.Path, config: RunConfig) -> None:
    """Writes the settings of a run into its folder, whole or not at all, and their digest."""
    unfinished, settings = folder / "settings.json.part", folder / "settings.json"
    unfinished.write_text(json.dumps(as_json(config), indent=2) + "\n")
    # A kill between the two leaves settings without a digest, and none that is wrong.
    (folder / digests.FILE).unlink(missing_ok=True)
    unfinished.replace(settings)
    digests.write(folder, [settings])


def changed_rate(folder: pathlib.Path, config: ResolvedConfig, step: int) -> str:
    """Returns a line on the learning rate of the next step, if other settings change it; else "".

    Args:
      folder: folder of the run, with the settings before.
      config: the settings now.
      step: steps done.
    """
    try:
        before = read_object(folder / "settings.json")
        names = ("learning_rate", "warmup_steps")
        former = {name: before["optimizer"][name] for name in names}
        optimizer = dataclasses.replace(config.optimizer, **former)
        schedules = [
            learning_rate_schedule(optimizer, int(before["steps"])),
            learning_rate_schedule(config.optimizer, config.steps),
        ]
        former_rate, rate = (float(np.asarray(schedule(step))) for schedule in schedules)
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    if math.isclose(former_rate, rate, rel_tol=1e-3):
        return ""
    return (
        f"the learning rate of step {step + 1} is {rate:.3g}, with the former settings"
        f" {former_rate:.3g}"
    )


def changed_settings(folder: pathlib.Path, config: RunConfig) -> list[str]:
    """Returns what differs from the written settings, such as "steps: 300, now 600".

    One line says so if no settings were written or they cannot be read.
    """
    try:
        written = read_object(folder / "settings.json")
    except (OSError, ValueError):
        return ["unknown, since settings.json is missing or damaged"]
    before: dict[str, Any] = flatten_dict(written, sep=".")
    method = before.get("method")
    before["method"] = RENAMED.get(str(method), str(method)).split()[0]
    now = flatten_dict(as_json(config), sep=".")
    unset = (name for name in _REMOVED if now.get(name) is None)
    removed = {name for name in unset if before.get(name) == _REMOVED[name]}
    added = {name for name, value in now.items() if name not in before and not value}
    return [
        f"{name}: {before.get(name)}, now {now.get(name)}"
        for name in {**before, **now}
        if name not in {*_NOT_COMPARED, *removed, *added} and before.get(name) != now.get(name)
    ]
