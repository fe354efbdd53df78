"""A resumed run continues from its last checkpoint, and checks its folder first."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from train.run.begin import _check_folder, _restored
from train.run.step import TrainState


def test_a_resumed_run_continues_its_data_with_the_chosen_bits():
    state = TrainState(**{field.name: None for field in dataclasses.fields(TrainState)})
    progress: Any = {"position": {"next": 7}, "bits": {"q": 2}}
    checkpoints = SimpleNamespace(
        latest_step=lambda: 3, restore=lambda step, like, identity: (like, progress)
    )
    positions = []
    batches = SimpleNamespace(set_state=positions.append, get_state=lambda: {"next": 0})
    _, bits = _restored(checkpoints, batches, state, state, {})
    assert (positions, bits) == ([{"next": 7}], {"q": 2})
    for damaged in (
        None,
        {"position": {"next": 7}},
        {"position": {"next": -1}, "bits": {}},
        {"position": {"next": "a"}, "bits": {}},
        {"position": {}, "bits": {}},
        {"position": {"next": 7}, "bits": {"q": 9}},
        {"position": {"next": 7}, "bits": {"q": [2]}},
    ):
        progress = damaged
        with pytest.raises(ValueError, match="the position of checkpoint 3 is damaged"):
            _restored(checkpoints, batches, state, state, {})


@pytest.mark.parametrize(
    ("name", "is_folder", "message"),
    [
        ("lock", True, "`--out`: .*lock is a folder, and a run writes a file there"),
        ("metrics.jsonl", True, "`--out`: .*metrics.jsonl is a folder"),
        ("checkpoints", False, "`--out`: .*checkpoints is a file, and a run writes a folder"),
        ("adapter", False, "`--out`: .*adapter is a file"),
        ("metrics.jsonl", False, "`--out`: .*metrics.jsonl, line 1 is not JSON, or no record"),
    ],
)
def test_what_a_run_could_not_write_or_read_is_found_first(name, is_folder, message, tmp_path):
    if is_folder:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"step": "one"}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=message):
        _check_folder(tmp_path)
