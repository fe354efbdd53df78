"""One run to a folder."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.train.runs import make_config, quiet, write_text
from train.pretrain import prepare
from train.run.lock import run_lock

REPOSITORY = pathlib.Path(__file__).parents[3]
HOLD = "import pathlib, sys, time; from train.run.lock import run_lock; \
lock = run_lock(pathlib.Path(sys.argv[1])); lock.__enter__(); \
print('held', flush=True); time.sleep(600)"


def test_a_lock_is_for_one_until_it_is_closed(tmp_path):
    message = rf"in use by another run \(process {os.getpid()}\)"
    with run_lock(tmp_path), pytest.raises(ValueError, match=message), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    message = rf"`--out` .* \(process {process.pid}\): wait until"
    with pytest.raises(ValueError, match=message), run_lock(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with run_lock(tmp_path):
        pass


def test_a_second_run_writes_nothing_into_the_folder(tmp_path):
    write_text(tmp_path)
    config = make_config(tmp_path, resume=True)
    config.out.mkdir()
    (config.out / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    with run_lock(config.out), pytest.raises(ValueError, match="in use by another run"):
        prepare(config, quiet())
    assert sorted(x.name for x in config.out.iterdir()) == ["lock", "metrics.jsonl"]
    assert '"step": 9' in (config.out / "metrics.jsonl").read_text()
