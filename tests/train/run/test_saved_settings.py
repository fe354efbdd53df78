"""The settings of a run in its folder, and which of them changed."""

import dataclasses
import json

from train.run.saved_settings import changed_settings, write_settings
from train.settings.config import PretrainConfig
from train.settings.options import MethodOptions


def test_changed_settings_are_named(tmp_path):
    before = PretrainConfig(method="subspace", steps=3, out=tmp_path)
    write_settings(tmp_path, before)
    assert changed_settings(tmp_path, before) == []
    after = dataclasses.replace(
        before, steps=5, resume=True, out=tmp_path / "a", options=MethodOptions(gap=7)
    )
    assert changed_settings(tmp_path, after) == ["options.gap: 200, now 7", "steps: 3, now 5"]


def test_a_former_name_of_the_method_is_no_change(tmp_path):
    write_settings(tmp_path, PretrainConfig(method="lean"))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": "frugal"}))
    assert changed_settings(tmp_path, PretrainConfig(method="lean")) == []
    assert changed_settings(tmp_path, PretrainConfig("exact")) == ["method: lean, now exact"]


def test_a_removed_setting_is_a_change_if_it_did_something_else(tmp_path):
    write_settings(tmp_path, PretrainConfig(method="subspace"))
    path = tmp_path / "settings.json"
    written = json.loads(path.read_text())
    written["options"] |= {"moments": "keep", "stagger": True, "group": 128, "bits": 0}
    written["options"].pop("codec")
    path.write_text(json.dumps(written | {"in_backward": False}))
    changed = changed_settings(tmp_path, PretrainConfig(method="subspace"))
    assert changed == ["options.stagger: True, now None"]


def test_missing_and_torn_settings_are_reported(tmp_path):
    unknown = ["unknown, since settings.json is missing or damaged"]
    assert changed_settings(tmp_path, PretrainConfig()) == unknown
    for text in ("{", "[]", "7", "[" * 100_000):
        (tmp_path / "settings.json").write_text(text)
        assert changed_settings(tmp_path, PretrainConfig()) == unknown
