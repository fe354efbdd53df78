"""Tests of benchmarks/malformed: the programs refuse what is malformed, and faults are found."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.malformed.__main__ import KINDS, PROGRAMS, Config, run_all
from benchmarks.malformed.case import Case
from benchmarks.malformed.forks import Ending
from benchmarks.malformed.judge import faults_of, message_of
from benchmarks.malformed.mutate import BYTES, mutated_json

REPOSITORY = pathlib.Path(__file__).parents[2]


def test_the_programs_refuse_malformed_flags(tmp_path):
    """Takes 11 s of processor time, most of it for the imports of a new process.

    A fork of this process would have no threads of the devices that other tests use.
    """
    results = tmp_path / "rows.json"
    flags = ["--count", "5", "--kinds", "flags", "meshes", "--no-check", "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.malformed", *flags, "--results", str(results)],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["refused"] * 5
    assert "5 malformed inputs" in done.stdout


def stumbles():
    raise KeyError("vocab_size")


def names_nothing():
    print("error: something is wrong.", file=sys.stderr)
    sys.exit(2)


def accepts():
    print("done")


def overwrites():
    pathlib.Path("text.txt").write_text("another text")
    print(f"error: `{'` `'.join(sys.argv)}` is wrong.", file=sys.stderr)
    sys.exit(2)


def never_ends():
    while True:
        pass


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (stumbles, "prints a traceback; exits with 1"),
        (names_nothing, "does not name --"),
        (accepts, "is accepted"),
        (overwrites, "changes text.txt"),
        (never_ends, "does not end in time"),
    ],
)
def test_planted_faults_are_found(program, fault, tmp_path):
    """Takes 2 s of processor time, which the program that never ends is given."""
    valid = tmp_path / "valid"
    valid.mkdir()
    (valid / "text.txt").write_text("a text")
    config = Config(count=1, kinds=("flags",), limit=1, jobs=1)
    (row,) = run_all(config, dict.fromkeys(PROGRAMS, program), tmp_path, valid)
    assert row["verdict"] == "fault"
    assert fault in "; ".join(row["faults"])


BOX = "╭─ Value error ─╮\n│ Error parsing --steps: 'a' │\n╰───────────────╯\n"


@pytest.mark.parametrize(
    ("code", "err", "faults"),
    [
        (2, "a warning\nerror: `--steps` is bad.\n", []),
        (2, BOX, []),
        (2, "error: `--steps-more` is bad.\n", ["does not name --steps"]),
        (2, "error: `--steps` is bad:\n  very bad.\n", ["the last line is not the error"]),
        (2, "", ["says nothing"]),
        (1, "error: step 1 is not finite (loss nan): stopped.\n", []),
        (1, "error: `--steps` is bad.\n", ["exits with 1"]),
        (-11, "", ["exits with -11"]),
        (None, "", ["does not end in time"]),
    ],
)
def test_what_is_a_fault(code, err, faults):
    case = Case("a number", "pretrain", ("--steps", "a"), ("--steps",))
    assert faults_of(case, Ending(code, "", err, 0.0), {}, {}) == faults


def test_a_file_that_changed_is_a_fault_unless_the_input_was_valid():
    case = Case("a text", "pretrain", (), ("--data",))
    refused = Ending(2, "", "error: `--data` is bad.\n", 0.0)
    assert faults_of(case, refused, {"a": "1"}, {"a": "2"}) == ["changes a"]
    assert faults_of(case, refused, {"a": "1"}, {"a": "1", "new": "2"}) == []
    assert faults_of(case, Ending(0, "", "", 0.0), {"a": "1"}, {}) == []


def test_the_message_is_the_last_line_or_the_last_box():
    assert message_of("a\n\nb\n") == ["b"]
    assert message_of(BOX + BOX) == BOX.splitlines()
    assert message_of("") == []


def test_changes_are_random_and_repeatable():
    data = bytes(range(256))
    for name, change in BYTES.items():
        one, same, other = (change(np.random.default_rng(seed), data) for seed in (1, 1, 2))
        assert one == same, name
        assert one != data, name
        assert one != other or name == "emptied", name
    text = json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()
    changed = {mutated_json(np.random.default_rng(seed), text) for seed in range(40)}
    assert len(changed) > 30
    assert len(KINDS) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jobs": 0}, "`--jobs` must be at least 1, got 0"),
        ({"count": 0}, "`--count` must be at least 1, got 0"),
        ({"kinds": ()}, "`--kinds` has no name: choose from 'flags'"),
        ({"kinds": ("flag",)}, "`--kinds` has 'flag': choose from 'flags'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_a_folder_to_keep_is_new(tmp_path):
    with pytest.raises(ValueError, match="exists already: name a new folder"):
        Config(keep=tmp_path)
