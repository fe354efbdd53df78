"""Checkpoints: equal bits after a restore, identities, damaged files."""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny import CONFIG as MODEL

from models import digests
from train.run.checkpoint import Checkpoints
from train.run.recipe import make_recipe
from train.run.saved_settings import as_json
from train.run.step import init_state
from train.settings.config import PretrainConfig

IDENTITY = as_json({"model": MODEL, "seed": 0})
SMALL = {"w": np.arange(6, dtype=np.float32)}


def like(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


@contextlib.contextmanager
def opened(folder: pathlib.Path, keep: int = 3):
    with contextlib.closing(Checkpoints(folder, keep)) as checkpoints:
        yield checkpoints


def save(folder: pathlib.Path, *steps: int, state=SMALL) -> None:
    with opened(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, jax.device_put(state), {"next": step}, IDENTITY)


def rewrite(folder: pathlib.Path, step: int, identity) -> None:
    """Changes the identity of a checkpoint, as earlier versions wrote it: without digests."""
    (folder / f"{step}/identity/metadata").write_text(json.dumps(identity))
    (folder / f"{step}/digests.json").unlink(missing_ok=True)


def test_a_restored_state_has_equal_bits_and_a_step_is_saved_once(tmp_path):
    state = jax.jit(functools.partial(init_state, make_recipe(PretrainConfig("exact"), MODEL)))()
    with opened(tmp_path, keep=2) as first:
        assert first.latest_step() is None
        for step in (1, 2, 3):
            first.save(step, state, {"next": step}, IDENTITY)
        first.save(3, state, {"next": 4}, IDENTITY)
    with opened(tmp_path) as again:
        assert again.latest_step() == 3
        restored, position = again.restore(3, like(state), IDENTITY)
    assert position == {"next": 3}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1)
    return folder


def of_model(**changes):
    return {"model": IDENTITY["model"] | changes}


def optimizer(**settings):
    return {"optimizer": settings}


OLDER = {"model": {k: v for k, v in IDENTITY["model"].items() if k != "qk_norm"}}
TYPICAL = optimizer(in_backward=True, norm_estimate="typical")
NEAREST, STOCHASTIC = (optimizer(weight_rounding=x) for x in ("nearest", "stochastic"))
FULL, GALORE = optimizer(method="any full-rank method"), optimizer(method="galore")
FORMER_FULL, FORMER = optimizer(method="one of full rank"), optimizer(method="frugal_subspace")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        # A setting that is newer than the checkpoint counts as off.
        (OLDER, {}, None),
        (OLDER, of_model(qk_norm=True), r"model.qk_norm: False there, True now"),
        ({}, of_model(hidden_size=48), r"another run: model.hidden_size: 24 there, 48 now\. "),
        ({"removed": "nf4"}, {}, r"another run: removed: 'nf4' there, None now\. "),
        ({}, {"row_order": "shuffled"}, r"row_order: None there.*\. .*Finish the run with that"),
        (optimizer(in_backward=True), TYPICAL,
         r"norm_estimate: None there.*\. .*Finish the run with"),
        (TYPICAL, optimizer(in_backward=False),
         r"another run: optimizer.in_backward: True there, False now\. Pass the settings"),
        # Former names of methods.
        (FORMER_FULL, FULL, None),
        (FORMER_FULL, GALORE, "optimizer.method: 'any full-rank method' there, 'galore' now"),
        (FORMER, optimizer(method="lean_subspace"), None),
        (FORMER, GALORE, "optimizer.method: 'lean_subspace' there, 'galore' now"),
        # A run from before weights were rounded resumes only with rounding to nearest.
        (optimizer(rank=None), NEAREST, None),
        (optimizer(rank=None), STOCHASTIC,
         r"another run: optimizer.weight_rounding: 'nearest' there, 'stochastic' now\. "),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused_with_the_differences(saved, before, now, message):
    rewrite(saved, 1, {**IDENTITY, **before, "format": 2})
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with opened(saved) as checkpoints, refused:
        restored, _ = checkpoints.restore(1, like(SMALL), {**IDENTITY, **now})
        np.testing.assert_array_equal(restored["w"], SMALL["w"])


def test_a_checkpoint_of_in_backward_updates_with_former_names_is_restored(tmp_path):
    moments, norm = SMALL["w"], np.float32(2)
    former = {"model": moments + 1, "optimizer": {"optimizer": {"mu": moments}, "grad_norm": norm}}
    now = {"model": moments + 1, "norms": {"grad_norm": norm}, "optimizer": {"mu": moments}}
    save(tmp_path, 1, 2, state=former)
    rewrite(tmp_path, 1, IDENTITY)
    rewrite(tmp_path, 2, IDENTITY | {"format": 4})
    save(tmp_path, 3, state=now)
    with opened(tmp_path) as checkpoints:
        for step in (1, 3):
            restored, _ = checkpoints.restore(step, like(now), IDENTITY)
            jax.tree.map(np.testing.assert_array_equal, restored, now)
        with pytest.raises(ValueError, match="has format 4, which a newer version of this program"):
            checkpoints.restore(2, like(now), IDENTITY)


def test_identity_is_plain_json():
    assert json.loads(json.dumps(IDENTITY)) == IDENTITY
    assert IDENTITY["model"]["num_heads"] == 6


