"""Boards that show metrics. Weights & Biases is a module of the test: nothing is installed."""

import json
import math
import pathlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from train.run.boards import BOARDS, check_installed
from train.run.metrics import Recorder


class FakeRun:
    """A run that keeps what it is told."""

    def __init__(self, **options) -> None:
        self.options, self.logged, self.ending = options, [], None
        self.id = options.get("id", "abc123")
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.set(values))
        self.settings, self.axes = {}, []

    def set(self, values: dict) -> None:
        self.settings = values

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.ending = exit_code


@pytest.fixture
def runs(monkeypatch):
    """The runs that were opened."""
    opened = []
    module = ModuleType("wandb")

    def init(**options):
        opened.append(FakeRun(**options))
        return opened[-1]

    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "llama-lean"
    folder.mkdir()
    (folder / "settings.json").write_text('{"steps": 5, "optimizer": {"clip": 1.0}}')
    return folder


def test_a_run_is_opened_with_its_settings_and_resumed_with_its_id(folder, runs):
    with Recorder(folder, "", log_to=("wandb",)) as recorder:
        recorder.record(1, loss=2.0)
        recorder.record(2, validation_loss=1.5, perplexity=3.0)
    with Recorder(folder, "", start=1, log_to=("wandb",)) as recorder:
        recorder.record(2, loss=1.0)
    first, second = runs
    assert first.options == {"project": "actjax", "name": "llama-lean", "dir": str(folder)}
    assert second.options == {**first.options, "id": "abc123", "resume": "allow"}
    assert first.settings == {"steps": 5, "optimizer": {"clip": 1.0}}
    assert first.axes == [("step", None), ("*", "step")]
    assert first.logged == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "validation_loss": 1.5, "perplexity": 3.0},
    ]
    assert (second.logged, second.ending) == ([{"step": 2, "loss": 1.0}], 0)
    assert json.loads((folder / "wandb.json").read_text()) == {"project": "actjax", "id": "abc123"}
    assert not (folder / "tensorboard").exists()


def test_both_boards_and_a_run_that_fails(folder, runs):
    with pytest.raises(ValueError, match="JSON"), Recorder(folder, "", log_to=BOARDS) as recorder:
        recorder.record(1, loss=math.nan)
    assert [run.ending for run in runs] == [1]
    assert list((folder / "tensorboard").glob("events*"))


def test_one_process_of_several_opens_a_run(folder, runs):
    with Recorder(folder, "", writes=False, log_to=("wandb",)) as recorder:
        recorder.record(1, loss=2.0)
    assert runs == []


def test_a_missing_package_is_told_before_a_run(monkeypatch, tmp_path):
    check_installed(BOARDS.keys() - {"wandb"})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs the package wandb: run `python -m pip install wan"):
        check_installed(["wandb"])
    # Logs of runs in a folder `wandb` are no package.
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ValueError, match="`--log-to wandb` needs the package wandb"):
        check_installed(["wandb"])


def test_a_run_that_cannot_be_opened_is_one_line(folder, runs, monkeypatch):
    (folder / "wandb.json").write_text("[]")
    with pytest.raises(ValueError, match=r"wandb\.json does not hold the id of a run: remove it"):
        Recorder(folder, "", log_to=("wandb",))
    (folder / "wandb.json").unlink()

    def fail(**_):
        raise RuntimeError("No API key.\nSee the documentation.")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(
        ValueError, match=r"cannot begin: No API key\. Log in with `wandb login`, o"
    ):
        Recorder(folder, "", log_to=("wandb",))
    assert not pathlib.Path(folder / "wandb.json").exists()
