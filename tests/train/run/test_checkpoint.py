"""Checkpoints: equal bits after a restore, identities, damaged files."""

import functools
import json
import shutil
import time

import jax
import numpy as np
import pytest
from tiny import CONFIG as MODEL

from train.run.checkpoint import Checkpoints, identity_of
from train.run.recipe import make_recipe
from train.run.step import init_state
from train.settings.config import PretrainConfig

IDENTITY = identity_of(model=MODEL, seed=0)


@pytest.fixture(scope="module")
def state():
    return jax.jit(functools.partial(init_state, make_recipe(PretrainConfig("exact"), MODEL)))()


def like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def test_a_restored_state_has_equal_bits(tmp_path, state):
    first = Checkpoints(tmp_path, keep=2)
    assert first.latest_step() is None
    for step in (1, 2, 3):
        first.save(step, state, {"next": step}, IDENTITY)
    first.close()
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest_step() == 3
    restored, position = again.restore(3, like(state), IDENTITY)
    assert position == {"next": 3}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    again.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_a_step_is_saved_once(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {"position": 1}, IDENTITY)
    checkpoints.save(1, state, {"position": 2}, IDENTITY)
    assert checkpoints.restore(1, like(state), IDENTITY)[1] == {"position": 1}
    checkpoints.close()


def test_a_setting_that_is_newer_than_the_checkpoint_counts_as_off(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    model = IDENTITY["model"]
    newer = ("qk_norm", "sliding_window")
    before = {**IDENTITY, "model": {k: v for k, v in model.items() if k not in newer}}
    checkpoints.save(1, state, {}, before)
    checkpoints.restore(1, like(state), IDENTITY)
    with pytest.raises(ValueError, match=r"model.qk_norm: False there, True now"):
        checkpoints.restore(1, like(state), {**IDENTITY, "model": model | {"qk_norm": True}})
    checkpoints.close()


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, IDENTITY)
    other = {"model": IDENTITY["model"] | {"hidden_size": 48}, "seed": 0}
    with pytest.raises(ValueError, match=r"another run: model.hidden_size: 24 there, 48 now\. "):
        checkpoints.restore(1, like(state), other)
    checkpoints.save(2, state, {}, {**IDENTITY, "removed": "nf4"})
    with pytest.raises(ValueError, match=r"another run: removed: 'nf4' there, None now\. "):
        checkpoints.restore(2, like(state), IDENTITY)
    checkpoints.close()


def test_a_checkpoint_with_another_order_of_rows_is_refused_with_the_reason(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, IDENTITY)
    now = {**IDENTITY, "row_order": "shuffled"}
    with pytest.raises(ValueError, match=r"row_order: None there.*\. .*Finish the run with that"):
        checkpoints.restore(1, like(state), now)
    checkpoints.close()


def test_a_checkpoint_with_another_estimate_of_the_norm_is_refused_with_the_reason(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, {**IDENTITY, "optimizer": {"in_backward": True}})
    now = {"in_backward": True, "norm_estimate": "typical"}
    with pytest.raises(ValueError, match=r"norm_estimate: None there.*\. .*Finish the run with"):
        checkpoints.restore(1, like(state), {**IDENTITY, "optimizer": now})
    checkpoints.save(2, state, {}, {**IDENTITY, "optimizer": now})
    after = r"another run: optimizer.in_backward: True there, False now\. Pass the settings"
    with pytest.raises(ValueError, match=after):
        checkpoints.restore(2, like(state), {**IDENTITY, "optimizer": {"in_backward": False}})
    checkpoints.close()


def test_a_checkpoint_of_in_backward_updates_with_former_names_is_restored(tmp_path):
    moments, norm = np.arange(6.0).reshape(2, 3), np.float32(2)
    former = {"model": moments + 1, "optimizer": {"optimizer": {"mu": moments}, "grad_norm": norm}}
    now = {"model": moments + 1, "norms": {"grad_norm": norm}, "optimizer": {"mu": moments}}
    former, now = jax.device_put((former, now))
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, former, {}, IDENTITY)
    checkpoints.save(2, former, {}, IDENTITY)
    checkpoints.close()
    for path, changes in ((tmp_path / "1", {}), (tmp_path / "2", {"format": 3})):
        path /= "identity/metadata"
        identity = json.loads(path.read_text())
        assert identity.pop("format") == 2
        path.write_text(json.dumps(identity | changes))
    checkpoints = Checkpoints(tmp_path, keep=3)
    restored, _ = checkpoints.restore(1, like(now), IDENTITY)
    jax.tree.map(np.testing.assert_array_equal, restored, now)
    checkpoints.save(3, now, {}, IDENTITY)
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(3, like(now), IDENTITY)[0], now)
    with pytest.raises(ValueError, match="has format 3, which a newer version of this program"):
        checkpoints.restore(2, like(now), IDENTITY)
    checkpoints.close()


def test_former_names_of_methods_in_an_identity_are_understood(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, (former, now) in enumerate(
        (("one of full rank", "any full-rank method"), ("frugal_subspace", "lean_subspace"))
    ):
        checkpoints.save(step, state, {}, {**IDENTITY, "optimizer": {"method": former}})
        checkpoints.restore(step, like(state), {**IDENTITY, "optimizer": {"method": now}})
        other = {**IDENTITY, "optimizer": {"method": "galore"}}
        with pytest.raises(ValueError, match=f"optimizer.method: '{now}' there, 'galore' now"):
            checkpoints.restore(step, like(state), other)
    checkpoints.close()


def test_a_run_from_before_weights_were_rounded_resumes_only_with_rounding_to_nearest(
    tmp_path, state
):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, {**IDENTITY, "optimizer": {"rank": None}})
    now = {**IDENTITY, "optimizer": {"rank": None, "weight_rounding": "nearest"}}
    checkpoints.restore(1, like(state), now)
    now["optimizer"]["weight_rounding"] = "stochastic"
    message = r"another run: optimizer.weight_rounding: 'nearest' there, 'stochastic' now\. "
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(1, like(state), now)
    checkpoints.close()


def test_identity_is_plain_json():
    assert json.loads(json.dumps(IDENTITY)) == IDENTITY
    assert IDENTITY["model"]["num_heads"] == 6


@pytest.mark.parametrize("item", ["state", "data", "identity"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(tmp_path, state, item):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state, {"next": step}, IDENTITY)
    checkpoints.close()
    for file in (tmp_path / "2" / item).rglob("*"):
        if file.is_file() and file.stat().st_size:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = Checkpoints(tmp_path, keep=2)
    with pytest.raises(ValueError, match=r"2 cannot be read.*to resume from step 1\."):
        again.restore(2, like(state), IDENTITY)
    again.close()


def test_an_identity_that_is_no_object_is_damaged(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, IDENTITY)
    checkpoints.close()
    (path,) = tmp_path.glob("1/identity/metadata")
    path.write_text("[]")
    again = Checkpoints(tmp_path, keep=2)
    with pytest.raises(ValueError, match=r"damaged \(its identity is no object\)"):
        again.restore(1, like(state), IDENTITY)
    again.close()


def test_threads_that_still_read_a_damaged_checkpoint_say_nothing(tmp_path, monkeypatch):
    many = {f"w{i}": jax.device_put(np.full((64, 64), i)) for i in range(40)}
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, many, {}, IDENTITY)
    checkpoints.close()
    shutil.rmtree(tmp_path / "1" / "state" / "d")
    again, said = Checkpoints(tmp_path, keep=2), []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        again.restore(1, like(many), IDENTITY)
    time.sleep(0.5)  # The threads go on.
    assert said == []
    again.close()
