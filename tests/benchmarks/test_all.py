"""Tests of the command that runs all benchmarks: arguments, page, old results, regressions."""

import copy
import importlib
import json
import pathlib
import re
import subprocess

import numpy as np
import pytest
import tyro
from matplotlib.figure import Figure

from benchmarks import all as all_benchmarks
from benchmarks import picture, record, regression, staleness
from benchmarks.jobs import JOBS
from benchmarks.ladder import with_time_to_loss
from benchmarks.tables import cell

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
    # The rows of several calls may be of several commits.
    new = result_of(repository)
    assert staleness.note(new, sources, repository) == ""
    rows = [new["environment"], result["environment"]]
    assert "2 commits have" in staleness.note(new | {"rows": rows}, sources, repository)


def test_a_result_of_changes_without_a_commit_and_of_an_unknown_commit(repository):
    result = result_of(repository, "-dirty")
    assert "changes that no commit has" in staleness.note(result, ("measured.py",), repository)
    (repository / "measured.py").write_text("3\n")
    clean = result_of(repository)
    assert "changes without a commit" in staleness.note(clean, ("measured.py",), repository)
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
        (
            {"quick": True, "only": ("memori",)},
            "'memori', which is not a benchmark. Choose from ladder",
        ),
        ({"quick": True, "only": ()}, "needs a name. Choose from ladder"),
        ({"render": True, "only": ("memory",)}, "of no use with `--render`"),
        ({"full": True, "only": ("gpu",)}, "no run with `--full`: `python -m benchmarks.gpu`"),
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
    rows = with_time_to_loss([row(5.0, 3.0, 2.0), row(4.0, 2.5, 2.6), row(np.nan, np.inf, np.nan)])
    assert [r["seconds_to_loss"] for r in rows] == [6.0, 4.0, None]
    (row,) = with_time_to_loss([row(np.nan)])
    assert np.isnan(row["common_loss"])
    assert row["seconds_to_loss"] is None


def test_tables_show_what_is_missing_or_not_finite():
    assert [cell(x, ".1f") for x in (1.25, None, "nan")] == ["1.2", "", "nan"]


def test_the_page_is_of_the_committed_results():
    """`benchmarks.all --render` writes it again."""
    page = all_benchmarks.PAGE.read_text(encoding="utf-8")
    for name, commit in re.findall(r"^\[.*\]\(../../(.*)\): .* commit (\S+),", page, re.M):
        path = all_benchmarks.PAGE.parents[2] / name
        assert record.read(path)["environment"]["commit"] == commit


@pytest.mark.parametrize("path", sorted(record.RESULTS.rglob("*.png")), ids=lambda path: path.name)
def test_pictures_are_of_the_committed_results(path):
    assert picture.note(path) == ""


def test_a_picture_of_former_results_is_told(tmp_path):
    result, path = tmp_path / "loss.json", tmp_path / "loss.png"
    result.write_text("1")
    picture.save(Figure(), path, (result,), dpi=10)
    assert picture.note(path) == ""
    result.write_text("2")
    assert picture.note(path) == "loss.png is older than its results, loss.json: draw it again."
    Figure().savefig(path)
    assert picture.note(path) == "loss.png does not say which results it shows."


BEFORE = {
    "environment": {"versions": {"jax": "0.10"}},
    "settings": {"model": "llama_3m"},
    "rows": [
        {"rival": "plain", "peak": 1000, "matmul_flops": 10, "forward_and_backward": 100},
        {"rival": "lean", "peak": 500, "matmul_flops": 11},
    ],
}


def compared(tmp_path, now, **flags):
    """Runs the check on a result, or on the text of a file, beside its committed form."""
    git(tmp_path, "init", "-q")
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(BEFORE))
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "results")
    path.write_text(now if isinstance(now, str) else json.dumps(now))
    regression.judge(regression.Config(folder=tmp_path, **flags))


@pytest.mark.parametrize(("growth", "worse"), [(1.0, 0), (1.01, 0), (1.03, 1), (0.5, 0)])
def test_a_planted_loss_of_3_per_cent_fails(tmp_path, growth, worse, capsys):
    now = copy.deepcopy(BEFORE)
    now["rows"][1]["peak"] *= growth
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == worse
    assert f"5 values compared with HEAD, {worse} worse" in capsys.readouterr().out


def changed(rows, **values):
    """Returns the first rows of the result, with other values in the second."""
    now = copy.deepcopy(BEFORE)
    now["rows"][1] |= values
    now["rows"] = now["rows"][:rows]
    return now


@pytest.mark.parametrize(
    "now",
    [
        changed(2, peak="nan"),  # As `record.write` has it: JSON has no NaN.
        changed(2, peak=None),
        changed(1),
        changed(0),
    ],
    ids=["nan", "none", "row", "all rows"],
)
def test_a_value_that_vanished_or_became_nan_fails(tmp_path, now):
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ("{", "memory.json: it is not JSON"),
        ("[]", "memory.json: it is not a result of a benchmark"),
        ('{"rows": []}', "memory.json: it is not a result of a benchmark"),
        ("[" * 10**5, "memory.json: it is not JSON"),
        (BEFORE | {"rows": [[]]}, "memory.json: it is not a result of a benchmark"),
        (BEFORE | {"rows": BEFORE["rows"] * 2}, "memory.json: it has two rows of 'plain'"),
        *(
            (changed(2, peak=peak), "memory.json: a value is not a number")
            for peak in ("much", "12", "-inf", -5, True)
        ),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path, now, message):
    with pytest.raises(ValueError, match=message):
        compared(tmp_path, now)


def test_settings_without_influence_may_differ(tmp_path, capsys):
    now = copy.deepcopy(BEFORE)
    now["settings"]["jobs"] = 16
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == 0
    assert "5 values compared" in capsys.readouterr().out


def test_an_unknown_commit_is_named(repository):
    with pytest.raises(ValueError, match="`--against` 'nothing' is not a commit"):
        regression.Config(folder=repository, against="nothing")


def test_other_settings_fail(tmp_path, capsys):
    now = copy.deepcopy(BEFORE) | {"settings": {"model": "llama_9m"}}
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, now)
    assert ended.value.code == 1
    assert "other settings" in capsys.readouterr().out


def test_a_result_that_vanished_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "exists", lambda _: False)
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, BEFORE)
    assert ended.value.code == 1
    assert "memory: HEAD has it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ([], ["one"], True),
        (None, ["one"], True),  # A row that the committed result does not have.
        (["one"], ["other"], True),
        (["one", "other"], ["one"], False),
        (["one"], None, True),
        (["one"] * 100, ["one"] * 101, True),
    ],
)
def test_new_faults_fail(before, now, worse):
    def result(faults):
        row = {"kind": "Exact", "content": "zeros", "faults": faults}
        return {**BEFORE, "rows": [] if faults is None else [row]}

    found = regression.changes("random_arrays", result(before), result(now))
    assert any(change.is_worse(0.02) for change in found) is worse
