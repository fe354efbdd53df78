"""What a resumed run takes from its last checkpoint."""

import dataclasses
from types import SimpleNamespace

from train.begin import _restored
from train.step import TrainState


def test_a_resumed_run_continues_its_data_with_the_chosen_bits():
    state = TrainState(**{field.name: None for field in dataclasses.fields(TrainState)})
    progress = {"position": {"next": 7}, "bits": {"q": 2}}
    checkpoints = SimpleNamespace(
        latest_step=lambda: 3, restore=lambda step, like, identity: (like, progress)
    )
    positions = []
    batches = SimpleNamespace(set_state=positions.append)
    _, bits = _restored(checkpoints, batches, state, state, {})
    assert (positions, bits) == ([{"next": 7}], {"q": 2})
