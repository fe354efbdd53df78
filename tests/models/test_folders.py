"""Tests of folders that appear complete or not at all, also when processes are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from models.folders import atomic_folder, scratch_folder

REPOSITORY = Path(__file__).parents[2]


# The module alone: a process that imports the package imports JAX.
AT_WORK = """
import pathlib, runpy, sys, time
scratch_folder = runpy.run_path("models/folders.py")["scratch_folder"]
with scratch_folder(pathlib.Path(sys.argv[1]), ".work-") as scratch:
    print(scratch, flush=True)
    time.sleep(60)
"""


def test_the_folder_of_a_killed_process_is_removed_and_of_a_living_process_is_not(tmp_path):
    users = tmp_path / ".work-of-a-user"
    users.mkdir()
    (users / "file").touch()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AT_WORK, str(tmp_path)],
            cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    (killed, living), folders = processes, [Path(p.stdout.readline().strip()) for p in processes]
    with killed, living:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert folders[0].exists()
        with scratch_folder(tmp_path, ".work-") as scratch:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {users.name, folders[1].name, scratch.name}
        living.kill()
    assert not scratch.exists()


def test_a_folder_appears_complete_and_not_after_an_error(tmp_path):
    def write(name, error=None):
        with atomic_folder(tmp_path / name) as folder:
            (folder / "weights").write_text("1")
            assert not (tmp_path / name).exists()
            if error is not None:
                raise error

    write("model")
    with pytest.raises(KeyError):
        write("other", KeyError())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert os.listdir(tmp_path / "model") == ["weights"]


def test_folders_of_other_names_are_left_alone(tmp_path):
    others = [tmp_path / name for name in (".a-b-12345678", ".ax12345678", ".a[x]-12345678")]
    removed = tmp_path / ".a-12345678"
    for folder in (*others, removed):
        folder.mkdir()
        (folder / "in-progress.lock").touch()
    with scratch_folder(tmp_path, ".a-"):
        assert [folder.exists() for folder in (*others, removed)] == [True, True, True, False]
    with scratch_folder(tmp_path, ".a[x]-"):
        assert not others[2].exists()
