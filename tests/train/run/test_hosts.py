"""Several processes that train together, as real processes on this machine."""

import dataclasses
import signal
import socket

import jax
import numpy as np
import pytest

from tests.train.runs import (
    STEPS,
    finish,
    make_config,
    saved_steps,
    start_pretraining,
    wait_for_step,
    write_text,
)
from train.run import hosts
from train.run.metrics import read_metrics
from train.run.sharding import batch_sharding, make_mesh, rows_of_process

EXACT = {"method": "exact", "compute_dtype": "float32", "distributed": True}


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def start_processes(*configs):
    """Starts one process for each of the settings, which find each other by the environment."""
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(len(configs)),
    }
    return [
        start_pretraining(config, **environment, JAX_PROCESS_ID=str(i))
        for i, config in enumerate(configs)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """A run of one process."""
    config = make_config(folder, "one", method="exact", compute_dtype="float32")
    finish(start_pretraining(config))
    return config


def losses_of(folder):
    lines = read_metrics(folder / "metrics.jsonl")
    return [line.get("loss", line.get("validation_loss")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, ""), (4, "data=2,fsdp=2")])
def test_several_processes_train_as_one(folder, alone, count, mesh):
    config = dataclasses.replace(alone, out=folder / f"{count}", distributed=True, mesh=mesh)
    first, *others = finish(*start_processes(*[config] * count))
    assert f"done at step {STEPS}" in first
    assert not any("loss" in text for text in others)
    got, want = losses_of(config.out), losses_of(alone.out)
    assert len(got) == len(want)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    # One set of files.
    one, other = ({path.name for path in x.out.iterdir()} for x in (config, alone))
    assert one == other


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_run_of_all_which_goes_on_with_other_devices(folder):
    config = make_config(folder, "stopped", **EXACT, steps=500, save_every=100)
    processes = start_processes(config, config)
    wait_for_step(processes[0], config.out, 3)
    processes[1].send_signal(signal.SIGTERM)
    text, _ = finish(*processes)
    assert "stopped by a signal to another process, saved at step" in text
    (step,) = saved_steps(config.out)
    further = dataclasses.replace(
        config, distributed=False, mesh="fsdp=4", resume=True, steps=step + 2
    )
    (text,) = finish(start_pretraining(further))
    assert f"resuming from step {step}" in text
    steps = [line["step"] for line in read_metrics(config.out / "metrics.jsonl") if "loss" in line]
    assert steps == [*range(1, step + 3)]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_a_message(folder):
    config = make_config(folder, "killed", **EXACT, steps=500)
    processes = start_processes(config, config)
    wait_for_step(processes[0], config.out, 5)
    processes[1].kill()
    text = processes[0].communicate(timeout=120)[0]
    assert processes[0].returncode != 0
    assert "another task died" in text or "another process of this run has ended" in text
    assert saved_steps(config.out)


@pytest.mark.slow
def test_processes_that_differ_fail_together(folder):
    config = make_config(folder, "differ", **EXACT)
    elsewhere = dataclasses.replace(config.data, data="/no.txt")
    for changes, message in (
        ({"out": folder / "elsewhere"}, "differ in `--out`"),
        ({"seed": 1}, "differ in `--seed`"),
        ({"data": elsewhere}, "process 1 of 2: `--data` is '/no.txt'"),
    ):
        processes = start_processes(config, dataclasses.replace(config, **changes))
        assert all(message in text for text in finish(*processes, code=2))
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
    ("count", "number", "address", "message"),
    [
        ("2", None, None, "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is not set"),
        ("2", "0", "here", "JAX_COORDINATOR_ADDRESS must be HOST:PORT, got 'here'"),
        ("2", "2", "a:1", "JAX_PROCESS_ID must be from 0 to JAX_NUM_PROCESSES - 1, got '2' of '2'"),
        ("2", "1", "127.0.0.1:{port}", "no process answers at 127.0.0.1:"),
    ],
)
def test_processes_that_cannot_join_are_told_what_to_set(
    monkeypatch, count, number, address, message
):
    monkeypatch.setattr(hosts, "JOIN_SECONDS", 0.1)
    for name, value in (("JAX_NUM_PROCESSES", count), ("JAX_PROCESS_ID", number),
                        ("JAX_COORDINATOR_ADDRESS", address)):  # fmt: skip
        if value is not None:
            monkeypatch.setenv(name, value.format(port=free_port()))
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
