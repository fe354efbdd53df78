"""Tests of benchmarks/kernel_check.py and of the parts of benchmarks/gpu that need no GPU."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import config as gpu_config
from benchmarks.gpu import steps
from benchmarks.gpu.config import Config, case_units
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import check
from benchmarks.whole_step import summary


def small_cases():
    """The small cases of each kernel; all but the first are slow. `tests/kernels` tests kernels."""
    for name, (_, cases) in KERNELS.items():
        for i, case in enumerate(case for case in cases if case.small):
            marks = pytest.mark.slow if i else ()
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("name", "case"), small_cases())
def test_every_kernel_agrees_with_its_definition_in_float64(name, case):
    found = check(KERNELS[name].kernel, case, seed=3, implementation="interpreted")
    assert found["ok"], found


PLANTED = {
    "an unwritten result": lambda x: jnp.full_like(x, jnp.nan),
    "a tenth of a percent too large": lambda x: x * 1.001,
}


def with_program(kernel, program, monkeypatch):
    """Returns a kernel with another program for GPUs."""
    module = types.SimpleNamespace(refuses=lambda *args, **options: None)
    setattr(module, kernel.reference.__name__, program)
    monkeypatch.setitem(sys.modules, "other_program", module)
    return dataclasses.replace(kernel, pallas="other_program")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found(fault, monkeypatch):
    kernel, cases = KERNELS["rms_norm_backward"]
    case = next(case for case in cases if case.name == "three groups, dither")

    def wrong(*args, interpret, **options):
        del interpret
        return jax.tree.map(PLANTED[fault], kernel.reference(*args, **options))

    broken = with_program(kernel, wrong, monkeypatch)
    assert not check(broken, case, seed=3, implementation="interpreted")["ok"]


def test_sections_run_and_are_written(tmp_path, capsys):
    config = Config(sections=("kernels",), only=("adam_8bit",), results=tmp_path / "gpu.json")
    gpu.show(gpu.run(config))
    rows = json.loads(config.results.read_text())["kernels"]
    assert [row["ok"] for row in rows] == [True, True]
    assert "interpreted, without a GPU" in capsys.readouterr().out


def test_a_failing_kernel_does_not_stop_the_others_and_runs_again(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("out of registers")

    entry = KERNELS["adam_8bit"]
    kernel = with_program(entry.kernel, fail, monkeypatch)
    broken = KERNELS | {"adam_8bit": entry._replace(kernel=kernel)}
    config = Config(
        sections=("kernels",), only=("adam_8bit", "point_assignment"),
        results=tmp_path / "gpu.json",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(gpu_config, "KERNELS", broken)
        rows = gpu.run(config)["kernels"]
    assert [row["ok"] for row in rows] == [False, False, True, True]
    assert "out of registers" in rows[0]["failure"]
    again = gpu.run(dataclasses.replace(config, add=True))["kernels"]
    assert all(row["ok"] for row in again)
    assert [row for row in again if row in rows] == rows[2:]


@pytest.mark.slow
def test_parts_in_processes_are_the_whole(tmp_path):
    config = Config(
        sections=("kernels",), only=("adam_8bit", "point_assignment"), processes=2,
        results=tmp_path / "gpu.json",
    )  # fmt: skip
    rows = gpu.run(config, ["--only", *config.only])["kernels"]
    names = [(row["kernel"], row["case"]) for row in rows]
    assert names == [tuple(unit.values()) for unit in case_units(config)]
    assert all(row["ok"] for row in rows)
    # What is missing or failed is run again, and nothing else is lost.
    rows[1]["ok"] = False
    config.results.write_text(json.dumps({"kernels": rows, "rows": []}))
    again = dataclasses.replace(config, only=("adam_8bit",), add=True)
    others = gpu.run(again, ["--only", "adam_8bit"])["kernels"]
    assert [row["ok"] for row in others] == [True] * 4
    assert [a == b for a, b in zip(others, rows, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"only": ("quantise",)}, "quantise"),
        ({"rivals": ("fast",)}, "fast"),
        ({"cases": ("nosuch",)}, "`--cases`.*nosuch"),
        ({"processes": 0}, "`--processes`"),
        ({"memory_gib": -1}, "`--memory-gib`"),
        ({"part": (2, 2)}, "`--part`.* 2 2"),
    ],
)
def test_an_unknown_name_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Config(**setting)


def test_with_add_steps_of_another_size_are_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "_run", lambda config, folder, row: {"tokens": row["batch_size"]})
    rows = []
    for batch_size in (8, 4, 8):
        config = Config(models=("llama_3m",), rivals=("exact",), batch_size=batch_size)
        steps.time_steps(config, tmp_path, rows)
    assert [(row["batch_size"], row["rounds"]) for row in rows] == [
        (8, [{"tokens": 8}]),
        (4, [{"tokens": 4}]),
    ]


ROUND = {"seconds": [1.0, 3.0], "peak": None, "planned_peak": 2**30, "losses": [5.0, 4.0]}


def test_a_summary_has_medians_or_is_none_after_a_failure():
    one = summary([ROUND, {**ROUND, "seconds": [2.0]}])
    assert (one["seconds"], one["memory"], one["loss"]) == (2.0, 2**30, 4.0)
    assert summary([ROUND, {"failure": "no memory"}]) is None
    assert summary([]) is None
