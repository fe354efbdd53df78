"""Tests of the command that runs all benchmarks: arguments, page, old results, regressions."""

import copy
import importlib
import json
import subprocess

import pytest
import tyro

from benchmarks import all as all_benchmarks
from benchmarks import record, regression, staleness
from benchmarks.jobs import JOBS
from benchmarks.ladder import with_time_to_loss

NAMES = [job.name for job in JOBS]


def git(folder, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@test"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with two files, and its first commit."""
    git(tmp_path, "init", "-q")
    for name in ("measured.py", "other.py"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def commit(repository, name):
    with (repository / name).open("a") as file:
        file.write("2\n")
    git(repository, "commit", "-qam", name)


def result_of(repository, dirty=""):
    return {"environment": {"commit": git(repository, "rev-parse", "--short", "HEAD") + dirty}}


def test_a_result_is_stale_once_its_code_has_changed(repository):
    result = result_of(repository)
    sources = ("measured.py",)
    assert staleness.note(result, sources, repository) == ""
    commit(repository, "other.py")
    assert staleness.note(result, sources, repository) == ""
    commit(repository, "measured.py")
    note = staleness.note(result, sources, repository)
    assert note.startswith("Stale: measured at")
    assert "one commit has changed" in note
    commit(repository, "measured.py")
    assert "2 commits have changed" in staleness.note(result, sources, repository)


def test_a_result_of_changes_without_a_commit_and_of_an_unknown_commit(repository):
    result = result_of(repository, "-dirty")
    assert staleness.note(result, ("measured.py",), repository) == ""
    (repository / "measured.py").write_text("3\n")
    assert "changes without a commit" in staleness.note(result, ("measured.py",), repository)
    unknown = {"environment": {"commit": "0123abc"}}
    assert "is not known here" in staleness.note(unknown, ("measured.py",), repository)


@pytest.mark.parametrize("job", JOBS, ids=NAMES)
def test_the_sources_of_a_job_exist_and_its_arguments_are_understood(job):
    assert [s for s in job.sources if not (staleness.ROOT / s).exists()] == []
    if job.module == "benchmarks.triton_kernels":
        pytest.importorskip("jax_triton")
    name = f"{job.module}.__main__" if job.module in PACKAGES else job.module
    config = importlib.import_module(name).Config
    for arguments in (job.quick, job.full):
        if arguments is not None:
            tyro.cli(config, args=[*arguments], config=(tyro.conf.OmitArgPrefixes,))


PACKAGES = ("benchmarks.gpu", "benchmarks.soak", "benchmarks.malformed", "benchmarks.random_arrays")


def test_the_page_has_every_committed_result_and_says_which_are_stale(monkeypatch):
    monkeypatch.setattr(all_benchmarks, "draw", lambda result, path: None)
    text = all_benchmarks.page([("Full runs", record.RESULTS)])
    for job in JOBS:
        if (record.RESULTS / f"{job.name}.json").exists():
            assert f"### {job.title}\n" in text
    monkeypatch.setattr(staleness, "note", lambda *_: "Stale: planted.")
    assert "**Stale: planted.**" in all_benchmarks.page([("Full runs", record.RESULTS)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of"),
        ({"quick": True, "full": True}, "give one of"),
        ({"quick": True, "only": ("memori",)}, "'memori'. There are: ladder"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        all_benchmarks.Config(**settings)


def test_seconds_to_the_loss_that_all_rungs_reach():
    def row(*losses):
        points = [{"step": i, "seconds": 2.0 * i, "loss": x} for i, x in enumerate(losses, 1)]
        return {"curve": points}

    rows = with_time_to_loss([row(5.0, 3.0, 2.0), row(4.0, 2.5, 2.6)])
    assert [(r["common_loss"], r["seconds_to_loss"]) for r in rows] == [(2.5, 6.0), (2.5, 4.0)]


BEFORE = {
    "environment": {"versions": {"jax": "0.10"}},
    "settings": {"model": "llama_3m"},
    "rows": [
        {"rival": "plain", "peak": 1000, "matmul_flops": 10, "forward_and_backward": 100},
        {"rival": "lean", "peak": 500, "matmul_flops": 11},
    ],
}


def compared(tmp_path, now, **flags):
    """Runs the check on a result beside its committed form."""
    git(tmp_path, "init", "-q")
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(BEFORE))
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "results")
    path.write_text(json.dumps(now))
    regression.judge(regression.Config(folder=tmp_path, **flags))


@pytest.mark.parametrize(("growth", "worse"), [(1.0, 0), (1.01, 0), (1.03, 1), (0.5, 0)])
def test_a_planted_loss_of_3_per_cent_fails(tmp_path, growth, worse, capsys):
    now = copy.deepcopy(BEFORE)
    now["rows"][1]["peak"] *= growth
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == worse
    assert f"5 values compared with HEAD, {worse} worse" in capsys.readouterr().out


def test_a_value_that_became_nan_fails(tmp_path):
    now = copy.deepcopy(BEFORE)
    now["rows"][1]["peak"] = "nan"  # As `record.write` has it: JSON has no NaN.
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == 1


def test_other_settings_are_not_compared(tmp_path, capsys):
    now = copy.deepcopy(BEFORE) | {"settings": {"model": "llama_9m"}}
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == 2
    assert "other settings" in capsys.readouterr().out


def test_new_faults_fail(tmp_path):
    before = {**BEFORE, "rows": [{"kind": "Exact", "content": "zeros", "faults": []}]}
    now = {**BEFORE, "rows": [{"kind": "Exact", "content": "zeros", "faults": ["one"]}]}
    (change,) = regression.changes("random_arrays", before, now)
    assert change.growth == float("inf")
