"""Several processes that train together, as real processes on this machine."""

import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.train.runs import (
    REPOSITORY,
    STEPS,
    make_config,
    saved_steps,
    start_pretraining,
    wait_for_step,
    write_text,
)
from train.planning.tables import flags
from train.run import hosts
from train.run.metrics import read_metrics
from train.run.sharding import batch_sharding, make_mesh, rows_of_process

EXACT = {"method": "exact", "compute_dtype": "float32", "distributed": True}


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def start_processes(configs, devices=1, module="train.pretrain"):
    """Starts one process for each of the settings, which find each other by the environment."""
    port, processes = free_port(), []
    for i, config in enumerate(configs):
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(len(configs)),
            "JAX_PROCESS_ID": str(i),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *shlex.split(flags(config))],
                cwd=REPOSITORY, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    return processes


def ended(processes):
    """Returns what the processes printed, and their exit codes."""
    texts = [process.communicate(timeout=240)[0] for process in processes]
    return texts, [process.returncode for process in processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    write_text(folder)
    return folder


def losses_of(folder):
    lines = read_metrics(folder / "metrics.jsonl")
    return [line.get("loss", line.get("validation_loss")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, ""), (4, "data=2,fsdp=2")])
def test_several_processes_train_as_one(folder, count, mesh):
    one = make_config(folder, "one", method="exact", compute_dtype="float32")
    if not (one.out / "metrics.jsonl").exists():
        process = start_pretraining(one)
        assert process.wait(timeout=240) == 0, process.communicate()[0]
    together = dataclasses.replace(one, out=folder / f"{count}", distributed=True, mesh=mesh)
    texts, codes = ended(start_processes([together] * count))
    assert codes == [0] * count, "\n".join(texts)
    assert f"done at step {STEPS}" in texts[0]
    assert not any("loss" in text for text in texts[1:])
    np.testing.assert_allclose(losses_of(together.out), losses_of(one.out), rtol=1e-5)
    # One set of files.
    names = {path.name for path in together.out.iterdir()}
    assert names == {path.name for path in one.out.iterdir()}
    assert len(read_metrics(together.out / "metrics.jsonl")) == len(
        read_metrics(one.out / "metrics.jsonl")
    )


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_run_of_all_which_goes_on_with_other_devices(folder):
    config = make_config(folder, "stopped", **EXACT, steps=500, save_every=100)
    processes = start_processes([config] * 2)
    wait_for_step(processes[0], config.out, 3)
    processes[1].send_signal(signal.SIGTERM)
    texts, codes = ended(processes)
    assert codes == [0, 0], "\n".join(texts)
    assert "stopped by a signal to another process, saved at step" in texts[0]
    (step,) = saved_steps(config.out)
    alone = dataclasses.replace(
        config, distributed=False, mesh="fsdp=4", resume=True, steps=step + 2
    )
    process = start_pretraining(alone)
    text = process.communicate(timeout=240)[0]
    assert process.returncode == 0, text
    assert f"resuming from step {step}" in text
    steps = [line["step"] for line in read_metrics(config.out / "metrics.jsonl") if "loss" in line]
    assert steps == [*range(1, step + 3)]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_a_message(folder):
    config = make_config(folder, "killed", **EXACT, steps=500)
    processes = start_processes([config] * 2)
    wait_for_step(processes[0], config.out, 5)
    processes[1].kill()
    text = processes[0].communicate(timeout=120)[0]
    assert processes[0].returncode != 0
    assert "another task died" in text or "another process of this run has ended" in text
    assert saved_steps(config.out)


@pytest.mark.slow
def test_processes_that_differ_fail_together(folder):
    config = make_config(folder, "differ", **EXACT)
    for other, message in (
        (dataclasses.replace(config, out=folder / "elsewhere"), "differ in `--out`"),
        (dataclasses.replace(config, seed=1), "differ in `--seed`"),
        (
            dataclasses.replace(config, data=dataclasses.replace(config.data, data="/no.txt")),
            "process 1 of 2: `--data` is '/no.txt'",
        ),
    ):
        texts, codes = ended(start_processes([config, other]))
        assert codes == [2, 2], "\n".join(texts)
        assert all(message in text for text in texts)
        assert not config.out.exists()


def test_a_single_process_needs_no_agreement(tmp_path):
    agreement = hosts.Agreement()
    assert [agreement.any(flag) for flag in (False, True)] == [False, True]
    with pytest.raises(ValueError, match=r"^mine$"), hosts.failing_together():
        raise ValueError("mine")
    assert hosts.main_first(lambda: 3) == 3
    hosts.check_equal({"a": 1})
    hosts.check_shared(tmp_path)
    assert rows_of_process(make_mesh("fsdp=4"), 8) == (0, 1)
    placed = hosts.place(np.ones((4, 2)), batch_sharding(make_mesh("fsdp=4")))
    assert isinstance(placed, jax.Array)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is not set"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "here"},
            "JAX_COORDINATOR_ADDRESS must be HOST:PORT, got 'here'",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_PROCESS_ID must be from 0 to JAX_NUM_PROCESSES - 1, got '2' of '2'",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1",
             "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"},
            "no process answers at 127.0.0.1:",
        ),
    ],
)  # fmt: skip
def test_processes_that_cannot_join_are_told_what_to_set(monkeypatch, environment, message):
    monkeypatch.setattr(hosts, "JOIN_SECONDS", 0.1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), hosts.joined(True):
        pass


def test_joining_leaves_sigterm_as_it_was(monkeypatch):
    def initialize(**_: object) -> None:  # As JAX does.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with hosts.joined(True):
        assert signal.getsignal(signal.SIGTERM) == before
