"""One run to a folder."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.train.runs import make_config, quiet, write_text
from train.pretrain import prepare
from train.run.lock import RunLock

REPOSITORY = pathlib.Path(__file__).parents[2]
HOLD = "import pathlib, sys, time; from train.run.lock import RunLock; \
lock = RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def test_a_lock_is_for_one_until_it_is_closed(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()}\)"):
        RunLock(tmp_path)
    first.close()
    RunLock(tmp_path).close()


def test_a_killed_process_leaves_no_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=rf"`--out` .* \(process {process.pid}\): wait until"):
        RunLock(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    RunLock(tmp_path).close()


def test_a_second_run_writes_nothing_into_the_folder(tmp_path):
    write_text(tmp_path)
    config = make_config(tmp_path, resume=True)
    config.out.mkdir()
    (config.out / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    first = RunLock(config.out)
    with pytest.raises(ValueError, match="in use by another run"):
        prepare(config, quiet())
    first.close()
    assert sorted(x.name for x in config.out.iterdir()) == ["lock", "metrics.jsonl"]
    assert '"step": 9' in (config.out / "metrics.jsonl").read_text()