@pytest.mark.parametrize("item", ["state", "data", "identity"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(tmp_path, item):
    save(tmp_path, 1, 2)
    for file in (tmp_path / "2" / item).rglob("*"):
        if file.is_file() and file.stat().st_size:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with (
        opened(tmp_path) as again,
        pytest.raises(ValueError, match=r"2 cannot be read.*to resume from step 1\."),
    ):
        again.restore(2, like(SMALL), IDENTITY)


def test_the_checkpoints_of_the_least_losses_stay(tmp_path):
    def losses(training, **held_out):
        return {"losses": {"training": training, **held_out}}

    rows = {
        1: losses(5.0, held_out=5.2),
        2: losses(4.0, held_out=4.0),
        3: losses(3.9, held_out=4.1),
        4: losses(9.0, held_out=9.5),
        5: {},
    }
    with opened(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, jax.device_put(SMALL), rows[step], IDENTITY)
    assert Checkpoints(tmp_path, keep=1, read_only=True).steps() == [2, 3, 4]
    with opened(tmp_path, keep=1) as again:  # They are read from the folders.
        again.save(5, jax.device_put(SMALL), rows[5], IDENTITY)
        again.save(6, jax.device_put(SMALL), losses(1.0), IDENTITY)
        assert again.restore(2, like(SMALL), IDENTITY)[1] == rows[2]
    assert Checkpoints(tmp_path, keep=1, read_only=True).steps() == [2, 6]


def test_every_changed_bit_is_found_and_tells_the_array(tmp_path):
    save(tmp_path, 1, 2, state={"w": np.arange(100, dtype=np.float32), "b": SMALL["w"]})
    files = sorted(path for path in (tmp_path / "2").glob("*/**/*") if path.is_file())
    rng, found = np.random.default_rng(0), set()
    with opened(tmp_path) as again:
        assert again.check(2)
        for path in files:
            whole = path.read_bytes()
            data = bytearray(whole or b"\0")
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            path.write_bytes(data)
            name = re.escape(path.relative_to(tmp_path / "2").as_posix())
            message = rf"2 cannot be read.*\({name}.* is not what was.*resume from step 1\."
            with pytest.raises(ValueError, match=message) as raised:
                again.check(2)
            found |= set(re.findall(r"the array (\w+)", str(raised.value)))
            path.write_bytes(whole)
        assert found >= {"w", "b"}
        (tmp_path / "2" / "digests.json").unlink()
        with pytest.raises(ValueError, match=r"2 cannot be read.*its digests.json is missing"):
            again.check(2)


def test_a_checkpoint_of_an_earlier_version_is_restored(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(jax.device_put(SMALL)),
                data=ocp.args.JsonSave({"next": 3}),
                identity=ocp.args.JsonSave({**IDENTITY, "format": 2}),
            ),
        )
    with opened(tmp_path) as again:
        assert not again.check(3)
        restored, data = again.restore(3, like(SMALL), IDENTITY | {"base": {"x": "of now"}})
        again.save(4, restored, data, IDENTITY)
    np.testing.assert_array_equal(restored["w"], SMALL["w"])
    assert data == {"next": 3}


def test_another_base_is_refused_by_tensor(tmp_path):
    base = {"base": {"a": "1", "b": "2"}}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, jax.device_put(SMALL), {}, IDENTITY | base)
    with opened(tmp_path) as again:
        again.restore(1, like(SMALL), IDENTITY | base)
        message = "began with other weights than those of `--checkpoint`: b changed"
        with pytest.raises(ValueError, match=message):
            again.restore(1, like(SMALL), IDENTITY | {"base": {"a": "1", "b": "3"}})


def test_an_identity_that_is_no_object_is_damaged(saved):
    rewrite(saved, 1, [])
    message = r"damaged \(its identity is no object\)"
    with opened(saved) as again, pytest.raises(ValueError, match=message):
        again.restore(1, like(SMALL), IDENTITY)


def test_threads_that_still_read_a_damaged_checkpoint_say_nothing(tmp_path, monkeypatch):
    many = {f"w{i}": np.full((64, 64), i, np.int32) for i in range(40)}
    save(tmp_path, 1, state=many)
    rewrite(tmp_path, 1, IDENTITY)
    for i in range(40):
        shutil.rmtree(tmp_path / "1" / "state" / f"w{i}")
    said = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    with opened(tmp_path) as again:
        with pytest.raises(ValueError, match="cannot be read: it is damaged"):
            again.restore(1, like(many), IDENTITY)
        time.sleep(0.5)  # The threads go on.
    assert said == []


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_reads_on_after_a_save(tmp_path, monkeypatch, fails):
    if fails:
        folder = tmp_path / "1" / "state"
        monkeypatch.setattr(digests, "write", lambda *_, **__: os.listdir(folder))
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(FileNotFoundError, match=str(folder)))
        save(tmp_path, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "digests"]


def test_copies_of_checkpoints_and_rests_of_a_killed_save_do_no_harm(tmp_path):
    save(tmp_path, 1)
    for name in ("1.bak", "2.bak", "2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    save(tmp_path, 1, 2)
    with opened(tmp_path) as again:
        assert again.steps() == [1, 2]
        assert again.check(2)
    assert (tmp_path / "2.bak").is_dir()


def test_a_damaged_file_that_is_not_needed_is_not_mentioned(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("z")
    with opened(tmp_path) as again:
        again.restore(1, like(SMALL), IDENTITY)
    assert caplog.text == ""
