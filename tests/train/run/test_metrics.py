"""Files of metrics, and the picture of the loss."""

import json
import math

import pytest

from train.run.metrics import Recorder, draw_loss, read_metrics

PNG = b"\x89PNG"


def steps_in(path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl")]


def test_lines_are_json_and_the_picture_is_drawn(tmp_path):
    with Recorder(tmp_path, "a title") as recorder:
        recorder.record(1, loss=2.0, grad_norm=1.0)
        recorder.record(2, validation_loss=1.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0},
        {"step": 2, "validation_loss": 1.5},
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resumed_run_drops_lines_after_its_checkpoint(tmp_path):
    with Recorder(tmp_path, "") as recorder:
        for step in (1, 2, 3):
            recorder.record(step, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # Torn by a kill.
    with Recorder(tmp_path, "", start=2) as recorder:
        recorder.record(3, loss=0.5)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"] == 0.5


def test_a_run_that_starts_over_records_its_first_line_again(tmp_path):
    for _ in range(2):
        with Recorder(tmp_path, "title", 0) as recorder:
            recorder.record(0, validation_loss=1.0)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "validation_loss": 1.0}]


@pytest.mark.parametrize(
    "line", ["oops", "[]", "7", '{"loss": 1}', '{"step": "a"}', '{"step": 1, "loss": "a"}']
)
def test_a_line_in_the_middle_that_is_no_record_is_an_error_with_its_number(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    message = "metrics.jsonl, line 2 is not JSON, or no record of metrics"
    with pytest.raises(ValueError, match=message) as error:
        read_metrics(tmp_path / "metrics.jsonl")
    assert line in str(error.value)


def test_nan_is_refused(tmp_path):
    with Recorder(tmp_path, "") as recorder, pytest.raises(ValueError, match="JSON"):
        recorder.record(1, loss=math.nan)


def test_an_empty_picture_can_be_drawn(tmp_path):
    draw_loss([], tmp_path / "empty.png", "nothing yet")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG)
