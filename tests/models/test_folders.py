"""Tests of folders that appear complete or not at all, also when processes are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from models.folders import atomic_folder, scratch_folder

REPOSITORY = Path(__file__).parents[2]


def at_work(folder):
    """Starts a process that is at work in a scratch folder, and returns it with the folder."""
    code = (
        "import pathlib, sys, time\n"
        "from models.folders import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1]), '.work-') as scratch:\n"
        "    print(scratch, flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_and_of_a_living_process_is_not(tmp_path):
    users = tmp_path / ".work-of-a-user"
    users.mkdir()
    (users / "file").touch()
    (killed, left), (living, used) = at_work(tmp_path), at_work(tmp_path)
    with killed, living:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        with scratch_folder(tmp_path, ".work-") as scratch:
            assert {path.name for path in tmp_path.iterdir()} == {
                users.name,
                used.name,
                scratch.name,
            }
        living.kill()
    assert not scratch.exists()


def test_a_folder_appears_complete(tmp_path):
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("1")
        assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert os.listdir(tmp_path / "model") == ["weights"]


def test_an_error_leaves_nothing(tmp_path):
    def write():
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text("1")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").touch()
    with (
        pytest.raises(FileExistsError, match="is not empty: name another folder"),
        atomic_folder(tmp_path / "model"),
    ):
        pass


def test_folders_of_other_names_are_left_alone(tmp_path):
    kept = [tmp_path / name for name in (".a-b-12345678", ".ax12345678", ".a[x]-12345678")]
    removed = tmp_path / ".a-12345678"
    for folder in (*kept, removed):
        folder.mkdir()
        (folder / "in-progress.lock").touch()
    with scratch_folder(tmp_path, ".a-"):
        assert [folder.exists() for folder in (*kept, removed)] == [True, True, True, False]
    with scratch_folder(tmp_path, ".a[x]-"):
        assert not kept[2].exists()
