"""What a run was told, and what it was told anew."""

import dataclasses

from train.config import PretrainConfig
from train.methods import MethodOptions
from train.settings import changed_settings, write_settings


def test_what_changed_is_named_and_what_does_not_matter_is_not(tmp_path):
    before = PretrainConfig(steps=3, out=tmp_path)
    write_settings(tmp_path, before)
    assert changed_settings(tmp_path, before) == []
    after = dataclasses.replace(
        before, steps=5, resume=True, out=tmp_path / "a", options=MethodOptions(gap=7)
    )
    assert changed_settings(tmp_path, after) == ["options.gap: 200, now 7", "steps: 3, now 5"]


def test_settings_that_are_not_there_or_torn_have_not_changed(tmp_path):
    assert changed_settings(tmp_path, PretrainConfig()) == []
    (tmp_path / "settings.json").write_text("{")
    assert changed_settings(tmp_path, PretrainConfig()) == []
