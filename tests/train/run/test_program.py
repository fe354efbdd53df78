"""How programs print and end, and what they say of the machine."""

import errno
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from tests.train.runs import REPOSITORY, command_line, make_config, saved_steps, write_text
from train.run import program

LARGEST = 300_000  # bytes: less than an array of the model.


def test_an_output_whose_reader_is_gone_is_dropped_with_a_line(capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        output = program._Output(stream)
        for _ in range(3):
            output.write("a line\n")
            output.flush()
        assert not output.isatty()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "the output cannot be written (Broken pipe): going on without it"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "No space left on device: x: free some space."),
        (errno.EMFILE, "Too many open files: x: allow more open files (`ulimit -n`)."),
        (errno.ENOENT, "[Errno 2] No such file or directory: 'x'"),
    ],
)
def test_limits_of_the_machine_are_described_with_a_cure(code, text):
    with pytest.raises(program.BadRunError) as raised:
        program.reporting_errors(
            lambda: (_ for _ in ()).throw(OSError(code, os.strerror(code), "x"))
        )
    assert str(raised.value) == text


def test_a_full_disk_is_named_by_the_folder_if_by_nothing_else():
    with pytest.raises(OSError, match="full") as raised, program.writing_into(pathlib.Path("run")):
        raise OSError(errno.ENOSPC, "full")
    assert program.described(raised.value) == "full: run: free some space."
    with pytest.raises(OSError, match="full") as raised, program.writing_into(pathlib.Path("run")):
        raise OSError(errno.ENOSPC, "full", "a file")
    assert raised.value.filename == "a file"


# 15 s of processor time: two runs in separate processes.
def test_a_run_goes_on_without_its_output_and_says_in_a_line_what_cannot_be_written(tmp_path):
    write_text(tmp_path)
    config = make_config(tmp_path, steps=4, method="exact", save_every=2, eval_every=4)
    command = [sys.executable, "-m", "train.pretrain", *command_line(config)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    options = {"cwd": REPOSITORY, "env": environment, "stderr": subprocess.PIPE, "text": True}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))

    stopped = subprocess.run(
        command, stdout=subprocess.DEVNULL, preexec_fn=limit, timeout=600, check=False, **options
    )
    assert stopped.returncode == 1
    (line,) = stopped.stderr.splitlines()[-1:]
    assert line.startswith("error: File too large: ")
    assert line.endswith(
        "was kept: there is none yet. To go on, allow larger files (`ulimit -f`) and pass"
        " `--resume`."
    )
    assert "Traceback" not in stopped.stderr
    assert saved_steps(config.out) == []
    running = subprocess.Popen([*command, "--resume"], stdout=subprocess.PIPE, **options)
    running.stdout.readline()
    running.stdout.close()
    _, said = running.communicate(timeout=600), running.stderr
    assert running.returncode == 0, said
    assert saved_steps(config.out) == [2, 4]
    assert (config.out / "model").is_dir()
