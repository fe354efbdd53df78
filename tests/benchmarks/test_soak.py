"""Tests of the soak: what it draws, what it judges, and a short run of it."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.soak import verdict
from benchmarks.soak.__main__ import Config, faults
from benchmarks.soak.lives import Folders, drawn, judged


def test_kills_are_drawn_in_order_and_of_every_kind():
    kills = drawn(200, steps=1000, start=5.0, processes=2, seed=0)
    assert [k.step for k in kills] == sorted(k.step for k in kills)
    assert max(k.step for k in kills) < 800
    assert max(k.step for k in drawn(200, 200, 5.0, 1, seed=0)) < 100
    assert {k.moment for k in kills} == {"start", "step", "save"}
    assert {k.signal for k in kills} == {signal.SIGKILL, signal.SIGTERM}
    assert {k.process for k in kills} == {0, 1, None}
    assert kills == drawn(200, steps=1000, start=5.0, processes=2, seed=0)


@pytest.fixture
def folders(tmp_path):
    """The files of two equal runs, as the soak compares them."""
    pair = Folders(tmp_path / "one"), Folders(tmp_path / "other")
    for one in pair:
        (one.out / "tensorboard").mkdir(parents=True)
        (one.out / "tensorboard" / f"events.out.tfevents.{id(one)}").touch()
        (one.out / "metrics.jsonl").touch()
        one.data.mkdir()
    return pair


def test_files_left_over_are_found(folders):
    one, other = folders
    assert verdict.leftovers(one, other) == []
    (other.out / "metrics.tmp").touch()
    (other.data / ".preparing-x").mkdir()
    (other.temporary / "tmpx").touch()
    assert verdict.leftovers(one, other) == ["run/metrics.tmp", "data/.preparing-x", "tmp/tmpx"]


def test_files_that_are_missing_are_found(folders, monkeypatch):
    one, other = folders
    monkeypatch.setattr(verdict, "_last_state", lambda out: (1, {}))
    assert verdict.differences(one, other) == []
    (one.out / "loss.png").touch()
    assert verdict.differences(one, other) == ["missing: run/loss.png"]


def test_checkpoints_may_be_of_other_steps_and_not_of_another_number(folders):
    one, other = folders
    for folder, step in ((one, 180), (one, 200), (other, 181), (other, 200)):
        (folder.out / "checkpoints" / str(step) / "state").mkdir(parents=True)
    assert verdict.leftovers(one, other) == []
    (other.out / "checkpoints" / "190").mkdir()
    assert verdict.leftovers(one, other) == ["run/checkpoints, 3 of them"]


def test_memory_that_grows_is_found(folders):
    one, _ = folders
    samples = np.stack([np.linspace(100, 120, 80), np.full(80, 7)], axis=1)
    np.savetxt(one.root / "memory-0.txt", samples)
    host, device = verdict.memory(one, 1, 1000)
    assert host["growth"] > verdict.MOST_GROWTH
    assert device["growth"] == 0
    row = {
        "differences": ["state"], "leftovers": [], "memory": [host, device],
        "lives": [{"signal": "SIGTERM", "process": None, "codes": [0], "output": ["Traceback"]}],
        "kills": {"SIGKILL": 1, "SIGTERM": 1},
    }  # fmt: skip
    found = faults(row, Config(kills=3))
    assert [text.split()[0] for text in found] == ["differs:", "memory", "life", "2"]
    assert verdict._growth([host, device], "device") == "+0.0%"


@pytest.mark.parametrize(
    ("signal", "process", "codes", "well"),
    [
        ("SIGKILL", None, [-9], True),
        ("SIGTERM", None, [0], True),
        ("SIGTERM", None, [-15], True),
        ("SIGTERM", None, [-99], False),  # It hung.
        ("SIGTERM", 0, [-11], False),
        ("SIGKILL", 1, [-99, -9], True),  # The other one waits.
        ("SIGKILL", 1, [-9, -99], False),
        (None, None, [0, 1], False),
    ],
)
def test_a_life_ends_as_its_signal_says(signal, process, codes, well):
    life = {"signal": signal, "process": process, "codes": codes}
    row = {
        "differences": [], "leftovers": [], "memory": [], "lives": [life], "kills": {"SIGKILL": 1}
    }  # fmt: skip
    assert (faults(row, Config(kills=1)) == []) is well


def test_who_has_lost_a_process_may_print_a_traceback():
    assert list(judged({"process": 1, "codes": [-6, -9]})) == [1]
    assert list(judged({"process": 1, "codes": [0, 0]})) == [0, 1]
    assert list(judged({"process": None, "codes": [-9, -9]})) == [0, 1]


@pytest.mark.parametrize(("samples", "steps"), [(None, 1000), (0, 1000), (1, 1000), (80, 999)])
def test_the_memory_of_a_short_run_is_not_judged(folders, samples, steps):
    one, _ = folders
    if samples is not None:
        np.savetxt(one.root / "memory-0.txt", np.arange(2 * samples).reshape(samples, 2))
    rows = verdict.memory(one, 1, steps)
    assert [row["growth"] for row in rows] == [None, None]
    assert verdict._growth(rows, "host") == "too short"


def test_memory_that_grows_from_nothing_is_found(folders):
    one, _ = folders
    late = np.repeat([0, 1], 50)
    np.savetxt(one.root / "memory-0.txt", np.stack([late + 5, late], axis=1))
    assert verdict.memory(one, 1, 1000)[1]["growth"] == np.inf


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: name a folder"):
        Config(folder=tmp_path / "file")


@pytest.mark.slow  # 70 s of processor time: five starts of the program.
def test_a_run_that_is_killed_ends_as_an_unbroken_one(tmp_path):
    results = tmp_path / "soak.json"
    flags = {"steps": 200, "kills": 3, "save-every": 20, "processes": 1, "vocab-size": 512}
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    arguments += ["--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *arguments, "--results", str(results)],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (row,) = json.loads(results.read_text())["rows"]
    assert row["faults"] == []
    assert sum(row["kills"].values()) == 3
