"""Progress on the terminal."""

import datetime
import io
import time

import pytest
from rich.console import Console

from train.run.progress import Progress, saying, tracked

REPORT = {"validation_loss": 2.0, "perplexity": 7.389, "bits_per_byte": 0.9}


@pytest.mark.parametrize("terminal", [True, False])
def test_loss_and_evaluation_are_shown(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Progress(console, start=0, steps=10, tokens=100) as progress:
        assert progress.log(2, 3.25) > 0
        with progress.paused():
            progress.say(2, REPORT)
    text = console.file.getvalue()
    assert "3.25" in text
    assert "held-out loss 2.0000, perplexity 7.39, 0.900 bits per byte" in text
    assert "tokens/s" in text


def test_the_speed_excludes_pauses(monkeypatch):
    clock = iter([0.0, 1.0, 9.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    progress = Progress(Console(file=io.StringIO()), start=0, steps=10, tokens=100)
    with progress.paused():
        pass
    assert progress.log(4, 1.0) == pytest.approx(4 * 100 / 2.0)


def test_a_step_that_takes_long_is_due_for_a_line(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    progress = Progress(Console(file=io.StringIO()), start=0, steps=10, tokens=100)
    assert not progress.is_due(1)
    now[0] = 61.0
    assert progress.is_due(1)
    progress.log(1, 2.0)
    assert not progress.is_due(2)
    now[0] = 122.0  # Saving may take long.
    assert not progress.is_due(1)


@pytest.mark.parametrize(
    ("seconds_a_step", "expected"),
    [
        (1.0, "6 s left, ends 12:00"),
        (60.0, "6 min left, ends 12:06"),
        (3600.0, "6 h 0 min left, ends 18:00"),
        (2 * 3600.0, "12 h 0 min left, ends Tue 00:00"),
        (2 * 86400.0, "288 h 0 min left, ends Dec 12, 12:00"),
    ],
)
def test_the_time_left_is_that_of_the_steps_so_far(monkeypatch, seconds_a_step, expected):
    class Noon(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 30, 12)

    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("datetime.datetime", Noon)
    console = Console(file=io.StringIO(), width=120)
    progress = Progress(console, start=10, steps=20, tokens=100)
    now[0] = 4 * seconds_a_step
    progress.log(14, 1.0)
    assert console.file.getvalue().endswith(f", {expected}\n")


def test_the_last_step_leaves_no_time():
    console = Console(file=io.StringIO(), width=120)
    Progress(console, start=0, steps=2, tokens=100).log(2, 1.0)
    assert console.file.getvalue().endswith(" tokens/s\n")


def test_work_that_takes_long_says_so_until_it_ends(monkeypatch):
    monkeypatch.setattr("train.run.progress._SILENT", 0.01)
    console = Console(file=io.StringIO(), width=120)
    with saying(console, "making it"):
        while console.file.getvalue().count("so far") < 2:
            time.sleep(0.01)
    said = console.file.getvalue()
    assert said.startswith("making it\nmaking it: 0 s so far\n")
    time.sleep(0.05)
    assert console.file.getvalue() == said


def test_items_that_take_long_say_how_many_are_done(monkeypatch):
    monkeypatch.setattr("train.run.progress._SILENT", 0.01)
    console = Console(file=io.StringIO(), width=120)
    for item in tracked(range(3), "batches of it", console):
        while f"{item:,} of 3" not in console.file.getvalue():
            time.sleep(0.01)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "batches of it: 0 of 3, 0 s so far"
    assert lines[-1].startswith("batches of it: 2 of 3, ")


def test_work_that_is_soon_done_says_nothing_more():
    console = Console(file=io.StringIO(), width=120)
    with saying(console, "making it", first=False):
        assert list(tracked(range(3), "batches", console)) == [0, 1, 2]
    assert console.file.getvalue() == ""
