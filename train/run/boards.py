"""Where a run shows its metrics beside its own files: TensorBoard and Weights & Biases."""

import importlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from models.json_files import read_object

_PROJECT = "actjax"
_ID = "wandb.json"


class Board(Protocol):
    """A place that shows metrics by step."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step."""

    def close(self, failed: bool) -> None:
        """Writes what is left, and how the run ended."""


class TensorBoard:
    """Files in the folder `tensorboard` of a run."""

    def __init__(self, folder: pathlib.Path, done: int) -> None:
        path = str(folder / "tensorboard")
        self._writer = _import_tensorboard().SummaryWriter(path, purge_step=done + 1)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """Writes what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, in the project "actjax", named as the folder.

    `wandb.json` in the folder keeps its id, so that a resumed run goes on with it. Metrics have
    their own axis `step`, because a resumed run may take steps again.

    Raises:
      ValueError: the package is missing, `wandb.json` is damaged, or the run cannot be opened.
    """

    def __init__(self, folder: pathlib.Path, done: int) -> None:
        del done  # The service drops no lines.
        wandb, known = _import_wandb(), folder / _ID
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        options: dict[str, Any] = {"project": _PROJECT, "name": folder.resolve().name}
        if known.exists():
            options |= {"id": _read_id(known), "resume": "allow"}
        try:
            self._run = wandb.init(dir=str(folder), **options)
        except Exception as error:  # No login, no network, or an id of somebody else.
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise ValueError(
                f"`--log-to wandb` cannot begin: {reason}. Log in with `wandb login`, or set"
                " WANDB_MODE=offline."
            ) from error
        self._run.config.update(settings, allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        known.write_text(json.dumps({"project": _PROJECT, "id": self._run.id}) + "\n")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        """Ends the run there."""
        self._run.finish(exit_code=int(failed))


BOARDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""The values of `--log-to`."""


def open_boards(names: Iterable[str], folder: pathlib.Path, done: int) -> list[Board]:
    """Returns the boards of a run.

    Args:
      names: values of `--log-to`.
      folder: folder of the run, with its `settings.json`.
      done: last step done; -1 if there is none.

    Raises:
      ValueError: as for `WeightsAndBiases`.
    """
    return [BOARDS[name](folder, done) for name in dict.fromkeys(names)]


def check_installed(names: Iterable[str]) -> None:
    """Imports the packages of boards. Raises a `ValueError` with the command that installs one."""
    if "tensorboard" in names:
        _import_tensorboard()
    if "wandb" in names:
        _import_wandb()


def _import_tensorboard() -> Any:
    # Late: it imports PyTorch where that is installed, which takes 2 s and 200 MiB.
    return importlib.import_module("tensorboardX")


def _import_wandb() -> Any:
    try:
        wandb = importlib.import_module("wandb")  # Optional: most runs do not need it.
        missing = not hasattr(wandb, "init")  # A folder `wandb` of logs is a package for Python.
    except ImportError:
        wandb, missing = None, True
    if missing:
        raise ValueError(
            "`--log-to wandb` needs the package wandb: run `python -m pip install wandb`, or drop"
            " it."
        )
    return wandb


def _read_id(path: pathlib.Path) -> str:
    try:
        return str(read_object(path)["id"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold the id of a run: remove it to begin a new one."
        ) from error
