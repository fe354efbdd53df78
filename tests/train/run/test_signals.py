"""Signals to stop: acknowledged within a moment, whatever the program does."""

import os
import signal
import subprocess
import sys

import pytest

from tests.train.runs import REPOSITORY

PROGRAM = """
import hashlib, signal, sys
from train.run.signals import StopSignal, ending_on_ctrl_c

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under `nohup`.

def work():
    print("ready", flush=True)
    # Python runs no handler before it returns, as in a compilation or a step.
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))

with ending_on_ctrl_c():
    if sys.argv[1] == "before":
        work()
    with StopSignal() as stop:
        if sys.argv[1] == "steps":
            work()
        print("saved", stop.requested, stop.name)
"""
MINUTES, MOMENT = 10**9, 10**6
"""Rounds of a hash."""


def start(part: str, rounds: int) -> subprocess.Popen:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, part, str(rounds)], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout.readline() == "ready\n"
    return program


def test_before_the_first_step_ctrl_c_ends_the_program_at_once():
    program = start("before", MINUTES)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=60) == ("", "interrupted\n")
    assert program.returncode == 130


@pytest.mark.parametrize("name", ["pretrain", "finetune", "evaluate", "plan"])
def test_while_a_program_imports_ctrl_c_ends_it_at_once(name, tmp_path):
    # In place of a package that is read from disk.
    (tmp_path / "jax.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(60)\n")
    program = subprocess.Popen(
        [sys.executable, "-m", f"train.{name}"], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=30) == ("", "interrupted\n")
    assert program.returncode == 130


def test_who_imports_the_package_keeps_their_handlers():
    # The tests may run where SIGINT is ignored.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import train;"
        " print(signal.getsignal(signal.SIGINT).__name__)"
    )
    line = [sys.executable, "-c", program, "-m"]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "default_int_handler\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_in_a_step_a_signal_is_acknowledged_at_once_and_a_second_one_ends(number):
    program = start("steps", MINUTES)
    program.send_signal(number)
    assert program.stderr.readline().startswith("stopping after this step, then saving")
    program.send_signal(signal.SIGTERM)
    assert program.communicate(timeout=60) == ("", "interrupted\n")
    assert program.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("times", [1, 2])
def test_one_signal_lets_the_run_save_also_if_the_group_gets_it_too(times):
    program = start("steps", MOMENT)
    for _ in range(times):
        program.send_signal(signal.SIGHUP)
    printed, said = program.communicate(timeout=60)
    assert printed == "saved True SIGHUP\n"
    assert len(said.splitlines()) == 1
    assert program.returncode == 0
