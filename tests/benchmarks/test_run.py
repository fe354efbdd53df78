"""Tests of the runner of benchmarks, and of the page and the pictures of their results."""

import copy
import dataclasses
import importlib
import json
import math
import pathlib
import re
import subprocess

import pytest
import tyro
from matplotlib.figure import Figure

from benchmarks import pictures, record, render, run
from benchmarks.ladder import with_time_to_loss
from benchmarks.tables import cell, markdown


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
    result, sources = result_of(repository), ("measured.py",)
    commit(repository, "other.py")
    assert render.staleness(result, sources, repository) == ""
    commit(repository, "measured.py")
    commit(repository, "measured.py")
    assert "2 commits have changed" in render.staleness(result, sources, repository)
    # The rows of several calls may be of several commits.
    new = result_of(repository)
    assert render.staleness(new, sources, repository) == ""
    rows = [new["environment"], result["environment"]]
    assert "2 commits have" in render.staleness(new | {"rows": rows}, sources, repository)


def test_a_result_of_changes_without_a_commit_and_of_an_unknown_commit(repository):
    result = result_of(repository, "-dirty")
    assert "changes that no commit has" in render.staleness(result, ("measured.py",), repository)
    (repository / "measured.py").write_text("3\n")
    clean = result_of(repository)
    assert "changes without a commit" in render.staleness(clean, ("measured.py",), repository)
    unknown = {"environment": {"commit": "0123abc"}}
    assert "is not known here" in render.staleness(unknown, ("measured.py",), repository)


