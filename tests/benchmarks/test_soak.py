"""Tests of the soak: what it draws, what it judges, and a short run of it."""

import json
import signal
import subprocess
import sys

import pytest

from benchmarks import soak


def test_kills_are_drawn_in_order_and_of_every_kind():
    kills = soak.drawn(200, steps=1000, start=5.0, seed=0)
    assert [k.step for k in kills] == sorted(k.step for k in kills)
    assert max(k.step for k in kills) < 800
    assert max(k.step for k in soak.drawn(200, 200, 5.0, seed=0)) < 100
    assert {k.moment for k in kills} == {"start", "step", "save"}
    assert {k.signal for k in kills} == {signal.SIGKILL, signal.SIGTERM}
    assert kills == soak.drawn(200, steps=1000, start=5.0, seed=0)


def test_files_that_are_left_over_or_missing_are_found(tmp_path, monkeypatch):
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    # SIGTERM saves other steps, but not another number of them.
    for root, step in ((unbroken, 180), (killed, 181)):
        for name in (f"checkpoints/{step}", "checkpoints/200", f"events.out.tfevents.{step}"):
            (root / "run" / name).mkdir(parents=True)
    monkeypatch.setattr(soak, "_last_state", lambda root: (1, {}))
    monkeypatch.setattr(soak, "_losses", lambda root: [])
    assert soak._names(unbroken) == soak._names(killed)
    assert soak.differences(unbroken, killed) == []
    for path in (killed / "run/checkpoints/190", killed / "tmp/x", unbroken / "run/loss.png"):
        path.mkdir(parents=True)
    left_over = soak._names(killed) - soak._names(unbroken)
    assert sorted(left_over) == ["run/checkpoints, 3 of them", "tmp/x"]
    assert "missing: run/loss.png" in soak.differences(unbroken, killed)


@pytest.mark.parametrize(
    ("signal", "code", "output", "well"),
    [
        ("SIGKILL", -9, "", True),
        ("SIGTERM", 0, "", True),
        ("SIGTERM", -15, "", True),
        ("SIGTERM", 0, "Traceback", False),
        ("SIGTERM", None, "", False),  # It hung.
        ("SIGTERM", -11, "", False),
        (None, 1, "", False),
    ],
)
def test_a_run_ends_as_its_signal_says(signal, code, output, well):
    life = {"signal": signal, "code": code, "output": output}
    row = {"differences": [], "leftovers": [], "kills": {"SIGKILL": 1}}
    assert (soak.faults_of(row, [life], 1) == []) is well
    assert soak.faults_of(row, [], 2) == ["1 of 2 kills met a run that was still alive"]


@pytest.mark.slow  # 70 s of processor time: five starts of the program.
def test_a_run_that_is_killed_ends_as_an_unbroken_one(tmp_path):
    results = tmp_path / "soak.json"
    flags = {"steps": 200, "kills": 3, "save-every": 20, "vocab-size": 512, "results": results}
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *arguments],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (row,) = json.loads(results.read_text())["rows"]
    assert (row["faults"], sum(row["kills"].values())) == ([], 3)