def test_a_new_row_of_a_result_does_not_make_the_next_one_dirty(repository, monkeypatch):
    results = repository / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "trainers.json").write_text("1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "result")
    monkeypatch.setattr(record, "__file__", str(repository / "benchmarks" / "record.py"))
    (results / "trainers.json").write_text("2\n")
    assert record._commit() == git(repository, "rev-parse", "--short", "HEAD")
    (repository / "measured.py").write_text("3\n")
    assert record._commit().endswith("-dirty")


@pytest.mark.parametrize("name", run.JOBS)
def test_the_arguments_of_a_job_are_understood(name):
    job = run.JOBS[name]
    config = importlib.import_module(job.module).Config
    for arguments in (job.quick, job.full):
        if arguments is not None:
            tyro.cli(config, args=[*arguments], config=(tyro.conf.OmitArgPrefixes,))


def test_the_page_has_every_committed_result_and_says_which_are_stale(monkeypatch):
    monkeypatch.setattr(render, "_git", lambda *_: "abc def")
    text = render.page(record.RESULTS)
    for section in render.SECTIONS.values():
        assert f"## {section.title}\n" in text
        assert [s for s in section.sources if not (render.ROOT / s).exists()] == []
    assert "**Stale: measured at" in text
    assert "[bits.json](../../benchmarks/results/bits.json)" in text


def test_the_page_is_of_the_committed_results():
    """`python -m benchmarks.render` writes it again."""
    page = render.PAGE.read_text(encoding="utf-8")
    for name, made in re.findall(r"^\[.*\]\(../../(.*)\): .* commit (\S+),", page, re.MULTILINE):
        assert record.read(render.ROOT / name)["environment"]["commit"] == made


def test_links_to_results_of_deleted_studies_are_marked_as_historical():
    for path in (render.ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert path == render.PAGE or render.marked(text) == text, path
    link = "[bits.json](../../benchmarks/results/bits.json)"
    mark = f"{link} (historical, commit 1029ad4-dirty)"
    assert [render.marked(text) for text in (link, mark)] == [mark, mark]
    several = render.marked("[anybody.json](benchmarks/results/anybody.json)")
    assert render.marked(several) == several
    present = "[loss.json](../benchmarks/results/loss.json)"
    assert render.marked(f"{present} (historical, commit 1029ad4)") == present
    assert render.commit_of("anybody").startswith("commits 44e9e14, 5ddb045")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of"),
        ({"quick": True, "full": True}, "give one of"),
        ({"quick": True, "only": ("memori",)}, r"`--only`: unknown \['memori'\]"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        run.Config(**settings)


def test_seconds_to_the_loss_that_all_rungs_reach():
    def seconds(*runs):
        rows = with_time_to_loss(
            [
                {"curve": [{"seconds": 2.0 * i, "loss": x} for i, x in enumerate(losses, 1)]}
                for losses in runs
            ]
        )
        return rows[0]["common_loss"], [row["seconds_to_loss"] for row in rows]

    runs = (5.0, 3.0, 2.0), (4.0, 2.5, 2.6)
    assert seconds(*runs) == (2.5, [6.0, 4.0])
    assert seconds(*runs, (math.nan, math.inf, math.nan)) == (2.5, [6.0, 4.0, None])
    common, of_all = seconds((math.nan,))
    assert math.isnan(common)
    assert of_all == [None]


@dataclasses.dataclass(frozen=True)
class Settings:
    results: pathlib.Path
    tolerance: float = math.inf
    folder: pathlib.Path = pathlib.Path("/of/this/machine")


def test_results_are_json_with_their_environment(tmp_path):
    path = tmp_path / "new" / "figures.json"
    record.write(Settings(path), [{"rival": "plain", "seconds": (1.0, math.nan)}], rate=3.0)
    content = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    assert content["settings"] == {"tolerance": "inf", "folder": "machine"}
    assert content["rows"] == [{"rival": "plain", "seconds": [1.0, "nan"]}]
    assert content["rate"] == 3.0
    assert record.read(path) == content
    named = {"commit", "cores", "device", "python", "versions", "xla_flags"}
    assert named <= set(content["environment"])


def test_tables_show_missing_and_infinite_values():
    assert [cell(x, ".1f") for x in (1.25, None, "nan")] == ["1.2", "", "nan"]
    assert cell(2**30, ".1f", 2**20) == "1024.0"
    assert markdown([]) == "No rows."
    assert markdown([{"a": "1", "b": "2"}]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize("path", sorted(record.RESULTS.rglob("*.png")), ids=lambda path: path.name)
def test_pictures_are_of_the_committed_results(path):
    assert pictures.note(path) == ""


def test_a_picture_of_former_results_is_told(tmp_path):
    result, path = tmp_path / "loss.json", tmp_path / "loss.png"
    result.write_text("1")
    pictures.save(Figure(), path, (result,), dpi=10)
    assert pictures.note(path) == ""
    result.write_text("2")
    assert pictures.note(path) == "loss.png is older than its results, loss.json: draw it again."
    Figure().savefig(path)
    assert pictures.note(path) == "loss.png does not say which results it shows."


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_can_be_drawn(name):
    picture = pictures.PICTURES[name]
    results = [record.read(record.RESULTS / result) for result in picture.results]
    picture.draw(Figure(layout="constrained"), *results)


BEFORE = {
    "environment": {"versions": {"jax": "0.10"}},
    "settings": {"model": "llama_3m"},
    "rows": [
        {"rival": "plain", "peak": 1000, "matmul_flops": 10, "forward_and_backward": 100},
        {"rival": "lean", "peak": 500, "matmul_flops": 11},
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A repository of one result."""
    folder = tmp_path_factory.mktemp("results")
    git(folder, "init", "-q")
    (folder / "memory.json").write_text(json.dumps(BEFORE))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "results")
    return folder


def changed(rows=2, settings=BEFORE["settings"], **values):
    """Returns the first rows of the result, with other values in the second."""
    now = copy.deepcopy(BEFORE) | {"settings": settings}
    now["rows"][1] |= values
    now["rows"] = now["rows"][:rows]
    return now


@pytest.mark.parametrize(
    ("now", "is_worse"),
    [
        (changed(peak=505), False),
        (changed(peak=250), False),
        (changed(settings={"model": "llama_3m", "add": True}), False),
        (changed(peak=515), True),
        (changed(peak="nan"), True),  # As `record.write` has it: JSON has no NaN.
        (changed(peak=None), True),
        (changed(rows=1), True),
        (changed(settings={"model": "llama_9m"}), True),
        (None, True),
    ],
)
def test_a_growth_of_3_per_cent_and_a_missing_value_are_worse(results, now, is_worse):
    path = results / "memory.json"
    path.unlink(missing_ok=True)
    if now is not None:
        path.write_text(json.dumps(now))
    assert run.compare(results) is is_worse


def test_a_commit_without_the_result_is_named(repository):
    with pytest.raises(ValueError, match="the last commit has no result in"):
        run.compare(repository)


@pytest.mark.parametrize(
    ("before", "now", "is_worse"),
    [
        ([], ["one"], True),
        (None, ["one"], True),  # A row that the committed result does not have.
        (["one"], ["other"], True),
        (["one", "other"], ["one"], False),
        (["one"], None, True),
        (["one"] * 100, ["one"] * 101, True),
    ],
)
def test_new_faults_are_worse(before, now, is_worse):
    def result(faults):
        return {"rows": [] if faults is None else [{"processes": 1, "faults": faults}]}

    values = run.changes("soak", result(before), result(now))
    assert any(change.is_worse() for change in values) is is_worse
